"""KV of the sim engine on its way: waits as long as the links that it shares with other KV take.

Drives `sim_links` on whatever loop runs. Knows sizes and links, no blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from kvolt.engines.sim.links import Link, SharedLinks, TransferId

NETWORK_IN = "network_in"
NETWORK_OUT = "network_out"


class SimTransfers:
    """Several engines that are given the same one share its links."""

    def __init__(self, links: Sequence[Link], now: Callable[[], float]) -> None:
        self._links = SharedLinks(links)
        self._known = frozenset(link.name for link in links)
        self._now = now
        self._waiting: dict[TransferId, asyncio.Future[bool]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def num_moving(self) -> int:
        return len(self._waiting)

    async def move(self, num_bytes: float, *path: str) -> bool:
        """Returns when so many bytes are over these links; links that there are not take no time. Whether they have
        arrived: not if it was closed meanwhile. Cancelling gives the links to the others."""
        links = [name for name in path if name in self._known]
        if not links:
            return True
        if self._closed:
            return False
        arrived: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        transfer = self._links.start(self._now(), num_bytes, links)
        self._waiting[transfer] = arrived
        self._watch()
        try:
            return await arrived
        finally:
            if self._waiting.pop(transfer, None) is not None:
                self._links.cancel(self._now(), transfer)
                self._watch()

    def close(self) -> None:
        """Nothing arrives any more."""
        self._closed = True
        for arrived in self._waiting.values():
            if not arrived.done():
                arrived.set_result(False)
        self._watch()

    def _watch(self) -> None:
        """One timer, for the next arrival: others come and go, and move it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = None if self._closed else self._links.next_arrival()
        if due is not None:
            delay_s = max(due - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_due, due)

    def _on_due(self, due: float) -> None:
        self._timer = None
        # A loop may call a little early, by the grain of its clock.
        for transfer in self._links.advance(max(self._now(), due)):
            arrived = self._waiting.pop(transfer, None)
            if arrived is not None and not arrived.done():
                arrived.set_result(True)
        self._watch()
