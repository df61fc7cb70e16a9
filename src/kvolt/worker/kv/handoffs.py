"""Handoffs: offers KV to decode workers and pulls KV from prefill workers.

The prefill worker computes the prompt, holds its blocks and offers them; the decode worker pulls the blocks it lacks.
Blocks that do not arrive are recomputed, so a failed handoff is slower, never wrong. Owns the offers; the engine owns
the blocks, `mover` transfers them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import MALFORMED, InvalidRequest, KvoltError, Unsupported
from kvolt.core.ids import BlockKey, InstanceId, RequestId, SequenceHash
from kvolt.core.request import READER_KEY_BYTES, Handoff, Rendezvous, Request
from kvolt.engines.contract import KvAllocation, Prefill
from kvolt.runtime.tasks import TaskGroup
from kvolt.worker.kv.mover import KvMover, KvOffer, KvSettling
from kvolt.worker.kv.rendezvous import (
    WAIT_S,
    PartReceiver,
    PromptParts,
    RendezvousEngine,
    announce_parts,
    compute_prompt,
)

log = logging.getLogger(__name__)

PULL_S = 10.0
"""Timeout of a pull; recomputing the prompt takes less time."""
_MARGIN_S = 1.0
"""Allowance for the latency of the engine's answer."""


class HandoffTicket(msgspec.Struct, frozen=True, array_like=True):
    """Content of `Handoff.ticket`; read by the decode worker only."""

    transfer: bytes
    names: tuple[bytes | int, ...]
    """BlockKeys; numbers in the simulator, where blocks have no bytes."""
    hashes: tuple[SequenceHash, ...]

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return cast("tuple[BlockKey, ...]", self.names)


