"""A deadline that moves often and is reached rarely.

A connection's deadline changes with every request. Cancelling and adding a loop timer each time costs
more than the rest of the bookkeeping, so the loop's timer stays where it is and looks at the deadline
when it fires. Knows nothing of what the deadline is for.

A loop that was stalled gets a moment more: what would have moved the deadline may wait in a socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_STALL_S = 1.0
"""A timer that fires later than this shows a stall; it is also the moment that follows one."""


def _nothing() -> None:
    pass


class LazyTimer:
    """Calls `expired` once, when the latest `arm` runs out without a `disarm`."""

    __slots__ = ("_deadline", "_expired", "_handle", "_handle_at", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, expired: Callable[[], None]) -> None:
        self._loop = loop
        self._expired = expired
        self._deadline: float | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._handle_at = 0.0

    def arm(self, seconds: float) -> None:
        """Set the deadline, replacing an earlier one."""
        self._deadline = deadline = self._loop.time() + seconds
        if self._handle is None or deadline < self._handle_at:
            self._move(deadline)

    def disarm(self) -> None:
        """No deadline; the loop's timer may stay and fire once for nothing."""
        self._deadline = None

    def close(self) -> None:
        """Never again: nothing is left on the loop, and who would have been called is let go."""
        self.cancel()
        self._expired = _nothing

    def cancel(self) -> None:
        """No deadline, and nothing left on the loop."""
        self._deadline = None
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _move(self, when: float) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle_at = when
        self._handle = self._loop.call_at(when, self._tick)

    def _tick(self) -> None:
        self._handle = None
        if self._deadline is None:
            return
        now = self._loop.time()
        if now - self._handle_at > _STALL_S:
            self._deadline = max(self._deadline, now + _STALL_S)
        if now < self._deadline:
            self._move(self._deadline)
            return
        self._deadline = None
        self._expired()
