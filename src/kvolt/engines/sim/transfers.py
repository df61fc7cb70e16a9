"""SimTransfers: waits for the simulated time of KV transfers over shared links.

Drives `sim.links` on the running event loop. Knows sizes and links, no blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvolt.engines.sim.links import SharedLinks, SimLink, TransferId

NETWORK_IN = "network_in"


class SimTransfers:
    """Transfers over links that they share fairly."""

    def __init__(self, links: Sequence[SimLink], now: Callable[[], float]) -> None:
        self._links = SharedLinks(links)
        self._names = frozenset(link.name for link in links)
        self._now = now
        self._waiting: dict[TransferId, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def move(self, num_bytes: float, *path: str) -> bool:
        """Wait for a transfer over these links; unknown links take no time. Returns False if it was closed
        before the arrival. Cancelling frees the links for other transfers."""
        links = [name for name in path if name in self._names]
        if not links:
            return True
        if self._closed:
            return False
        arrived: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        transfer = self._links.start(self._now(), num_bytes, links)
        self._waiting[transfer] = arrived
        self._set_timer()
        try:
            return await arrived
        finally:
            if self._waiting.pop(transfer, None) is not None:
                self._links.cancel(self._now(), transfer)
                self._set_timer()

    def close(self) -> None:
        """End all transfers without arrival."""
        self._closed = True
        for arrived in self._waiting.values():
            if not arrived.done():
                arrived.set_result(False)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the next arrival, which changes with every start and end."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self._closed else self._links.next_arrival()
        if due is not None:
            delay_s = max(due - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_due, due)

    def _on_due(self, due: float) -> None:
        self._timer = None
        # A loop may call slightly early, because of its clock resolution.
        for transfer in self._links.advance(max(self._now(), due)):
            arrived = self._waiting.pop(transfer, None)
            if arrived is not None and not arrived.done():
                arrived.set_result(True)
        self._set_timer()
