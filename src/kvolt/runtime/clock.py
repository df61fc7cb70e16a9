"""Time, randomness and blocking work as ports.

Nothing else in kvolt reads a clock, draws a random number or starts a thread, so that a virtual loop
can own all three.
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
    """Two clocks: one for durations, one for people and for files shared with other processes."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Blocking(Protocol):
    """Runs a blocking call (a file, a resolver) off the loop, for at most `timeout_s`.

    Raises DeadlineExceeded when the time is over, Overloaded when too many calls wait already, Unavailable
    when the process is stopping. A call given up, by the deadline or by a cancellation, may still be
    running (a hung file system cannot be interrupted), so it must be safe to abandon.
    """

    async def run(self, call: Callable[[], T], timeout_s: float) -> T: ...

    def dedicated(self, name: str, num_threads: int = 1) -> Blocking:
        """A port with threads of its own, which takes its calls in order: neither port can hold up the other.

        An abandoned call keeps its place until it ends. The new port closes with this one.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    call: Callable[[], Any]
    outcome: Future[Any]

    def run(self) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return  # given up while it waited
        try:
            result = self.call()
        except BaseException as error:  # whatever it is, it belongs to whoever waits
            self.outcome.set_exception(error)
            # The error holds this frame, which would hold it: all that the call had at hand would stay in that
            # circle until a collection.
            del self
        else:
            self.outcome.set_result(result)

    def refuse(self, error: KvoltError) -> None:
        if self.outcome.set_running_or_notify_cancel():
            self.outcome.set_exception(error)


class ThreadBlocking:
    """A few threads, started as they are needed.

    They are daemons, which an executor's are not: a call that hangs keeps no process from exiting.
    Calls wait in a bounded queue; when it is full a new one is Overloaded.
    """

    def __init__(self, num_threads: int = 4, queue_limit: int = 256, name: str = "kvolt-blocking") -> None:
        self._max_threads = num_threads
        self._queue_limit = queue_limit
        self._name = name
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._num_threads = 0
        self._num_idle = 0
        self._closed = False
        self._dedicated: list[ThreadBlocking] = []

    @property
    def num_idle(self) -> int:
        """Threads that wait for work."""
        return self._num_idle

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        # Not wait_for(): until 3.12 it swallows a cancellation that meets the result.
        outcome: Future[T] = Future()
        self._submit(_Job(call, outcome))
        deadline = asyncio.timeout(timeout_s)
        try:
            async with deadline:
                return await asyncio.wrap_future(outcome)
        except TimeoutError:
            if not deadline.expired():
                raise  # the call's own
            raise DeadlineExceeded(
                "blocking call took too long", stage="blocking", after_s=timeout_s
            ) from None
        finally:
            del outcome, call  # an error that goes on from here holds this frame

    def dedicated(self, name: str, num_threads: int = 1) -> ThreadBlocking:
        made = ThreadBlocking(num_threads, self._queue_limit, f"{self._name}-{name}")
        self._dedicated.append(made)
        if self._closed:
            made.close()
        return made

    def close(self) -> None:
        """Refuse what waits and what comes; running calls end by themselves, or with the process."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            self._changed.notify_all()
        for port in self._dedicated:
            port.close()
        for job in waiting:
            job.refuse(self._stopping())

    def _submit(self, job: _Job) -> None:
        with self._changed:
            if self._closed:
                raise self._stopping()
            if len(self._waiting) >= self._queue_limit:
                self._waiting = deque(each for each in self._waiting if not each.outcome.cancelled())
            if len(self._waiting) >= self._queue_limit:
                raise Overloaded("too many blocking calls wait", queue=self._name, limit=self._queue_limit)
            self._waiting.append(job)
            if self._num_idle >= len(self._waiting) or self._num_threads >= self._max_threads:
                self._changed.notify()
                return
            self._num_threads += 1
            name = f"{self._name}-{self._num_threads}"
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                while not self._waiting and not self._closed:
                    self._changed.wait()
                self._num_idle -= 1
                if not self._waiting:
                    return
                job = self._waiting.popleft()
            job.run()
            del job  # what it returned is not kept until the next one comes

    def _stopping(self) -> Unavailable:
        return Unavailable("this process is stopping", reason="stopping")


def new_id(rng: random.Random) -> str:
    """64 random bits as hex, for instances, leases and publishers."""
    return f"{rng.getrandbits(64):016x}"
