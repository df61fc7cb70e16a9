"""Handoffs of an engine that transfers KV itself (vLLM, SGLang, TensorRT-LLM). The worker passes on opaque tickets.

Replaces `Handoffs` for engines that implement `Prefill` and not `KvAddressable`.
"""

from __future__ import annotations

import asyncio

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.engines.contract import Prefill
from kvolt.runtime.tasks import TaskGroup
from kvolt.worker.handoffs import HandoffStats, PullResult


class EngineHandoffs:
    """See the module. Close before the engine."""

    def __init__(self, engine: Prefill) -> None:
        self._engine = engine
        self._task_group = TaskGroup("engine handoffs")
        self._held: dict[RequestId, object] = {}
        """Prompts that the engine may still hold."""
        self.stats = HandoffStats()

    async def close(self) -> None:
        await self._task_group.close()

    async def serve_prefill(self, request: Request, instance: InstanceId) -> Handoff:
        handoff = await self._engine.prefill(request)
        hold = self._held[request.request_id] = object()
        if handoff.expires_in_s is not None:
            ending = self._expire_after(request.request_id, hold, handoff.expires_in_s)
            self._task_group.start(ending, f"ticket {request.request_id}")
        self.stats.num_sent += 1
        return msgspec.structs.replace(handoff, prefill_instance=instance)

    async def _expire_after(self, request_id: RequestId, hold: object, hold_s: float) -> None:
        """Forget a hold after its time. The engine releases the blocks itself, perhaps later: the reader may extend the
        hold. The request id may be in use for another prompt by then."""
        await asyncio.sleep(hold_s)
        if self._held.get(request_id) is hold:
            del self._held[request_id]

    async def pull(self, handoff: Handoff, keep_for: RequestId | None = None) -> None:
        """Count only: the engine pulls the KV with the request, and reports the transfer with its first delta."""
        self.stats.num_received += 1

    def count(self, stages: StageTimes) -> None:
        """Count a transfer that the engine has reported."""
        self.stats.num_bytes += stages.transfer_bytes or 0
        self.stats.pull_s += (stages.transfer_ms or 0.0) / 1e3

    async def serve_rendezvous(
        self, request: Request, rendezvous: Rendezvous, instance: InstanceId
    ) -> Handoff:
        raise Unsupported(
            "this engine transfers KV itself and supports prefill-first only", feature="decode-first"
        )

    async def pull_rendezvous(
        self, request: Request, rendezvous: Rendezvous, keep_for: RequestId | None = None
    ) -> PullResult:
        raise Unsupported(
            "this engine transfers KV itself and supports prefill-first only", feature="decode-first"
        )

    def drop(self, request_id: RequestId) -> bool:
        """Release the KV held for a request that no worker will pull. Returns whether it may still have been held."""
        if self._held.pop(request_id, None) is None:
            return False
        self._task_group.start(self._engine.release_prefill(request_id), "release")
        return True

    def release_kept(self, request_id: RequestId) -> None:
        """No-op: the engine keeps nothing for requests that are not submitted."""
