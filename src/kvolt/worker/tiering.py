"""Tiering: an engine's blocks on their way to the tiers below it, and back before a request that can use them.

Owns when blocks are copied down (once they are complete, a batch at a time, beside the steps) and whether a prompt's
are brought back or computed again, whichever is expected to be sooner. Knows no tier's memory: `TieredCache` has them.
Nothing here can make a request wrong: a block that does not come is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import msgspec

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import KvChange, Stored, Tier
from kvolt.core.latency import StepModel
from kvolt.core.request import Request
from kvolt.engines.contract import (
    Engine,
    KvMovable,
    KvPlaced,
    KvRoom,
    KvTierable,
    KvVisible,
    Prefill,
    SealedKv,
)
from kvolt.kv.tiers.admission import Admission
from kvolt.kv.tiers.cache import Fetched, TieredCache
from kvolt.kv.tiers.hit_window import HitWindow
from kvolt.kv.tiers.peer_server import PeerGiving
from kvolt.kv.tiers.peer_tier import PeerTier
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Crew
from kvolt.scheduler.fetch_or_compute import FetchOrCompute
from kvolt.worker.kv_settling import KvSettling
from kvolt.worker.onboard_pipeline import OnboardPipeline
from kvolt.worker.tier_event_publisher import in_parts

log = logging.getLogger(__name__)

_PINNED = RequestId("kvolt/offload")
"""What holds blocks while they are copied down; one batch at a time."""
_ENOUGH_BLOCKS = 64
_GATHER_S = 0.2
"""What is completed goes down together, that many blocks or what there is after so long: each time a device is taken
from who computes for a moment, however few they are."""
_POOL_PARTS = 16
"""Of a small pool, what is enough is such a part: blocks that wait may go before it is their turn."""
_MARGIN_S = 2.0
"""What may be between the engine's clock and ours."""
_MOST_AT_ONCE = 16
"""Requests that blocks are brought for."""
_MOST_S = 10.0
"""For the blocks of a request to come."""


class TieredEngine(KvVisible, KvMovable, KvPlaced, KvTierable, Prefill, Protocol):
    """What an engine must offer."""


class Onboarded(msgspec.Struct, frozen=True):
    """What was brought for a request."""

    num_blocks: int = 0
    by_tier: tuple[tuple[Tier, int], ...] = ()
    took_s: float = 0.0

    @property
    def stages(self) -> StageTimes:
        return StageTimes(onboard_ms=self.took_s * 1e3, onboard_blocks=self.num_blocks)


_NOTHING = Onboarded()


class _Ahead(NamedTuple):
    """What is to come while a request's prompt is computed."""

    request: Request
    room: KvRoom
    blocks: list[TierBlock]
    num_keys: int
    """Of its prompt."""


