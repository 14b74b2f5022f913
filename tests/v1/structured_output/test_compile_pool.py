import os
import sys
import threading
import time

import pytest

from vllm.v1.structured_output.compile_pool import (
    CompileBusyError,
    CompilePool,
    CompileTimeoutError,
)


@pytest.fixture
def release():
    """An event that stuck jobs wait for, set in the end."""
    event = threading.Event()
    yield event
    event.set()


def test_a_result_comes_through_the_future():
    pool = CompilePool(1, time_limit_s=5)
    assert pool.submit(lambda: 3).result(5) == 3
    pool.shutdown()


def test_a_base_exception_fails_the_job_and_not_the_thread():
    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("deep trie")

    pool = CompilePool(1, time_limit_s=5)
    assert isinstance(pool.submit(panic).exception(5), PanicException)
    assert pool.submit(lambda: "alive").result(5) == "alive"
    pool.shutdown()


def test_an_overdue_job_fails_while_its_thread_is_stuck(release):
    pool = CompilePool(2, time_limit_s=0.05)
    stuck = pool.submit(release.wait)
    assert isinstance(stuck.exception(5), CompileTimeoutError)
    assert pool.num_overdue == 1
    assert pool.submit(lambda: "other thread").result(5) == "other thread"
    pool.shutdown()


def test_jobs_are_refused_while_every_thread_is_stuck(release):
    pool = CompilePool(1, time_limit_s=0.05)
    pool.submit(release.wait).exception(5)
    with pytest.raises(CompileBusyError):
        pool.submit(lambda: None)
    pool.shutdown()


def test_queued_jobs_are_answered_when_every_thread_gets_stuck(release):
    pool = CompilePool(1, time_limit_s=0.05)
    pool.submit(release.wait)
    queued = pool.submit(lambda: None)
    assert isinstance(queued.exception(5), CompileBusyError)
    pool.shutdown()


def test_the_pool_recovers_when_an_overdue_job_returns(release):
    pool = CompilePool(1, time_limit_s=0.05)
    pool.submit(release.wait).exception(5)
    release.set()
    deadline = time.monotonic() + 5
    while pool.num_overdue and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.submit(lambda: "again").result(5) == "again"
    pool.shutdown()


def test_waiting_in_the_queue_does_not_count():
    pool = CompilePool(1, time_limit_s=0.2)
    jobs = [pool.submit(lambda: time.sleep(0.1)) for _ in range(4)]
    assert [job.exception(5) for job in jobs] == [None] * 4
    pool.shutdown()


def test_loading_a_library_does_not_count():
    pool = CompilePool(1, time_limit_s=0.05)

    def load() -> str:
        with pool.clock_stopped():
            time.sleep(0.2)
        return "loaded"

    assert pool.submit(load).result(5) == "loaded"
    pool.shutdown()


def test_a_spare_thread_takes_the_place_of_a_stuck_one(release):
    pool = CompilePool(1, time_limit_s=0.05, num_spares=2)
    for _ in range(2):
        pool.submit(release.wait).exception(5)
    assert pool.submit(lambda: "served").result(5) == "served"
    pool.submit(release.wait).exception(5)
    with pytest.raises(CompileBusyError):
        pool.submit(lambda: None)
    pool.shutdown()


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority there")
def test_an_overdue_job_loses_its_priority_and_later_jobs_do_not(release):
    pool = CompilePool(1, time_limit_s=0.05)
    thread_ids: list[int] = []

    def get_stuck() -> None:
        thread_ids.append(threading.get_native_id())
        release.wait()

    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    pool.submit(get_stuck).exception(5)
    assert os.getpriority(os.PRIO_PROCESS, thread_ids[0]) == 19
    release.set()
    deadline = time.monotonic() + 5
    while pool.num_overdue and time.monotonic() < deadline:
        time.sleep(0.01)
    assert pool.submit(niceness).result(5) == os.getpriority(os.PRIO_PROCESS, 0)
    pool.shutdown()


@pytest.mark.parametrize("num_spares", [0, 3])
def test_threads_do_not_grow_beyond_the_spares(release, num_spares):
    before = threading.active_count()
    pool = CompilePool(2, time_limit_s=0.02, num_spares=num_spares)
    for _ in range(20):
        try:
            pool.submit(release.wait).exception(5)
        except CompileBusyError:
            continue
    assert threading.active_count() - before <= 1 + 2 + num_spares
    pool.shutdown()


def test_shutdown_cancels_what_waits(release):
    pool = CompilePool(1, time_limit_s=60)
    pool.submit(release.wait)
    queued = pool.submit(lambda: None)
    pool.shutdown()
    assert queued.cancelled()
