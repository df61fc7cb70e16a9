"""EngineHandoffs: handoffs of an engine that moves its KV itself. The worker passes on an opaque ticket.

In the place of `Handoffs`, for engines that offer `Prefill` and no memory that others could read.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.engines.contract import Prefill
from kvolt.runtime.tasks import Crew
from kvolt.worker.handoffs import HandoffStats, Pulled


class EngineHandoffs:
    """See the module. `close` it before the engine."""

    def __init__(self, engine: Prefill) -> None:
        self._engine = engine
        self._crew = Crew("own handoffs")
        self._given: dict[RequestId, object] = {}
        """What the engine may keep still."""
        self.stats = HandoffStats()

    async def close(self) -> None:
        await self._crew.close()

    async def give(self, request: Request, instance: InstanceId) -> Handoff:
        handoff = await self._engine.prefill(request)
        given = self._given[request.request_id] = object()
        if handoff.expires_in_s is not None:
            ending = self._forget_after(request.request_id, given, handoff.expires_in_s)
            self._crew.start(ending, f"ticket {request.request_id}")
        self.stats.num_given += 1
        return msgspec.structs.replace(handoff, prefill_instance=instance)

    async def _forget_after(self, request_id: RequestId, given: object, hold_s: float) -> None:
        """When it lets go of what was fetched, or not in time, the engine knows best: who fetches may have asked it for
        more time. The id may be another prompt's by then."""
        await asyncio.sleep(hold_s)
        if self._given.get(request_id) is given:
            del self._given[request_id]

    async def take(self, handoff: Handoff, keep_for: RequestId | None = None) -> None:
        """The engine reads it when it has the request, and reports bytes, path and time with the first delta."""
        self.stats.num_taken += 1

    def count(self, stages: StageTimes) -> None:
        """Count a transfer that the engine has reported."""
        self.stats.num_bytes += stages.transfer_bytes or 0
        self.stats.pull_s += (stages.transfer_ms or 0.0) / 1e3

    async def push(self, request: Request, meeting: Rendezvous, instance: InstanceId) -> Handoff:
        raise Unsupported("this engine moves KV by itself, prefill first", feature="decode-first")

    async def receive(
        self, request: Request, meeting: Rendezvous, keep_for: RequestId | None = None
    ) -> Pulled:
        raise Unsupported("this engine moves KV by itself, prefill first", feature="decode-first")

    def drop(self, request_id: RequestId) -> bool:
        """Nobody will fetch what was given for a request; whether it may still have been there."""
        if self._given.pop(request_id, None) is None:
            return False
        self._crew.start(self._engine.release_prefill(request_id), "release")
        return True

    def let_go(self, request_id: RequestId) -> None:
        """Nothing was kept for it here."""
