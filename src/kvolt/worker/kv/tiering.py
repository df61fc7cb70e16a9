"""Offloading of an engine's blocks to lower tiers, and onboarding for requests.

Decides when blocks are offloaded (complete blocks, in batches, between steps) and whether a prompt's blocks are
onboarded or recomputed, whichever is predicted to be faster. `TieredCache` owns the memory. A block that cannot be
onboarded is computed, so errors here never change an answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StageTimes
from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey, RequestId, SequenceHash
from kvolt.core.kv_events import KvChange, Stored, Tier
from kvolt.core.latency import StepModel
from kvolt.core.request import Request
from kvolt.engines.contract import (
    Engine,
    KvAddressable,
    KvAllocation,
    KvMovable,
    KvTierable,
    KvVisible,
    Prefill,
    SealedKv,
)
from kvolt.kv.peers.server import PeerServer
from kvolt.kv.peers.tier import PeerTier
from kvolt.kv.tiers.admission import TierAdmission
from kvolt.kv.tiers.cache import OnboardResult, TieredCache
from kvolt.kv.tiers.metrics import HitWindow, TierReport, usage_of
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.fetch_or_compute import FetchOrCompute
from kvolt.worker.kv.event_publisher import split_change
from kvolt.worker.kv.mover import KvSettling
from kvolt.worker.kv.onboard_pipeline import OnboardPipeline

log = logging.getLogger(__name__)

_OFFLOAD_PIN = RequestId("kvolt/offload")
"""Id under which blocks are pinned while they are offloaded; one batch at a time."""
_BATCH_BLOCKS = 64
_GATHER_S = 0.2
"""A batch is offloaded when it has this many blocks or after this time: each copy interrupts the device for a moment,
however small it is."""
_POOL_PARTS = 16
"""Minimum batch as a fraction of a small pool: waiting blocks may be evicted before they are offloaded."""
_MARGIN_S = 2.0
"""Allowance for delays between the engine's hold time and this process."""
_MAX_ONBOARDING = 16
"""Requests with onboarding in progress."""
_ONBOARD_S = 10.0
"""Timeout of onboarding for a request."""


class TieredEngine(KvVisible, KvMovable, KvAddressable, KvTierable, Prefill, Protocol):
    """Engine interface of tiering."""


class _ConcurrentOnboarding(NamedTuple):
    """Blocks to onboard while the engine computes the prompt."""

    request: Request
    allocation: KvAllocation
    blocks: list[TierBlock]
    num_keys: int
    """Full blocks of the prompt."""


