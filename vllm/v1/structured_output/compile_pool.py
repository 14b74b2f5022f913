"""Threads that compile grammars, so that nobody waits for a slow one."""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MAX_QUEUED_JOBS = 4096


class CompileTimeoutError(Exception):
    """A job has run for longer than the limit; its thread cannot be stopped."""


class CompileBusyError(Exception):
    """Every thread is stuck in an overdue job, or too many jobs are waiting."""


@dataclass
class _Job:
    work: Callable[[], Any]
    future: "Future[Any]" = field(default_factory=Future)
    started_at: float = 0.0
    is_overdue: bool = False


class CompilePool:
    """A bounded number of daemon threads with a time limit for each job.

    A thread cannot be killed, so an overdue job keeps its thread until it returns; its
    future fails at the limit. While all threads are stuck, new jobs are refused. The
    number of threads never grows, and none of them keeps the process alive.

    Args:
        num_workers: jobs that run at the same time.
        time_limit_s: seconds that a job may run, not counting its wait in the queue.
    """

    def __init__(self, num_workers: int, time_limit_s: float) -> None:
        self._num_workers = num_workers
        self._time_limit_s = time_limit_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._running: dict[int, _Job] = {}
        self._is_closed = False
        targets = [self._watch] + [self._run_jobs] * num_workers
        for target in targets:
            threading.Thread(target=target, name="grammar", daemon=True).start()

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
        if self.num_overdue == self._num_workers:
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
                self._running[threading.get_ident()] = job
                self._changed.notify_all()
            _settle(job)
            with self._changed:
                del self._running[threading.get_ident()]

    def _watch(self) -> None:
        while not self._is_closed:
            with self._changed:
                now = time.monotonic()
                late = [
                    job
                    for job in self._running.values()
                    if not job.is_overdue and now - job.started_at > self._time_limit_s
                ]
                for job in late:
                    job.is_overdue = True
                is_stuck = self._num_stuck() == self._num_workers
                if not late and not is_stuck:
                    self._changed.wait(self._next_deadline(now))
                    continue
            for job in late:
                _fail(job, CompileTimeoutError(self._time_limit_s))
            if is_stuck:
                self._fail_queued(CompileBusyError("every grammar thread is stuck"))
                with self._changed:
                    self._changed.wait(self._time_limit_s)

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
