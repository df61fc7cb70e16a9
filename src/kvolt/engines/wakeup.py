"""Wakeup: wakes the one task that waits for work."""

from __future__ import annotations

import asyncio


class Wakeup:
    """An Event for one waiter, with a time limit that costs a timer and no cancellation."""

    __slots__ = ("_has_rung", "_waiter")

    def __init__(self) -> None:
        self._has_rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        self._has_rung = True
        _wake(self._waiter)

    def silence(self) -> None:
        """What rang so far is dealt with."""
        self._has_rung = False

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Until it rings, or has since `silence`; whether it did within the time given."""
        if self._has_rung:
            return True
        loop = asyncio.get_running_loop()
        waiter = self._waiter = loop.create_future()
        timer = None if timeout_s is None else loop.call_later(timeout_s, _wake, waiter)
        try:
            await waiter
        finally:
            self._waiter = None
            if timer is not None:
                timer.cancel()
        return self._has_rung


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
