"""Blocking calls in single file: none is started while one that was given up is still running.

For a file system that may hang: what hangs there takes one thread, not one per retry, and a late
write cannot overtake a newer one. Must not know what the calls do.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvolt.core.errors import DeadlineExceeded
from kvolt.runtime.clock import Blocking, Clock

T = TypeVar("T")

_STRAY_CHECK_S = 0.005


class _Call(Generic[T]):
    """A blocking call that knows, from any thread, whether it is running."""

    def __init__(self, work: Callable[[], T], deadline: float) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._abandoned = False
        self.deadline = deadline
        self.running = False

    def __call__(self) -> T:
        with self._lock:
            if self._abandoned:
                raise OSError("given up before it started")
            self.running = True
        try:
            return self._work()
        finally:
            self.running = False

    def abandon(self) -> None:
        """If it has not started, it never will."""
        with self._lock:
            self._abandoned = True


class BlockingLane:
    """Blocking calls one at a time: none is started while one that was given up is still running."""

    def __init__(self, blocking: Blocking, clock: Clock, timeout_s: float) -> None:
        self._blocking = blocking
        self._clock = clock
        self._timeout_s = timeout_s
        self._stray: _Call[Any] | None = None

    async def run(self, work: Callable[[], T]) -> T:
        await self._wait_for_stray()
        call = _Call(work, self._clock.monotonic() + self._timeout_s)
        self._stray = call
        try:
            return await self._blocking.run(call, self._timeout_s)
        finally:
            # Returned, failed, out of time or cancelled: only in the last two can it still be running.
            call.abandon()
            if not call.running:
                self._stray = None

    async def _wait_for_stray(self) -> None:
        while self._stray is not None and self._stray.running:
            if self._clock.monotonic() >= self._stray.deadline:
                raise DeadlineExceeded(
                    "a call to the file system hangs", stage="blocking", after_s=self._timeout_s
                )
            await asyncio.sleep(_STRAY_CHECK_S)
