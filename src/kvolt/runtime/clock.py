"""Ports for time, randomness and blocking work.

No other module of kvolt reads a clock, draws a random number or starts a thread, so that virtual time can replace all
three.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kvolt.core.errors import DeadlineExceeded, KvoltError, Overloaded, Unavailable

T = TypeVar("T")


class Clock(Protocol):
    """A monotonic clock for durations, and a wall clock for display and for files shared with other processes."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """Clocks of the operating system."""

    monotonic = staticmethod(time.monotonic)  # as they are: each request reads them several times
    wall = staticmethod(time.time)


class Blocking(Protocol):
    """Runs blocking calls (files, name resolution) outside the event loop, for at most `timeout_s`.

    Raises DeadlineExceeded after the time-out, Overloaded if too many calls are queued, Unavailable while the process
    stops. A call abandoned by time-out or cancellation may still be running (a hung file system cannot be
    interrupted), so it must be safe to abandon.
    """

    async def run(self, call: Callable[[], T], timeout_s: float) -> T: ...

    def dedicated(self, name: str, num_threads: int = 1) -> Blocking:
        """Create a port with threads of its own, so that neither port delays the other. Calls run in order.

        An abandoned call keeps its thread until it ends. The new port closes with this one.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    call: Callable[[], Any]
    outcome: Future[Any]

    def run(self) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return  # abandoned while it was queued
        try:
            result = self.call()
        except BaseException as error:  # raised to the caller, whatever it is
            self.outcome.set_exception(error)
            # The error refers to this frame, and this frame to the error: without this, everything the call referred
            # to would stay in that cycle until a garbage collection.
            del self
        else:
            self.outcome.set_result(result)

    def refuse(self, error: KvoltError) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)


class ThreadBlocking:
    """A pool of threads that are started on demand.

    Unlike the threads of an executor they are daemons: a hung call does not keep the process from exiting. Calls wait
    in a bounded queue; if it is full, new ones are rejected with Overloaded.
    """

    def __init__(self, num_threads: int = 4, queue_limit: int = 256, name: str = "kvolt-blocking") -> None:
        self._max_threads = num_threads
        self._queue_limit = queue_limit
        self._name = name
        self._queued: deque[_Job] = deque()
        self._condition = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._closed = False
        self._dedicated: list[ThreadBlocking] = []

    @property
    def num_idle(self) -> int:
        """Threads without a call."""
        return self._num_idle

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        # Not wait_for(): before 3.12 it swallows a cancellation that coincides with the result.
        outcome: Future[T] = Future()
        self._submit(_Job(call, outcome))
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await asyncio.wrap_future(outcome)
        except TimeoutError:
            if not deadline.expired():
                raise  # raised by the call itself
            raise DeadlineExceeded(
                "blocking call took too long", stage="blocking", after_s=timeout_s
            ) from None
        finally:
            del outcome, call  # an error that propagates refers to this frame

    def dedicated(self, name: str, num_threads: int = 1) -> ThreadBlocking:
        dedicated_port = ThreadBlocking(num_threads, self._queue_limit, f"{self._name}-{name}")
        self._dedicated.append(dedicated_port)
        if self._closed:
            dedicated_port.close()
        return dedicated_port

    def close(self) -> None:
        """Reject queued and new calls; running calls end by themselves or with the process."""
        with self._condition:
            self._closed = True
            queued, self._queued = self._queued, deque()
            self._condition.notify_all()
        for port in self._dedicated:
            port.close()
        for job in queued:
            job.refuse(self._stopping_error())

    def _submit(self, job: _Job) -> None:
        with self._condition:
            if self._closed:
                raise self._stopping_error()
            if len(self._queued) >= self._queue_limit:
                self._queued = deque(other for other in self._queued if not other.outcome.cancelled())
            if len(self._queued) >= self._queue_limit:
                raise Overloaded("too many queued blocking calls", queue=self._name, limit=self._queue_limit)
            self._queued.append(job)
            if self._num_idle >= len(self._queued) or self._num_threads >= self._max_threads:
                self._condition.notify()
                return
            self._num_threads += 1
            name = f"{self._name}-{self._num_threads}"
        threading.Thread(target=self._run_jobs, name=name, daemon=True).start()

    def _run_jobs(self) -> None:
        while True:
            with self._condition:
                self._num_idle += 1
                while not self._queued and not self._closed:
                    self._condition.wait()
                self._num_idle -= 1
                if not self._queued:
                    return
                job = self._queued.popleft()
            job.run()
            del job  # free the result before waiting for the next job

    def _stopping_error(self) -> Unavailable:
        return Unavailable("this process is stopping", reason="stopping")


def new_id(rng: random.Random) -> str:
    """Random 64-bit id as hex, for instances, leases and publishers."""
    return f"{rng.getrandbits(64):016x}"
