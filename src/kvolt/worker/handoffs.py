"""Handoffs: gives KV to decode workers, and pulls KV from prefill workers.

Prefill computes the prompt, keeps its blocks and offers them; who has the handoff pulls those that it lacks. Blocks
that do not come, for whatever reason, are computed again: a handoff can make a request slower, never wrong. Owns what
is held for handoffs; the engine owns the blocks, `kv_moving` how they travel.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import InvalidRequest, KvoltError
from kvolt.core.ids import BlockKey, InstanceId, RequestId, SequenceHash
from kvolt.core.request import Handoff, Rendezvous, Request
from kvolt.engines.contract import KvRoom
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.tasks import Crew
from kvolt.worker.kv_moving import KvMover, KvOffer
from kvolt.worker.kv_settling import KvSettling
from kvolt.worker.rendezvous import WAIT_S, MeetingEngine, Parts, Receiving, compute, push

log = logging.getLogger(__name__)

PULL_S = 10.0
"""For the blocks of a prompt to come: to compute them again would have taken less."""


_MARGIN_S = 1.0
"""What an answer of the engine may take on its way."""


class HandoffTicket(msgspec.Struct, frozen=True, array_like=True):
    """What is in `Handoff.ticket`, for the two workers."""

    transfer: bytes
    names: tuple[bytes | int, ...]
    """BlockKeys; on paper, where nothing is stored under them, blocks have numbers."""
    hashes: tuple[SequenceHash, ...]

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        return cast("tuple[BlockKey, ...]", self.names)


@dataclass(slots=True)
class HandoffStats:
    """For metrics."""

    num_given: int = 0
    num_taken: int = 0
    """That came with something to pull, or nothing left to."""
    num_blocks: int = 0
    """That came from others."""
    num_bytes: int = 0
    pull_s: float = 0.0
    by_path: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Pulls that brought nothing, by error code."""


class Pulled(msgspec.Struct, frozen=True):
    """What a handoff brought."""

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
_NOTHING = Pulled()


