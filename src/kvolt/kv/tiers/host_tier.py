"""HostTier: blocks in slots of host memory, and the lower tiers to which they are written and from which they are read.

Owns the host's slot table and the order of the tiers. `store` copies blocks of an engine or another process into slots;
`onboard` loads blocks from lower tiers into slots and holds them until `release`. Stored blocks are also written to the
lower tiers that admit them (`TierWriter`). The slot table is used on the event loop only; bytes move in threads, in
held slots.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.lower_tier import LowerTier, TierStats, not_resizable
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import SlotTable, TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.kv.tiers.writer import TierWriter
from kvolt.runtime.tasks import TaskGroup
from kvolt.transfer.memory.device_memory import DeviceMemory
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20
"""Bytes per batch between two tiers."""
_MAX_BATCH = 1024
_ALLOCATION_S = 60.0
"""Wait at startup for the allocation of memory; the rest is allocated in the background."""
DEFAULT_PENDING_SHARE = 0.25
"""Default share of the slots reserved for blocks that wait to be written to a lower tier."""
_GUESSED_BYTES_PER_S = {Tier.HOST: 4e9, Tier.PEER: 2e9, Tier.DISK: 0.5e9, Tier.OBJECT: 0.1e9}

Fill = Callable[[Numbers, list[int]], Awaitable[tuple[Sums, float]]]
"""Copies blocks (by index) into slots; returns their checksums and the elapsed seconds."""


class Onboarded(NamedTuple):
    """Blocks held in the host tier, and the tiers they were in before."""

    keys: Sequence[BlockKey]
    tiers: list[Tier]


class HostTier:
    """See the module. Call `start` first and `close` last."""

    def __init__(
        self,
        shape: BlockShape,
        num_blocks: int,
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
        device: DeviceMemory | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        """`lower`: lower tiers, fastest first, each with the number of sightings before a block is written to it.
        `device`: pins the memory for fast copies. `memory`: use this instead of allocating."""
        self.shape = shape
        self.memory = SlotMemory(shape, num_blocks, device) if memory is None else memory
        self.slot_table = SlotTable(Tier.HOST, num_blocks, eviction)
        self.lower = tuple(tier for tier, _ in lower)
        self._writers = [
            TierWriter(tier, self.slot_table, self.memory, touches, self.batch_blocks)
            for tier, touches in lower
        ]
        self.set_pending_share(DEFAULT_PENDING_SHARE)
        for tier in self.lower:
            tier.on_corrupt = self.mark_corrupt
        self.stats = {Tier.HOST: TierStats(), **{each.tier: each.stats for each in self.lower}}
        self._loading: dict[BlockKey, tuple[Tier, asyncio.Future[None]]] = {}
        """Blocks being read from a lower tier; done on success and failure."""
        self.bypasses_host: Callable[[Tier], bool] = lambda tier: False
        """Whether blocks of a tier are read directly into the engine's memory."""
        self.num_clears = 0
        """Number of `clear` calls; blocks in transit during one are not kept."""
        self._resizing = asyncio.Lock()
        self._is_shrinking = False
        """Blocks remain in slots beyond the new capacity."""
        self._task_group = TaskGroup("kv host tier")
        self._memory_thread = TierThread("kv-memory")

    async def start(self) -> None:
        """Start the lower tiers and allocate memory, waiting for it up to a limit, since allocation delays copies."""
        growing = self._task_group.start(self._grow(), "allocate memory")
        for writer in self._writers:
            await writer.lower.start()
            writer.start(self._task_group)
        await asyncio.wait([growing], timeout=_ALLOCATION_S)

    def set_pending_share(self, share: float) -> None:
        """Reserve this share of the slots for blocks that are next to be written to lower tiers."""
        writers = [writer for writer in self._writers if writer.lower.tier is not Tier.PEER]
        for writer in writers:
            writer.pending_share = share / len(writers)

    def set_on_change(self, callback: Callable[[], None]) -> None:
        """Set the callback for background changes of the lower tiers."""
        for writer in self._writers:
            writer.on_change = callback

    async def _grow(self) -> None:
        """Allocate the memory in parts, so that copies run in between."""
        try:
            for num_slots in self.memory.steps():
                # The slot table knows the capacity first; the memory is resized later in its thread.
                if num_slots > self.slot_table.num_slots:
                    return
                await self._memory_thread.run(self.memory.grow_to, num_slots)
        except OSError as error:
            num_slots = self.memory.num_allocated
            log.warning("host tier reduced: out of memory: blocks=%d error=%s", num_slots, error)
            self.slot_table.resize(max(num_slots, 1))

    async def close(self) -> None:
        """Write pending blocks to lower tiers within a time limit and close everything."""
        await asyncio.gather(*(writer.close() for writer in self._writers))
        await self._task_group.close()
        for tier in self.lower:
            await tier.close()
        if self.memory.num_bytes:
            await self._memory_thread.run(self.memory.close)
        await self._memory_thread.close()

    async def resize(self, tier: Tier, num_blocks: int) -> None:
        """Change the capacity of a tier. KvoltError if not possible."""
        if tier is Tier.HOST:
            async with self._resizing:
                self._is_shrinking = num_blocks < self.slot_table.num_slots
                self.slot_table.resize(num_blocks)
                await self._fit_memory()
            self._task_group.start(self._grow(), "allocate memory")
            return
        for writer in self._writers:
            if writer.lower.tier is tier:
                await writer.lower.resize(num_blocks)
                writer.wake()
                return
        raise not_resizable(tier)

    async def _fit_memory(self) -> None:
        """Release memory beyond the capacity and the last used slot."""
        end = self.slot_table.end
        self._is_shrinking = self._is_shrinking and end > self.slot_table.num_slots
        await self._memory_thread.run(self.memory.resize, self.slot_table.num_slots, end)

    # --- lookup

    @property
    def batch_blocks(self) -> int:
        """Blocks per batch."""
        return max(min(_BATCH_BYTES // self.shape.slot_bytes, _MAX_BATCH, self.slot_table.num_slots // 4), 1)

    def size(self, tier: Tier) -> tuple[int, int | None]:
        """Number of blocks in a tier, and its capacity if known."""
        contents: SlotTable | LowerTier = self.slot_table
        if tier is not Tier.HOST:
            contents = next(each for each in self.lower if each.tier is tier)
        return len(contents), contents.num_slots

    def shape_in(self, tier: Tier) -> BlockShape:
        """Shape of the blocks stored in a tier, as far as known."""
        shapes = (each.shape for each in self.lower if each.tier is tier)
        return next(shapes, None) or self.shape

    def find_tiers(self, keys: Sequence[BlockKey], start: int = 0) -> list[Tier]:
        """Known tier of each of `keys` from `start` on, up to the first in none."""
        tiers: list[Tier] = []
        for key in keys[start:]:
            tier = self._tier_of(key)
            if tier is None:
                break
            tiers.append(tier)
        return tiers

    def num_local(self, keys: Sequence[BlockKey]) -> int:
        """Length of the prefix that is in this worker's own tiers."""
        for index, key in enumerate(keys):
            loading_from = self._loading[key][0] if key in self._loading else None
            if loading_from is Tier.PEER or self._tier_of(key) in (None, Tier.PEER):
                return index
        return len(keys)

    def _tier_of(self, key: BlockKey) -> Tier | None:
        if self.slot_table.has(key) or key in self._loading:
            return Tier.HOST
        for each in self.lower:
            if each.has(key):
                return each.tier
        return None

    def has_any(self, keys: Sequence[BlockKey]) -> bool:
        """Whether any of them is in a tier. Usually the blocks before it then are, too."""
        return any(self.slot_table.has(key) or any(each.has(key) for each in self.lower) for key in keys)

    @property
    def has_complete_index(self) -> bool:
        """Whether `find_tiers` is complete, so that `lookup` is not needed."""
        return all(each.lookup_s is None for each in self.lower)

    async def lookup(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """Query tiers with an incomplete index whose lookup takes less than about `worth_s`."""
        for each in self.lower:
            # Only keys after the known prefix: some tiers search for the end of theirs.
            rest = keys[len(self.find_tiers(keys)) :]
            if rest and each.lookup_s is not None and each.lookup_s < worth_s:
                await each.lookup(rest, worth_s)

    def block_s(self, tier: Tier) -> float:
        """Time to onboard one block from a tier: measured, or estimated before the first load."""
        above_s, stats = 0.0, self.stats[tier]
        known_s = stats.block_s
        if tier is not Tier.HOST and not self.bypasses_host(tier):
            above_s = self.block_s(Tier.HOST)
        elif known_s is None:
            # Assume loads take as long as stores; an optimistic guess, so that a first load is tried.
            known_s = stats.store_block_s
        return above_s + (self.shape.block_bytes / _GUESSED_BYTES_PER_S[tier] if known_s is None else known_s)

    def take_changes(self) -> tuple[Change, ...]:
        """Changes of all tiers since the last call, for routers."""
        changes = self.slot_table.take_changes()
        for each in self.lower:
            changes = (*changes, *each.take_changes())
        return changes

    @property
    def num_dropped(self) -> int:
        """Blocks evicted before they were written to a lower tier."""
        return sum(writer.num_dropped for writer in self._writers)

    @property
    def num_skipped(self) -> dict[Tier, int]:
        """Sightings per tier that did not reach the number required to write the block."""
        return {writer.lower.tier: writer.num_skipped for writer in self._writers}

    def clear(self) -> int:
        """Remove all blocks that are not held; return how many."""
        self.num_clears += 1
        num_below = sum(writer.clear() for writer in self._writers)  # first: pending writes hold blocks
        return num_below + self.slot_table.forget(self.slot_table)

    # --- storing

    def find_missing(self, blocks: Sequence[TierBlock]) -> list[int]:
        """Indexes of the blocks that are not in the host tier."""
        return [index for index, block in enumerate(blocks) if not self.slot_table.has_or_pending(block.key)]

    async def store(
        self, blocks: Sequence[TierBlock], fill: Fill, are_good: Callable[[], bool] = lambda: True
    ) -> int:
        """Store missing blocks as far as there is room; return how many.

        `are_good`: checked after the copy, whether the blocks may be kept. Raises only on cancellation, which stores
        nothing.
        """
        stats, cleared = self.stats[Tier.HOST], self.num_clears
        reserved = self.slot_table.reserve(blocks)
        # After `reserve`, which may have evicted and re-reserved blocks of this call.
        stats.failures["no_room"] += len(self.find_missing(blocks))
        indexes = [index for index, _ in reserved]
        keys = [blocks[index].key for index in indexes]
        if keys:
            try:
                sums, elapsed_s = await fill(int64_array(slot for _, slot in reserved), indexes)
            except BaseException as error:
                self.slot_table.cancel(keys)
                if not isinstance(error, Exception):
                    raise
                log.warning("offload failed: blocks=%d error=%s", len(keys), error)
                stats.failures["unwritten"] += len(keys)
                return 0
            if not are_good() or cleared != self.num_clears:
                self.slot_table.cancel(keys)
                stats.failures["late"] += len(keys)
                return 0
            for key, checksum in zip(keys, sums.tolist(), strict=True):
                self.slot_table.seal(key, checksum)
            self.slot_table.register(keys)
            stats.record_stored(len(keys), elapsed_s)
        for block in blocks:
            self._record_sighting(block.key)
        if self._is_shrinking:
            async with self._resizing:
                await self._fit_memory()
        return len(keys)

    def _record_sighting(self, key: BlockKey) -> None:
        for writer in self._writers:
            writer.record_sighting(key)

    # --- loading

    async def onboard(self, blocks: Sequence[TierBlock]) -> Onboarded:
        """Load blocks from lower tiers up to the first that is in none; hold the resulting prefix until `release`."""
        keys = [block.key for block in blocks]
        tiers = self.find_tiers(keys)
        keys = keys[: len(tiers)]
        pending = [self._loading[key][1] for key in keys if key in self._loading]
        if any(tier is not Tier.HOST for tier in tiers):
            # Loaded blocks must not evict those that are already here.
            present = [key for key in keys if self.slot_table.has(key)]
            self.slot_table.hold(present)
            try:
                for lower in self.lower:
                    located = zip(blocks, tiers, strict=False)
                    await self._read(lower, [block for block, tier in located if tier is lower.tier])
            finally:
                self.slot_table.release(present)
        for each in pending:
            await asyncio.wait([each])
        present = keys[: self.slot_table.match(keys)]
        self.slot_table.hold(present)
        return Onboarded(present, tiers[: len(present)])

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Release blocks held by `onboard`."""
        self.slot_table.release(keys)

    def mark_corrupt(self, key: BlockKey) -> None:
        """Remove a block whose checksum does not match."""
        self.stats[Tier.HOST].failures["corrupt"] += 1
        log.error("block corrupt, will be recomputed: tier=host key=%s", key.hex())
        self.slot_table.invalidate(key)

    async def _read(self, lower: LowerTier, blocks: Sequence[TierBlock]) -> None:
        """Load the blocks that are still in `lower` and not yet here; both may have changed since the lookup."""
        available = [block for block in blocks if lower.has(block.key)]
        reserved = self.slot_table.reserve(available)
        if not reserved:
            return
        requested = [available[index] for index, _ in reserved]
        loop = asyncio.get_running_loop()
        loading = {block.key: loop.create_future() for block in requested}
        self._loading.update({key: (lower.tier, done) for key, done in loading.items()})
        sums: list[int | None] = [None] * len(requested)
        cleared = self.num_clears
        try:
            sums = await lower.read(requested, self.memory, int64_array(slot for _, slot in reserved))
        finally:
            if cleared != self.num_clears:
                sums = [None] * len(requested)
            for key, done in loading.items():  # waiters run after the slot table is updated below
                del self._loading[key]
                done.set_result(None)
            for block, checksum in zip(requested, sums, strict=True):
                if checksum is None:
                    self.slot_table.cancel([block.key])
                else:
                    self.slot_table.seal(block.key, checksum)
                    self.slot_table.register([block.key])
        for block in requested:
            self._record_sighting(block.key)

    def check_integrity(self) -> None:
        self.slot_table.check_integrity()
        for each in self.lower:
            each.check_integrity()


def int64_array(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)