class Tiering:
    """See the module. `start` it after the engine, and `close` it before."""

    def __init__(
        self,
        engine: TieredEngine,
        cache: TieredCache,
        now: Callable[[], float],
        publish: Callable[[tuple[KvChange, ...]], None],
        model: StepModel | None,
        block_size: int,
        step_tokens: int,
        peers: tuple[PeerTier, PeerServer] | None = None,
        admission: TierAdmission | None = None,
    ) -> None:
        """`publish`: called with changes of the tiers. `model`, `step_tokens`: see `FetchOrCompute`. `peers`: the tier
        of peer workers' blocks, and the server for peers. `admission`: which blocks are offloaded; all by default."""
        self._engine = engine
        self.cache = cache
        self._now = now
        self._publish = publish
        self._block_size = block_size
        self._choice = FetchOrCompute(lambda: model, block_size, step_tokens, cache.host.block_s)
        self.peers = peers
        self._admission = TierAdmission() if admission is None else admission
        self._sealed = asyncio.Event()
        self._num_sealed = 0
        """Blocks that wait to be offloaded; some may have been evicted."""
        self._batch_ready = asyncio.Event()
        self._batch_blocks = min(_BATCH_BLOCKS, max(cache.num_device_blocks // _POOL_PARTS, 1))
        self._task_group = TaskGroup("tiering")
        self._settling = KvSettling(engine, self._task_group)
        self._offloading: asyncio.Task[None] | None = None
        self._num_onboarding = 0
        self.hits = HitWindow()
        self.onboarded: Counter[Tier] = Counter()
        """Onboarded blocks, by source tier."""
        self._concurrent: dict[RequestId, _ConcurrentOnboarding] = {}
        """Concurrent onboarding that has not started, by request."""

    async def start(self) -> None:
        """Start the tiers and offloading. The first `publish_changes` publishes blocks found on disk."""
        await self.cache.start()
        await self._engine.pin_sealed(_OFFLOAD_PIN)  # from now on the engine tracks completed blocks
        self.cache.host.set_on_change(self.publish_changes)
        self._offloading = self._task_group.start(self._offload_loop(), "offload")

    async def close(self) -> None:
        if self._offloading is not None:  # before the task group, which releases its pins
            self._offloading.cancel()
            await asyncio.wait([self._offloading])
        await self._task_group.close()
        await self.cache.close()

    # --- offload

    def on_engine_changes(self, changes: tuple[KvChange, ...]) -> None:
        """Count completed blocks for the next batch."""
        num_sealed = sum(change.num_blocks for change in changes if isinstance(change, Stored))
        if not num_sealed:
            return
        self._sealed.set()
        self._num_sealed += num_sealed
        if self._num_sealed >= self._batch_blocks:
            self._batch_ready.set()

    async def _offload_loop(self) -> None:
        while True:
            await self._sealed.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_S):
                    await self._batch_ready.wait()
            try:
                num_done = await self.offload()
            except Exception as error:  # the engine may have ended; otherwise the next batch may succeed
                log.warning("offload failed: %r", error)
                num_done = 0
            # The engine limits the size of a batch. The rest is offloaded at once only if it fills a batch, since each
            # one waits for a step. Blocks evicted before their turn are never returned.
            self._num_sealed = max(self._num_sealed - num_done, 0) if num_done else 0
            if not self._num_sealed:
                self._sealed.clear()
            if self._num_sealed < self._batch_blocks:
                self._batch_ready.clear()

    async def offload(self) -> int:
        """Offload a batch of completed blocks and return its size."""
        started_at = self._now()
        sealed = await self._engine.pin_sealed(_OFFLOAD_PIN)
        if not sealed:
            return 0
        try:
            await self._offload(sealed, started_at)
        finally:
            await asyncio.shield(self._task_group.start(self._release(_OFFLOAD_PIN), "release"))
        self.publish_changes()
        return sum(len(run.blocks) for run in sealed)

    async def _offload(self, sealed: Sequence[SealedKv], started_at: float) -> None:
        """Copy all runs together, since each copy interrupts the device. Copies made after the hold time are dropped:
        the blocks may hold other bytes by then, and the checksum would be computed over those."""
        held_s = min(run.expires_in_s for run in sealed)
        ends_at = started_at + held_s - min(_MARGIN_S, held_s / 4)
        admitted: list[TierBlock] = []
        numbers: list[int] = []
        for run in sealed:
            blocks = _run_blocks(run)
            for index in self._admission.admitted_indexes(blocks):
                admitted.append(blocks[index])
                numbers.append(run.blocks[index])
        await self.cache.offload(admitted, numbers, lambda: self._now() < ends_at)

    def clear(self) -> int:
        """Drop all unused blocks of the tiers and return their number."""
        num_cleared = self.cache.host.clear()
        self.publish_changes()
        return num_cleared

    # --- onboard

    def report(self) -> TierReport:
        """Numbers for metrics."""
        return TierReport(
            tiers=usage_of(self.cache.host, self.hits),
            num_requested=self.hits.num_requested,
            num_tokens=self.onboarded.total() * self._block_size,
            num_declined=self._choice.num_declined,
            num_dropped=self.cache.host.num_dropped,
            num_served=None if self.peers is None else self.peers[1].num_served,
        )

    def find_offloaded(self, request: Request) -> tuple[BlockKey, ...]:
        """Block keys of the prompt if a tier may have some of them, else none."""
        try:
            keys = self._engine.kv_keys(request)
        except KvoltError:  # `submit` raises it again
            return ()
        self._admission.add_request(keys, request.routing)
        if self.peers is not None:
            self.peers[0].add_sources(keys, request.kv_sources)
        needs_lookup = not self.cache.host.has_complete_index and not _has_handoff(request)
        if needs_lookup or self.cache.host.has_any(keys):
            return keys
        self._count(request, len(keys), OnboardResult())
        return ()

    async def onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> StageTimes | None:
        """Onboard blocks of the prompt, if that is faster than computing them. `keys`: result of `find_offloaded`.

        Returns the times if any block was onboarded. Submit the request next, then call `onboard_concurrently`;
        otherwise call `release_kept`. Raises nothing but CancelledError, which releases all blocks."""
        if self._num_onboarding >= _MAX_ONBOARDING:  # more would only wait for each other and hold blocks
            return None
        started_at = self._now()
        self._num_onboarding += 1
        try:
            result = await self._onboard(request, keys)
            self.publish_changes()
        except Exception as error:  # the prompt can be computed
            log.warning("onboarding failed: request_id=%s error=%r", request.request_id, error)
            return None
        finally:
            self._num_onboarding -= 1
        self.onboarded.update(dict(result.by_tier))
        return self._stages(result, started_at)

    async def _onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> OnboardResult:
        num_present = await self._engine.match(request) // self._block_size
        tiers = self.cache.host.find_tiers(keys, num_present)
        num_known = num_present + len(tiers)
        if _has_handoff(request):
            # Only the host tier is faster than the prefill worker.
            tiers = list(takewhile(lambda tier: tier is Tier.HOST, tiers))
        elif num_known < len(keys) and not self.cache.host.has_complete_index:
            budget_s = self._choice.lookup_budget_s(request.num_prompt_tokens, num_known, len(keys))
            await self.cache.host.lookup(keys[num_known:], budget_s)
            tiers = self.cache.host.find_tiers(keys, num_present)
        decision = self._choice.decide(request.num_prompt_tokens, num_present, tiers)
        result = OnboardResult()
        if decision.is_concurrent and not _has_handoff(request):
            # The last token is always computed, and so is a block that ends with it.
            end = min(num_present + decision.num_blocks, (request.num_prompt_tokens - 1) // self._block_size)
            await self._prepare_concurrent(request, keys[:end], len(keys))
            return result
        if decision.num_blocks:
            result = await self._onboard_allocated(request, keys[: num_present + decision.num_blocks])
        self._count(request, len(keys), result)
        return result

    def _count(self, request: Request, num_keys: int, result: OnboardResult) -> None:
        if not _has_handoff(request):  # the prefill worker counts those
            self.hits.add(num_keys, result.by_tier)

    async def _onboard_allocated(self, request: Request, keys: tuple[BlockKey, ...]) -> OnboardResult:
        allocation = await self._engine.allocate_kv(keys, request.sequence_hashes[: len(keys)])
        if not allocation.blocks:
            return OnboardResult()
        result = OnboardResult()
        kept_for: RequestId | None = None  # stays None if this is cancelled
        try:
            blocks = _chain_blocks(keys, request.sequence_hashes)
            missing = blocks[allocation.num_present : allocation.num_present + len(allocation.blocks)]
            result = await self.cache.onboard(missing, allocation.blocks, _ONBOARD_S)
            kept_for = request.request_id
        finally:
            await self._settling.settle(allocation, result.num_blocks, kept_for)
        return result

    async def _prepare_concurrent(self, request: Request, keys: tuple[BlockKey, ...], num_keys: int) -> None:
        allocation = await self._engine.allocate_kv(keys, request.sequence_hashes[: len(keys)])
        if allocation.blocks:
            blocks = _chain_blocks(keys, request.sequence_hashes)[allocation.num_present :][
                : len(allocation.blocks)
            ]
            self._concurrent[request.request_id] = _ConcurrentOnboarding(
                request, allocation, blocks, num_keys
            )
        else:
            self._count(request, num_keys, OnboardResult())

    def has_concurrent(self, request_id: RequestId) -> bool:
        """Whether `onboard_concurrently` has blocks to onboard."""
        return request_id in self._concurrent

    def _stages(self, result: OnboardResult, started_at: float) -> StageTimes | None:
        if not result.num_blocks:
            return None
        took_s = self._now() - started_at
        return StageTimes(onboard_ms=took_s * 1e3, onboard_blocks=result.num_blocks)

    async def onboard_concurrently(self, request_id: RequestId) -> StageTimes | None:
        """Onboard while the engine computes the prompt of a submitted request; nothing for most requests.

        Cancel it when the request ends. Raises nothing but CancelledError."""
        concurrent = self._concurrent.pop(request_id, None)
        if concurrent is None:
            return None
        pipeline = OnboardPipeline(self._engine, self.cache, request_id, concurrent.allocation)
        started_at = self._now()
        self._num_onboarding += 1
        try:
            await pipeline.run(concurrent.blocks, _ONBOARD_S)
        except Exception as error:  # the engine computes the prompt
            log.warning("onboarding failed: request_id=%s error=%r", request_id, error)
        finally:
            self._num_onboarding -= 1
            result = pipeline.fetched
            self.onboarded.update(dict(result.by_tier))
            self._count(concurrent.request, concurrent.num_keys, result)
            with contextlib.suppress(KvoltError):  # the engine is dead
                await self._settling.settle(concurrent.allocation, pipeline.num_filled, None)
        self.publish_changes()
        return self._stages(result, started_at)

    def release_kept(self, request_id: RequestId) -> None:
        """Release blocks onboarded for a request that is not submitted."""
        self._settling.release_kept(request_id)
        concurrent = self._concurrent.pop(request_id, None)
        if concurrent is not None and not self._task_group.closed:
            self._task_group.start(self._release_allocation(concurrent.allocation), "settle")

    async def _release_allocation(self, allocation: KvAllocation) -> None:
        with contextlib.suppress(KvoltError):
            await self._engine.commit_kv(allocation, 0)

    async def _release(self, request_id: RequestId) -> None:
        with contextlib.suppress(KvoltError):
            await self._engine.release_prefill(request_id)

    def publish_changes(self) -> None:
        """Publish changes of the tiers to routers."""
        for change in self.cache.host.take_changes():
            for part in split_change(change):
                self._publish((part,))


TieringFactory = Callable[
    [Engine, EngineInfo, Callable[[], float], Callable[[tuple[KvChange, ...]], None]], Tiering
]
"""Creates the tiering of a started engine, from its info, the clock and a callback for changes. ConfigError."""


def _has_handoff(request: Request) -> bool:
    """Whether a prefill worker sends the rest of the prompt."""
    return request.handoff is not None and not request.prefill_only


def _run_blocks(run: SealedKv) -> list[TierBlock]:
    return _chain_blocks(run.keys, run.hashes, run.first, run.parent, run.parent_hash)


def _chain_blocks(
    keys: Sequence[BlockKey],
    hashes: Sequence[SequenceHash],
    first: int = 0,
    parent: BlockKey | None = None,
    parent_hash: SequenceHash | None = None,
) -> list[TierBlock]:
    """A chain of blocks, one per key."""
    blocks: list[TierBlock] = []
    for index, (key, sequence_hash) in enumerate(zip(keys, hashes, strict=False), first):
        blocks.append(TierBlock(key, sequence_hash, parent, parent_hash, index))
        parent, parent_hash = key, sequence_hash
    return blocks