class Tiering:
    """See the module. `start` it after the engine, and `close` it before."""

    def __init__(
        self,
        engine: TieredEngine,
        cache: TieredCache,
        now: Callable[[], float],
        tell: Callable[[tuple[KvChange, ...]], None],
        model: StepModel | None,
        block_size: int,
        step_tokens: int,
        peers: tuple[PeerTier, PeerGiving] | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`tell`: of blocks that come to a tier and go. `model`, `step_tokens`: see `FetchOrCompute`. `peers`: of the
        cache's tiers the one that is others', and what others are given. `admission`: which blocks are kept; all, where
        there is none."""
        self._engine = engine
        self.cache = cache
        self._now = now
        self._tell = tell
        self._block_size = block_size
        self._choice = FetchOrCompute(lambda: model, block_size, step_tokens, cache.host.block_s)
        self.peers = peers
        self._admission = Admission() if admission is None else admission
        self._sealed = asyncio.Event()
        self._num_sealed = 0
        """That wait for a batch, or have gone."""
        self._enough = asyncio.Event()
        self._num_enough = min(_ENOUGH_BLOCKS, max(cache.num_device_blocks // _POOL_PARTS, 1))
        self._crew = Crew("tiering")
        self._settling = KvSettling(engine, self._crew)
        self._offloading: asyncio.Task[None] | None = None
        self._num_onboarding = 0
        self.hits = HitWindow()
        self.brought: Counter[Tier] = Counter()
        """Blocks of prompts, by where they came from."""
        self._ahead: dict[RequestId, _Ahead] = {}
        """What is to come while a request's prompt is computed, until it is submitted."""

    async def start(self) -> None:
        """Of what is found on a disk is told by the first `tell_changes`."""
        await self.cache.start()
        await self._engine.pin_sealed(_PINNED)  # from now on it remembers what it completes
        self.cache.host.on_change(self.tell_changes)
        self._offloading = self._crew.start(self._offload_on(), "offload")

    async def close(self) -> None:
        if self._offloading is not None:  # before the crew, which lets go of what is held for it
            self._offloading.cancel()
            await asyncio.wait([self._offloading])
        await self._crew.close()
        await self.cache.close()

    # --- down

    def saw(self, changes: tuple[KvChange, ...]) -> None:
        """What the engine told of its blocks."""
        num_sealed = sum(change.num_blocks for change in changes if isinstance(change, Stored))
        if not num_sealed:
            return
        self._sealed.set()
        self._num_sealed += num_sealed
        if self._num_sealed >= self._num_enough:
            self._enough.set()

    async def _offload_on(self) -> None:
        while True:
            await self._sealed.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._enough.wait()
            try:
                num_done = await self.offload()
            except Exception as error:  # the engine has ended, or is about to; else the next may be better
                log.warning("blocks are not offloaded: %r", error)
                num_done = 0
            # An engine gives no more at a time than it can hold: the rest goes on at once only if it is a batch of its
            # own, since each one waits for a step. Some may have gone before it was their turn, and are never given.
            self._num_sealed = max(self._num_sealed - num_done, 0) if num_done else 0
            if not self._num_sealed:
                self._sealed.clear()
            if self._num_sealed < self._num_enough:
                self._enough.clear()

    async def offload(self) -> int:
        """A batch of what was completed until now; of how many blocks."""
        began_at = self._now()
        sealed = await self._engine.pin_sealed(_PINNED)
        if not sealed:
            return 0
        try:
            await self._offload(sealed, began_at)
        finally:
            await asyncio.shield(self._crew.start(self._release(_PINNED), "release"))
        self.tell_changes()
        return sum(len(run.blocks) for run in sealed)

    async def _offload(self, sealed: Sequence[SealedKv], began_at: float) -> None:
        """All together: answers complete a block here and one there, and each copy of its own takes the device from who
        computes. Blocks that may not be held any more are not looked at, and what was copied of them is not kept: the
        bytes may be another's, and the checksum would be right."""
        held_s = min(run.expires_in_s for run in sealed)
        ends_at = began_at + held_s - min(_MARGIN_S, held_s / 4)
        wanted: list[TierBlock] = []
        numbers: list[int] = []
        for run in sealed:
            blocks = _blocks(run)
            for place in self._admission.places(blocks):
                wanted.append(blocks[place])
                numbers.append(run.blocks[place])
        await self.cache.offload(wanted, numbers, lambda: self._now() < ends_at)

    def clear(self) -> int:
        """Forget all that nobody is at; how many blocks."""
        num_gone = self.cache.host.clear()
        self.tell_changes()
        return num_gone

    # --- up

    @property
    def num_tokens(self) -> int:
        """Of prompts, those whose KV was brought."""
        return self.brought.total() * self._block_size

    @property
    def num_declined(self) -> int:
        """Blocks that were computed again though they could have been brought, since that was sooner."""
        return self._choice.num_declined

    def names_below(self, request: Request) -> tuple[BlockKey, ...]:
        """Of its prompt's blocks, if a tier may have some of them; none where nothing can be brought."""
        try:
            keys = self._engine.kv_keys(request)
        except KvoltError:  # the engine says so itself
            return ()
        self._admission.asked(keys, request.routing)
        if self.peers is not None:
            self.peers[0].expect(keys, request.kv_sources)
        is_far_asked = not self.cache.host.knows_all and not _is_handed_over(request)
        if is_far_asked or self.cache.host.has_any(keys):
            return keys
        self._count(request, len(keys), Fetched())
        return ()

    async def onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> Onboarded:
        """Bring what is here of a request's prompt, if that is sooner than to compute it. `keys`: as `names_below` told
        them. It is to be submitted at once, with `bring_ahead` after that, or `let_go`. Never an error but a
        cancellation, which leaves nothing."""
        if self._num_onboarding >= _MOST_AT_ONCE:  # they would wait for each other, and hold blocks meanwhile
            return _NOTHING
        began_at = self._now()
        self._num_onboarding += 1
        try:
            found = await self._onboard(request, keys)
            self.tell_changes()
        except Exception as error:  # whatever it was, the prompt can be computed
            log.warning("blocks of %s were not brought back: %r", request.request_id, error)
            return _NOTHING
        finally:
            self._num_onboarding -= 1
        self.brought.update(dict(found.by_tier))
        return Onboarded(found.num_blocks, found.by_tier, self._now() - began_at)

    async def _onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> Fetched:
        num_present = await self._engine.match(request) // self._block_size
        tiers = self.cache.host.tiers_of(keys, num_present)
        num_known = num_present + len(tiers)
        if _is_handed_over(request):
            # What the host has is nearer than who computed the prompt; nothing else is.
            tiers = list(takewhile(lambda tier: tier is Tier.HOST, tiers))
        elif num_known < len(keys) and not self.cache.host.knows_all:
            worth_s = self._choice.looking_s(request.num_prompt_tokens, num_known, len(keys))
            await self.cache.host.look(keys[num_known:], worth_s)
            tiers = self.cache.host.tiers_of(keys, num_present)
        wanted = self._choice.judge(request.num_prompt_tokens, num_present, tiers)
        found = Fetched()
        if wanted.is_meanwhile and not _is_handed_over(request):
            # The last token is computed whatever comes, and with it the block that it ends.
            end = min(num_present + wanted.num_blocks, (request.num_prompt_tokens - 1) // self._block_size)
            await self._prepare_ahead(request, keys[:end], len(keys))
            return found
        if wanted.num_blocks:
            found = await self._bring(request, keys[: num_present + wanted.num_blocks])
        self._count(request, len(keys), found)
        return found

    def _count(self, request: Request, num_keys: int, found: Fetched) -> None:
        if not _is_handed_over(request):  # of that another says what was found
            self.hits.add(num_keys, found.by_tier)

    async def _bring(self, request: Request, keys: tuple[BlockKey, ...]) -> Fetched:
        room = await self._engine.make_room(keys, request.sequence_hashes[: len(keys)])
        if not room.blocks:
            return Fetched()
        found = Fetched()
        kept_for: RequestId | None = None  # nobody, where this is cancelled
        try:
            blocks = _chain(keys, request.sequence_hashes)
            wanted = blocks[room.num_present : room.num_present + len(room.blocks)]
            found = await self.cache.fetch(wanted, room.blocks, _MOST_S)
            kept_for = request.request_id
        finally:
            await self._settling.settle(room, found.num_blocks, kept_for)
        return found

    async def _prepare_ahead(self, request: Request, keys: tuple[BlockKey, ...], num_keys: int) -> None:
        room = await self._engine.make_room(keys, request.sequence_hashes[: len(keys)])
        if room.blocks:
            blocks = _chain(keys, request.sequence_hashes)[room.num_present :][: len(room.blocks)]
            self._ahead[request.request_id] = _Ahead(request, room, blocks, num_keys)
        else:
            self._count(request, num_keys, Fetched())

    def is_coming(self, request_id: RequestId) -> bool:
        """Whether `bring_ahead` has something to bring."""
        return request_id in self._ahead

    async def bring_ahead(self, request_id: RequestId) -> Onboarded:
        """What is to come while the prompt is computed of a request that the engine has, or will at once: nothing for
        most. To be cancelled when the request is over; never another error."""
        ahead = self._ahead.pop(request_id, None)
        if ahead is None:
            return _NOTHING
        bringing = OnboardPipeline(self._engine, self.cache, request_id, ahead.room)
        began_at = self._now()
        self._num_onboarding += 1
        try:
            await bringing.bring(ahead.blocks, _MOST_S)
        except Exception as error:  # whatever it was, the prompt is computed
            log.warning("blocks of %s were not brought back: %r", request_id, error)
        finally:
            self._num_onboarding -= 1
            found = bringing.fetched
            self.brought.update(dict(found.by_tier))
            self._count(ahead.request, ahead.num_keys, found)
            with contextlib.suppress(KvoltError):  # of an engine that is gone
                await self._settling.settle(ahead.room, bringing.num_filled, None)
        self.tell_changes()
        return Onboarded(found.num_blocks, found.by_tier, self._now() - began_at)

    def let_go(self, request_id: RequestId) -> None:
        """A request that blocks were brought for is not submitted after all."""
        self._settling.let_go(request_id)
        ahead = self._ahead.pop(request_id, None)
        if ahead is not None and not self._crew.closed:
            self._crew.start(self._give_back(ahead.room), "settle")

    async def _give_back(self, room: KvRoom) -> None:
        with contextlib.suppress(KvoltError):
            await self._engine.settle_kv(room, 0)

    async def _release(self, request_id: RequestId) -> None:
        with contextlib.suppress(KvoltError):
            await self._engine.release_prefill(request_id)

    def tell_changes(self) -> None:
        """Of blocks in tiers, to who routes."""
        for change in self.cache.host.take_changes():
            for part in in_parts(change):
                self._tell((part,))


NewTiering = Callable[
    [Engine, EngineInfo, Callable[[], float], Callable[[tuple[KvChange, ...]], None]], Tiering
]
"""For an engine that has started, and this is what it is: the clock, and who is told of changes. ConfigError."""


def _is_handed_over(request: Request) -> bool:
    """Whether the rest of its prompt comes from who computed it, and is not computed here."""
    return request.handoff is not None and not request.prefill_only


def _blocks(run: SealedKv) -> list[TierBlock]:
    return _chain(run.keys, run.hashes, run.first, run.parent, run.parent_hash)


def _chain(
    keys: Sequence[BlockKey],
    hashes: Sequence[SequenceHash],
    first: int = 0,
    parent: BlockKey | None = None,
    parent_hash: SequenceHash | None = None,
) -> list[TierBlock]:
    """Blocks one below the other, for as many as there are keys."""
    blocks: list[TierBlock] = []
    for index, (key, sequence_hash) in enumerate(zip(keys, hashes, strict=False), first):
        blocks.append(TierBlock(key, sequence_hash, parent, parent_hash, index))
        parent, parent_hash = key, sequence_hash
    return blocks
