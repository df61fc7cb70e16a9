"""Handoffs: a worker's halves of a request's move from prefill to decode: the KV that it gives, the KV that it takes.

Prefill computes the prompt, keeps its blocks and offers them; who has the handoff pulls those that it lacks. Blocks
that do not come, for whatever reason, are computed again: a handoff can make a request slower, never wrong. Owns what
is held for handoffs; the engine owns the blocks, `kv_moving` how they travel.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

import msgspec

from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey, InstanceId, RequestId, SequenceHash
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import KvPlaced, KvRoom, Prefill
from kvolt.engines.kv_moving import KvMover, KvOffer
from kvolt.runtime.tasks import Crew

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


class PrefillEngine(Prefill, KvPlaced, Protocol):
    """An engine that takes part."""


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
        engine: PrefillEngine,
        mover: KvMover,
        now: Callable[[], float],
        pull_s: float = PULL_S,
    ) -> None:
        self._engine = engine
        self._mover = mover
        self._now = now
        self._pull_s = pull_s
        self._crew = Crew("handoffs")
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
                return msgspec.structs.replace(handoff, ticket=b"", prefill_instance=instance)
            # Over before the engine lets go of the blocks, or others' bytes would be summed and sent for these.
            hold_s = handoff.expires_in_s or self._pull_s
            left_s = hold_s - (self._now() - prefilled_at) - min(_MARGIN_S, hold_s / 4)
            offer = self._mover.offer(held.blocks, held.keys, max(left_s, 0.0))
        except BaseException:
            self._crew.start(self._engine.release_prefill(request.request_id), "release")
            raise
        self._crew.start(self._release_after(offer, request.request_id), f"offer {request.request_id}")
        self.stats.num_given += 1
        ticket = HandoffTicket(offer.ticket, held.keys, held.hashes)
        return msgspec.structs.replace(handoff, ticket=_encode(ticket), prefill_instance=instance)

    async def _release_after(self, offer: KvOffer, request_id: RequestId) -> None:
        try:
            await offer.over()
        finally:
            offer.cancel()
            await self._engine.release_prefill(request_id)

    async def take(self, handoff: Handoff) -> Pulled:
        """Bring the blocks of a handoff here, those that are not; what came. Never an error but a cancellation."""
        if not handoff.ticket:
            return _NOTHING
        try:
            ticket = _decode(handoff.ticket)
            room = await self._engine.make_room(ticket.keys, ticket.hashes)
        except (msgspec.MsgspecError, KvoltError) as error:
            self._missed(error)
            return _NOTHING
        self.stats.num_taken += 1
        if not room.blocks:
            if room.num_present < len(ticket.names):
                self.stats.failures["no_room"] += 1
            self._mover.decline(ticket.transfer)
            return _NOTHING
        return await self._pull(ticket, room)

    async def _pull(self, ticket: HandoffTicket, room: KvRoom) -> Pulled:
        began_at = self._now()
        pulled = _NOTHING
        try:
            path = await self._mover.pull(
                ticket.transfer, room.num_present, ticket.keys, room.blocks, self._pull_s
            )
            num_blocks = len(room.blocks)
            pulled = Pulled(num_blocks, num_blocks * self._mover.block_bytes, path, self._now() - began_at)
            self._count(pulled)
        except KvoltError as error:
            self._missed(error)
            self._mover.decline(ticket.transfer)
        finally:
            # Whoever asked may have gone: the room is given back all the same.
            settled = self._crew.start(self._engine.settle_kv(room, pulled.num_blocks), "settle")
            await asyncio.shield(settled)
        return pulled

    def _count(self, pulled: Pulled) -> None:
        stats = self.stats
        stats.num_blocks += pulled.num_blocks
        stats.num_bytes += pulled.num_bytes
        stats.pull_s += pulled.took_s
        stats.by_path[pulled.path] += pulled.num_blocks

    def _missed(self, error: Exception) -> None:
        code = error.code if isinstance(error, KvoltError) else "ticket"
        self.stats.failures[code] += 1
        log.warning("the KV of a handoff did not come and is computed again: %s", error)
