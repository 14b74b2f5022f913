"""Threads that compile grammars, so that nobody waits for a slow one."""

import math
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_QUEUED_JOBS = 4096
# The lowest priority: what nobody waits for any more leaves the cores to the others.
OVERDUE_NICENESS = 19


class CompileTimeoutError(Exception):
    """A job has run for longer than the limit; its thread cannot be stopped."""


class CompileBusyError(Exception):
    """Every thread is stuck in an overdue job, or too many jobs are waiting."""


@dataclass
class _Job:
    work: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    started_at: float = 0.0
    native_thread_id: int = 0
    is_overdue: bool = False
    is_replaced: bool = False


class CompilePool:
    """A bounded number of daemon threads with a time limit for each job.

    A thread cannot be killed, so an overdue job keeps its thread until it returns; its
    future fails at the limit, the thread's priority sinks, and a spare thread takes its
    place. While all threads and spares are stuck, new jobs are refused. None of them
    keeps the process alive.

    Args:
        num_workers: jobs that run at the same time.
        time_limit_s: seconds that a job may run, not counting its wait in the queue.
        num_spares: overdue jobs whose threads are replaced.
    """

    def __init__(
        self, num_workers: int, time_limit_s: float, num_spares: int = 0
    ) -> None:
        self._num_workers = num_workers
        self._num_spares = num_spares
        self._time_limit_s = time_limit_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._running: dict[int, _Job] = {}
        self._num_missing = 0
        self._is_closed = False
        for target in [self._watch] + [self._run_jobs] * num_workers:
            _start_thread(target)

    @property
    def num_overdue(self) -> int:
        """Threads that are stuck in a job past the limit."""
        with self._changed:
            return self._num_stuck()

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Do something of the engine's own within a job: it has no time limit."""
        with self._changed:
            job = self._running[threading.get_ident()]
            job.started_at = math.inf
        try:
            yield
        finally:
            with self._changed:
                job.started_at = time.monotonic()
                self._changed.notify_all()

    def submit(self, work: Callable[[], Any]) -> "Future[Any]":
        """Run `work` on a thread; its result or its failure comes through the future.

        Raises:
            CompileBusyError: no thread will become free.
        """
        if self.num_overdue == self._num_workers + self._num_spares:
            raise CompileBusyError(
                "every grammar thread is busy with an overdue grammar"
            )
        if self._jobs.qsize() >= MAX_QUEUED_JOBS:
            raise CompileBusyError("too many grammars are waiting to be compiled")
        job = _Job(work)
        self._jobs.put(job)
        return job.future

    def shutdown(self) -> None:
        """Let the threads end; jobs that wait are cancelled."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._fail_queued(None)
        for _ in range(self._num_workers):
            self._jobs.put(None)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._changed:
                job.started_at = time.monotonic()
                job.native_thread_id = threading.get_native_id()
                self._running[threading.get_ident()] = job
                self._changed.notify_all()
            _settle(job)
            with self._changed:
                del self._running[threading.get_ident()]
                if job.is_overdue:
                    # This thread's priority cannot be raised again, and a thread that
                    # it starts would have it too.
                    self._num_missing += not job.is_replaced
                    self._changed.notify_all()
                    return

    def _watch(self) -> None:
        while not self._is_closed:
            with self._changed:
                self._start_missing()
                late = self._mark_overdue(time.monotonic())
                is_stuck = self._num_stuck() == self._num_workers + self._num_spares
                if not late and not is_stuck:
                    self._changed.wait(self._next_deadline(time.monotonic()))
                    continue
            for job in late:
                _fail(job, CompileTimeoutError(self._time_limit_s))
            if is_stuck:
                self._fail_queued(CompileBusyError("every grammar thread is stuck"))
                with self._changed:
                    self._changed.wait(self._time_limit_s)

    def _start_missing(self) -> None:
        for _ in range(self._num_missing):
            _start_thread(self._run_jobs)
        self._num_missing = 0

    def _mark_overdue(self, now: float) -> list[_Job]:
        """Give up on the jobs past the limit, and replace their threads."""
        late = [
            job
            for job in self._running.values()
            if not job.is_overdue and now - job.started_at > self._time_limit_s
        ]
        for job in late:
            job.is_overdue = True
            _lower_priority(job.native_thread_id)
            num_replaced = sum(other.is_replaced for other in self._running.values())
            if num_replaced < self._num_spares:
                job.is_replaced = True
                _start_thread(self._run_jobs)
        return late

    def _num_stuck(self) -> int:
        return sum(job.is_overdue for job in self._running.values())

    def _next_deadline(self, now: float) -> float | None:
        """Seconds until the next running job is overdue; None: nothing to wait for."""
        deadlines = [
            job.started_at + self._time_limit_s - now
            for job in self._running.values()
            if not job.is_overdue and job.started_at < math.inf
        ]
        return max(min(deadlines) + 1e-3, 0.0) if deadlines else None

    def _fail_queued(self, error: Exception | None) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is None:
                continue
            if error is None:
                job.future.cancel()
            else:
                _fail(job, error)


def _start_thread(target: Callable[[], None]) -> None:
    threading.Thread(target=target, name="grammar", daemon=True).start()


def _lower_priority(native_thread_id: int) -> None:
    # Elsewhere than on Linux, this is about whole processes.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, native_thread_id, OVERDUE_NICENESS)


def _settle(job: _Job) -> None:
    """Run the job into its future; a Rust panic is a BaseException and is kept too."""
    try:
        result = job.work()
    except BaseException as error:
        _fail(job, error)
        return
    try:
        job.future.set_result(result)
    except InvalidStateError:
        # It was overdue and its request has been answered.
        return


def _fail(job: _Job, error: BaseException) -> None:
    try:
        job.future.set_exception(error)
    except InvalidStateError:
        return
