"""A timer for a deadline that moves often and rarely expires.

A connection's deadline changes with every request. Cancelling and adding a loop timer each time costs more than the
rest of the bookkeeping, so the loop timer stays and compares the deadline when it fires.

After a stall of the loop the deadline is extended, because data that would have moved it may be waiting in a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_STALL_S = 1.0
"""Lateness of a timer that indicates a stall, and the extension that follows it."""


def _ignore() -> None:
    pass


class LazyTimer:
    """Calls `expired` once, when the deadline of the latest `arm` passes without a `disarm`."""

    __slots__ = ("_deadline", "_expired", "_handle", "_handle_at", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._deadline: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._handle_at = 0.0

    def arm(self, seconds: float) -> None:
        """Set the deadline, replacing any previous one."""
        self._deadline = deadline = self._loop.time() + seconds
        if self._handle is None or deadline < self._handle_at:
            self._set_timer(deadline)

    def disarm(self) -> None:
        """Remove the deadline; the loop timer may stay and fire once without effect."""
        self._deadline = None

    def close(self) -> None:
        """Cancel for good: also drops the callback, so that its object can be freed."""
        self.cancel()
        self._expired = _ignore

    def cancel(self) -> None:
        """Remove the deadline and the loop timer."""
        self._deadline = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set_timer(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle_at = when
        self._handle = self._loop.call_at(when, self._on_timer)

    def _on_timer(self) -> None:
        self._handle = None
        if self._deadline is None:
            return
        now = self._loop.time()
        if now - self._handle_at > _STALL_S:
            self._deadline = max(self._deadline, now + _STALL_S)
        if now < self._deadline:
            self._set_timer(self._deadline)
            return
        self._deadline = None
        self._expired()
