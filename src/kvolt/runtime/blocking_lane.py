"""Blocking calls one at a time: no call starts while an abandoned one is still running.

For a file system that may hang: a hung call occupies one thread, not one per retry, and a late write cannot overtake
a newer one. Independent of what the calls do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvolt.core.errors import DeadlineExceeded
from kvolt.runtime.clock import Blocking, Clock

T = TypeVar("T")

_POLL_S = 0.005


class _Call(Generic[T]):
    """A blocking call whose running state can be read from any thread."""

    def __init__(self, work: Callable[[], T], deadline: float) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._abandoned = False
        self.deadline = deadline
        self.is_running = False

    def __call__(self) -> T:
        with self._lock:
            if self._abandoned:
                raise OSError("abandoned before it started")
            self.is_running = True
        try:
            return self._work()
        finally:
            self.is_running = False

    def abandon(self) -> None:
        """Prevent a start if the call has not started."""
        with self._lock:
            self._abandoned = True


class BlockingLane:
    """Runs blocking calls one at a time; the next call waits for an abandoned one that is still running."""

    def __init__(self, blocking: Blocking, clock: Clock, timeout_s: float) -> None:
        self._blocking = blocking
        self._clock = clock
        self._timeout_s = timeout_s
        self._last_call: _Call[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        await self._wait_for_last_call()
        call = _Call(work, self._clock.monotonic() + self._timeout_s)
        self._last_call = call
        try:
            return await self._blocking.run(call, self._timeout_s)
        finally:
            # Returned, failed, timed out or cancelled: only in the last two cases the call can still be running.
            call.abandon()
            if not call.is_running:
                self._last_call = None

    async def _wait_for_last_call(self) -> None:
        while self._last_call is not None and self._last_call.is_running:
            if self._clock.monotonic() >= self._last_call.deadline:
                raise DeadlineExceeded(
                    "a call to the file system hangs", stage="blocking", after_s=self._timeout_s
                )
            await asyncio.sleep(_POLL_S)
