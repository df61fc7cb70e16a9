"""KvSettling: the end of what is brought into an engine's memory: settled whoever goes meanwhile, or let go.

For handoffs and for tiers. Owns nothing but what is under way to that end; the engine owns the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Protocol

from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.engines.contract import KvPlaced, KvRoom, Prefill
from kvolt.runtime.tasks import Crew


class SettlingEngine(KvPlaced, Prefill, Protocol):
    """What an engine must offer."""


class KvSettling:
    """See the module."""

    def __init__(self, engine: SettlingEngine, crew: Crew) -> None:
        self._engine = engine
        self._crew = crew

    async def settle(self, room: KvRoom, num_filled: int, keep_for: RequestId | None) -> None:
        """Whoever asked may have gone, or go meanwhile: the room is given back all the same, and nothing is kept."""
        kept = () if keep_for is None else (keep_for,)  # engines of others may not know of it
        settling = self._crew.start(self._engine.settle_kv(room, num_filled, *kept), "settle")
        try:
            await asyncio.shield(settling)
        except asyncio.CancelledError:
            if keep_for is not None:
                self.let_go(keep_for, settling)
            raise

    def let_go(self, request_id: RequestId, after: asyncio.Task[None] | None = None) -> None:
        """The request that blocks were kept for is not submitted after all; `after` what is being done for it."""
        if not self._crew.closed:
            self._crew.start(self._let_go(request_id, after), "let go")

    async def _let_go(self, request_id: RequestId, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait([after])
        with contextlib.suppress(KvoltError):  # of an engine that is gone, and keeps nothing
            await self._engine.release_prefill(request_id)