class Handoffs:
    """See the module. `close` it before the engine."""

    def __init__(
        self,
        engine: MeetingEngine,
        mover: KvMover,
        now: Callable[[], float],
        pull_s: float = PULL_S,
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._now = now
        self._pull_s = pull_s
        self._crew = Crew("handoffs")
        self._settling = KvSettling(engine, self._crew)
        self._offers: dict[RequestId, KvOffer] = {}
        """What waits to be fetched."""
        self.stats = HandoffStats()

    async def close(self) -> None:
        """What is offered is taken back."""
        await self._crew.close()

    async def give(self, request: Request, instance: InstanceId) -> Handoff:
        """Compute a prompt for somebody else. Errors as of the engine's `prefill`; cancelled, it leaves nothing."""
        handoff = await self._engine.prefill(request)
        prefilled_at = self._now()
        try:
            held = await self._engine.hold_kv(request.request_id)
            if not held.blocks:
                await self._engine.release_prefill(request.request_id)
                return _told(handoff, request, instance, b"")
            # Over before the engine lets go of the blocks, or others' bytes would be summed and sent for these.
            hold_s = handoff.expires_in_s or self._pull_s
            left_s = hold_s - (self._now() - prefilled_at) - min(_MARGIN_S, hold_s / 4)
            offer = self._mover.offer(held.blocks, held.keys, max(left_s, 0.0))
        except BaseException:
            self._crew.start(self._engine.release_prefill(request.request_id), "release")
            raise
        self._offers[request.request_id] = offer
        self._crew.start(self._release_after(offer, request.request_id), f"offer {request.request_id}")
        self.stats.num_given += 1
        ticket = HandoffTicket(offer.ticket, held.keys, held.hashes)
        return _told(handoff, request, instance, _encode(ticket))

    # --- decode-first

    @property
    def where(self) -> str:
        """Where decode workers meet this one."""
        return self._mover.where

    async def push(self, request: Request, meeting: Rendezvous, instance: InstanceId) -> Handoff:
        """Compute a prompt for somebody who fetches it meanwhile. As `give`, but that nothing is left to be fetched."""
        request_id = request.request_id
        if request_id in self._offers:  # its blocks are another prompt's until they are let go
            raise InvalidRequest(f"the prompt of {request_id} is here already", param="request_id")
        parts = self._offers[request_id] = Parts(self._mover, meeting, self._pull_s)
        computing = self._crew.start(compute(self._engine, request), f"prompt {request_id}")
        try:
            handoff = await push(self._engine, request, parts, computing)
        except BaseException:
            parts.cancel()
            self._crew.start(self._stop_after(parts, computing, request_id), "stop")
            with contextlib.suppress(KvoltError):
                parts.end()
            raise
        self._crew.start(self._release_after(parts, request_id), f"parts {request_id}")
        self.stats.num_given += 1
        return msgspec.structs.replace(_told(handoff, request, instance, b""), first_tokens=None)

    async def _stop_after(
        self, parts: Parts, computing: asyncio.Task[Handoff | KvoltError], request_id: RequestId
    ) -> None:
        """Blocks are let go once nobody reads them: what another prompt wrote there would be taken for this one's."""
        try:
            await parts.over()
        finally:
            if self._offers.get(request_id) is parts:
                del self._offers[request_id]
            computing.cancel()
            await self._engine.release_prefill(request_id)

    async def receive(
        self, request: Request, meeting: Rendezvous, keep_for: RequestId | None = None
    ) -> Pulled:
        """As `take`, of a prompt that is being computed: its blocks come one part after the other."""
        limit_s = min(WAIT_S if request.deadline_s is None else request.deadline_s, WAIT_S)
        try:
            keys = self._engine.kv_keys(request)
            room = await self._engine.make_room(keys, request.sequence_hashes[: len(keys)])
        except KvoltError as error:
            self._missed(error)
            return _NOTHING
        self.stats.num_taken += 1
        receiving = Receiving(self._mover, meeting, keys, room, self._pull_s)
        if not room.blocks:
            if room.num_present < len(keys):
                self.stats.failures["no_room"] += 1
            self._crew.start(receiving.turn_down(limit_s), "turn down")
            return _NOTHING
        kept_for: RequestId | None = None  # nobody, where this is cancelled
        try:
            await self._bring_parts(receiving, limit_s)
            kept_for = keep_for
        finally:
            num_blocks = receiving.by_path.total()
            await self._settling.settle(room, num_blocks, kept_for)
        self.stats.pull_s += receiving.moving_s
        num_bytes = num_blocks * self._mover.block_bytes
        return Pulled(num_blocks, num_bytes, "+".join(sorted(receiving.by_path)), receiving.moving_s)

    async def _bring_parts(self, receiving: Receiving, limit_s: float) -> None:
        try:
            await receiving.run(limit_s, self._count)
        except KvoltError as error:
            self._missed(error)
            self._crew.start(receiving.turn_down(limit_s), "turn down")

    # ---

    def drop(self, request_id: RequestId) -> bool:
        """Nobody will fetch what was given for a request; whether it was still there. Whoever is at it may end."""
        offer = self._offers.get(request_id)
        if offer is None:
            return False
        if isinstance(offer, Parts):
            offer.take_back()
        else:
            offer.cancel()
        return True

    async def _release_after(self, offer: KvOffer, request_id: RequestId) -> None:
        try:
            await offer.over()
        finally:
            offer.cancel()
            if self._offers.get(request_id) is offer:
                del self._offers[request_id]
            await self._engine.release_prefill(request_id)

    async def take(self, handoff: Handoff, keep_for: RequestId | None = None) -> Pulled:
        """Bring the blocks of a handoff here, those that are not; what came. Never an error but a cancellation.

        With `keep_for` they stay for a request that goes on with them: it is to be submitted at once, or `let_go`.
        Cancelled, this leaves nothing."""
        if not handoff.ticket:
            return _NOTHING
        try:
            ticket = _decode(handoff.ticket)
        except MALFORMED as error:
            self._missed(error)
            return _NOTHING
        try:
            room = await self._engine.make_room(ticket.keys, ticket.hashes)
        except KvoltError as error:
            self._missed(error)
            self._decline(ticket)
            return _NOTHING
        self.stats.num_taken += 1
        if not room.blocks:
            if room.num_present < len(ticket.names):
                self.stats.failures["no_room"] += 1
            self._decline(ticket)
            return _NOTHING
        pulled = _NOTHING
        kept_for: RequestId | None = None  # nobody, where this is cancelled
        try:
            pulled = await self._pull(ticket, room)
            kept_for = keep_for
        finally:
            await self._settling.settle(room, pulled.num_blocks, kept_for)
        return pulled

    async def _pull(self, ticket: HandoffTicket, room: KvRoom) -> Pulled:
        began_at = self._now()
        try:
            path = await self._mover.pull(
                ticket.transfer, room.num_present, ticket.keys, room.blocks, self._pull_s
            )
        except KvoltError as error:
            self._missed(error)
            self._decline(ticket)
            return _NOTHING
        num_blocks = len(room.blocks)
        pulled = Pulled(num_blocks, num_blocks * self._mover.block_bytes, path, self._now() - began_at)
        self._count(num_blocks, path)
        self.stats.pull_s += pulled.took_s
        return pulled

    def let_go(self, request_id: RequestId) -> None:
        """The request that blocks were kept for is not submitted after all."""
        # Of one that this worker itself gives away the blocks are read: those that came for it go by their time.
        if request_id not in self._offers:
            self._settling.let_go(request_id)

    def _decline(self, ticket: HandoffTicket) -> None:
        with contextlib.suppress(KvoltError):  # of what is no ticket nobody waits to hear
            self._mover.decline(ticket.transfer)

    def _count(self, num_blocks: int, path: str) -> None:
        self.stats.num_blocks += num_blocks
        self.stats.num_bytes += num_blocks * self._mover.block_bytes
        self.stats.by_path[path] += num_blocks

    def _missed(self, error: Exception) -> None:
        code = error.code if isinstance(error, KvoltError) else "ticket"
        self.stats.failures[code] += 1
        log.warning("the KV of a handoff did not come and is computed again: %s", error)


def _told(handoff: Handoff, request: Request, instance: InstanceId, ticket: bytes) -> Handoff:
    """As others get it: with the prompt only if it is another than they sent, since media or the like were expanded."""
    return msgspec.structs.replace(
        handoff,
        ticket=ticket,
        prefill_instance=instance,
        token_ids=() if handoff.token_ids == request.token_ids else handoff.token_ids,
        media=() if handoff.media == request.media else handoff.media,
    )
