"""Time, randomness and blocking work as ports.

Nothing else in kvolt reads a clock, draws a random number or starts a thread, so that a virtual loop
can own all three.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from kvolt.core.errors import DeadlineExceeded

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

    Raises DeadlineExceeded when the time is over; the call itself may still be running then (a hung
    file system cannot be interrupted), so it must be safe to abandon.
    """

    async def run(self, call: Callable[[], T], timeout_s: float) -> T: ...


class ThreadBlocking:
    """A few daemon-like threads of its own: a call that hangs does not take the default executor along."""

    def __init__(self, num_threads: int = 4) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="kvolt-blocking")

    async def run(self, call: Callable[[], T], timeout_s: float) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._executor, call)
        try:
            return await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(
                "blocking call took too long", stage="blocking", after_s=timeout_s
            ) from None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def new_id(rng: random.Random) -> str:
    """64 random bits as hex, for instances, leases and publishers."""
    return f"{rng.getrandbits(64):016x}"