@dataclass(slots=True)
class HandoffStats:
    """Counters for metrics."""

    num_sent: int = 0
    num_received: int = 0
    """Handoffs received, including those whose blocks were cached already."""
    num_blocks: int = 0
    """Blocks pulled."""
    num_bytes: int = 0
    pull_s: float = 0.0
    by_path: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Failed pulls, by error code."""


class PullResult(msgspec.Struct, frozen=True):
    """Blocks transferred for a request."""

    num_blocks: int = 0
    num_bytes: int = 0
    path: str = ""
    took_s: float = 0.0

    @property
    def stages(self) -> StageTimes:
        return StageTimes(
            transfer_ms=self.took_s * 1e3, transfer_bytes=self.num_bytes, transfer_path=self.path or None
        )


_decode = msgspec.msgpack.Decoder(HandoffTicket).decode
_encode = msgspec.msgpack.Encoder().encode
_NOTHING = PullResult()


class Handoffs:
    """See the module. Close before the engine."""

    def __init__(
        self,
        engine: RendezvousEngine,
        mover: KvMover,
        now: Callable[[], float],
        pull_s: float = PULL_S,
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._now = now
        self._pull_s = pull_s
        self._task_group = TaskGroup("handoffs")
        self._settling = KvSettling(engine, self._task_group)
        self._offers: dict[RequestId, KvOffer] = {}
        """Prompts that wait to be pulled."""
        self.stats = HandoffStats()

    async def close(self) -> None:
        """Withdraw all offers."""
        await self._task_group.close()

    async def serve_prefill(self, request: Request, instance: InstanceId) -> Handoff:
        """Compute a prompt and offer its blocks. Errors as of the engine's `prefill`. Cancelling releases
        everything."""
        handoff = await self._engine.prefill(request)
        prefilled_at = self._now()
        try:
            held = await self._engine.held_kv(request.request_id)
            if not held.blocks:
                await self._engine.release_prefill(request.request_id)
                return _with_ticket(handoff, request, instance, b"")
            # The offer must end before the engine releases the blocks; otherwise reused blocks could be sent.
            hold_s = handoff.expires_in_s or self._pull_s
            left_s = hold_s - (self._now() - prefilled_at) - min(_MARGIN_S, hold_s / 4)
            reader_key = secrets.token_bytes(READER_KEY_BYTES)
            offer = self._mover.offer(held.blocks, held.keys, max(left_s, 0.0), reader_key)
        except BaseException:
            self._task_group.start(self._engine.release_prefill(request.request_id), "release")
            raise
        self._offers[request.request_id] = offer
        self._task_group.start(self._release_after(offer, request.request_id), f"offer {request.request_id}")
        self.stats.num_sent += 1
        ticket = HandoffTicket(offer.ticket, held.keys, held.hashes)
        handoff = msgspec.structs.replace(handoff, reader_key=reader_key)
        return _with_ticket(handoff, request, instance, _encode(ticket))

    # --- decode-first

    @property
    def rendezvous_address(self) -> str:
        """Address at which decode workers receive the parts of a prompt."""
        return self._mover.address

    async def serve_rendezvous(
        self, request: Request, rendezvous: Rendezvous, instance: InstanceId
    ) -> Handoff:
        """Compute a prompt whose blocks are pulled while it is computed. As `serve_prefill`, without a ticket."""
        request_id = request.request_id
        if request_id in self._offers:  # its blocks are not released yet
            raise InvalidRequest(
                f"the prompt of {request_id} is being transferred already", param="request_id"
            )
        parts = self._offers[request_id] = PromptParts(self._mover, rendezvous, self._pull_s)
        computing = self._task_group.start(compute_prompt(self._engine, request), f"prompt {request_id}")
        try:
            handoff = await announce_parts(self._engine, request, parts, computing)
        except BaseException:
            parts.cancel()
            self._task_group.start(self._stop_after(parts, computing, request_id), "stop")
            with contextlib.suppress(KvoltError):
                parts.end()
            raise
        self._task_group.start(self._release_after(parts, request_id), f"parts {request_id}")
        self.stats.num_sent += 1
        return msgspec.structs.replace(_with_ticket(handoff, request, instance, b""), first_tokens=None)

    async def _stop_after(
        self, parts: PromptParts, computing: asyncio.Task[Handoff | KvoltError], request_id: RequestId
    ) -> None:
        """Release the blocks once no reader is left; readers would get the bytes of another prompt."""
        try:
            await parts.wait_done()
        finally:
            if self._offers.get(request_id) is parts:
                del self._offers[request_id]
            computing.cancel()
            await self._engine.release_prefill(request_id)

    async def pull_rendezvous(
        self, request: Request, rendezvous: Rendezvous, keep_for: RequestId | None = None
    ) -> PullResult:
        """As `pull`, for a prompt that is being computed: its blocks arrive in parts."""
        limit_s = min(WAIT_S if request.deadline_s is None else request.deadline_s, WAIT_S)
        try:
            keys = self._engine.kv_keys(request)
            allocation = await self._engine.allocate_kv(keys, request.sequence_hashes[: len(keys)])
        except KvoltError as error:
            self._count_failure(error)
            return _NOTHING
        self.stats.num_received += 1
        receiver = PartReceiver(self._mover, rendezvous, keys, allocation, self._pull_s)
        if not allocation.blocks:
            if allocation.num_present < len(keys):
                self.stats.failures["no_room"] += 1
            self._task_group.start(receiver.decline(limit_s), "decline")
            return _NOTHING
        kept_for: RequestId | None = None  # stays None if this is cancelled
        try:
            await self._receive_parts(receiver, limit_s)
            kept_for = keep_for
        finally:
            num_blocks = receiver.by_path.total()
            await self._settling.settle(allocation, num_blocks, kept_for)
        self.stats.pull_s += receiver.moving_s
        num_bytes = num_blocks * self._mover.block_bytes
        return PullResult(num_blocks, num_bytes, "+".join(sorted(receiver.by_path)), receiver.moving_s)

    async def _receive_parts(self, receiver: PartReceiver, limit_s: float) -> None:
        try:
            await receiver.run(limit_s, self._count_blocks)
        except KvoltError as error:
            self._count_failure(error)
            self._task_group.start(receiver.decline(limit_s), "decline")

    # ---

    def drop(self, request_id: RequestId) -> bool:
        """Withdraw the offer for a request that no worker will pull; returns whether it was open. Running pulls may
        end."""
        offer = self._offers.get(request_id)
        if offer is None:
            return False
        if isinstance(offer, PromptParts):
            offer.withdraw()
        else:
            offer.cancel()
        return True

    async def _release_after(self, offer: KvOffer, request_id: RequestId) -> None:
        try:
            await offer.wait_done()
        finally:
            offer.cancel()
            if self._offers.get(request_id) is offer:
                del self._offers[request_id]
            await self._engine.release_prefill(request_id)

    async def pull(self, handoff: Handoff, keep_for: RequestId | None = None) -> PullResult:
        """Pull the blocks of a handoff that are not cached here. Raises nothing but CancelledError.

        With `keep_for` the blocks are kept for this request, which must be submitted next; otherwise call
        `release_kept`. Cancelling releases all blocks."""
        if not handoff.ticket:
            return _NOTHING
        try:
            ticket = _decode(handoff.ticket)
        except MALFORMED as error:
            self._count_failure(error)
            return _NOTHING
        try:
            allocation = await self._engine.allocate_kv(ticket.keys, ticket.hashes)
        except KvoltError as error:
            self._count_failure(error)
            self._decline(ticket, handoff.reader_proof)
            return _NOTHING
        self.stats.num_received += 1
        if not allocation.blocks:
            if allocation.num_present < len(ticket.names):
                self.stats.failures["no_room"] += 1
            self._decline(ticket, handoff.reader_proof)
            return _NOTHING
        pulled = _NOTHING
        kept_for: RequestId | None = None  # stays None if this is cancelled
        try:
            pulled = await self._pull(ticket, handoff.reader_proof, allocation)
            kept_for = keep_for
        finally:
            await self._settling.settle(allocation, pulled.num_blocks, kept_for)
        return pulled

    async def _pull(self, ticket: HandoffTicket, proof: bytes, allocation: KvAllocation) -> PullResult:
        started_at = self._now()
        try:
            path = await self._mover.pull(
                ticket.transfer, allocation.num_present, ticket.keys, allocation.blocks, self._pull_s, proof
            )
        except KvoltError as error:
            self._count_failure(error)
            self._decline(ticket, proof)
            return _NOTHING
        num_blocks = len(allocation.blocks)
        pulled = PullResult(num_blocks, num_blocks * self._mover.block_bytes, path, self._now() - started_at)
        self._count_blocks(num_blocks, path)
        self.stats.pull_s += pulled.took_s
        return pulled

    def release_kept(self, request_id: RequestId) -> None:
        """Release blocks kept for a request that is not submitted."""
        # A prompt that this worker also offers is still read; its kept blocks expire by their hold time.
        if request_id not in self._offers:
            self._settling.release_kept(request_id)

    def _decline(self, ticket: HandoffTicket, proof: bytes) -> None:
        with contextlib.suppress(KvoltError):  # an invalid ticket has no peer to notify
            self._mover.decline(ticket.transfer, proof)

    def _count_blocks(self, num_blocks: int, path: str) -> None:
        self.stats.num_blocks += num_blocks
        self.stats.num_bytes += num_blocks * self._mover.block_bytes
        self.stats.by_path[path] += num_blocks

    def _count_failure(self, error: Exception) -> None:
        code = error.code if isinstance(error, KvoltError) else "ticket"
        self.stats.failures[code] += 1
        log.warning("handoff KV transfer failed, recomputing: reason=%s", error)


def _with_ticket(handoff: Handoff, request: Request, instance: InstanceId, ticket: bytes) -> Handoff:
    """The handoff to send: with a prompt only if prefill changed it (expanded media)."""
    return msgspec.structs.replace(
        handoff,
        ticket=ticket,
        prefill_instance=instance,
        token_ids=() if handoff.token_ids == request.token_ids else handoff.token_ids,
        media=() if handoff.media == request.media else handoff.media,
    )


class EngineHandoffs:
    """Handoffs of an engine that transfers KV itself (vLLM, SGLang, TensorRT-LLM); tickets are opaque. Close before the
    engine.

    Replaces `Handoffs` for engines that implement `Prefill` and not `KvAddressable`.
    """

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
        raise _no_decode_first()

    async def pull_rendezvous(
        self, request: Request, rendezvous: Rendezvous, keep_for: RequestId | None = None
    ) -> PullResult:
        raise _no_decode_first()

    def drop(self, request_id: RequestId) -> bool:
        """Release the KV held for a request that no worker will pull. Returns whether it may still have been held."""
        if self._held.pop(request_id, None) is None:
            return False
        self._task_group.start(self._engine.release_prefill(request_id), "release")
        return True

    def release_kept(self, request_id: RequestId) -> None:
        """No-op: the engine keeps nothing for requests that are not submitted."""


def _no_decode_first() -> Unsupported:
    return Unsupported(
        "this engine transfers KV itself and supports prefill-first only", feature="decode-first"
    )
