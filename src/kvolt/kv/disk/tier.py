"""DiskTier: slot table of blocks on a disk. `DiskFiles` and `DiskBlocks` store bytes and journal.

A slot is reused only after the record that it is empty is durable. To avoid waiting for that on each write, some slots
are kept free (`Watermarks`): their evictions are recorded together with the next written blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.disk.blocks import DiskBlocks
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.tiers.lower_tier import SlotTableTier
from kvolt.kv.tiers.sizes import Watermarks
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import Slot, SlotTable, TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_RESTORE_BATCH = 512
"""Restored blocks between yields to the event loop."""
_MAX_EVICTION_BATCH = 1024
"""Blocks evicted in advance at a time, since it blocks the event loop."""


Read = Callable[[Sequence[BlockKey], Sequence[int], Sequence[Slot]], list[int | None]]
"""Reads blocks with the expected checksums from these slots; returns the checksum of each intact block."""


class DiskTier(SlotTableTier):
    """Tier on a local disk."""

    tier = Tier.DISK

    def __init__(self, files: DiskFiles, eviction: str = "lru", watermarks: Watermarks | None = None) -> None:
        super().__init__(SlotTable(Tier.DISK, files.num_slots, eviction, is_durable=True))
        self.files = files
        self.shape = files.shape
        self._blocks = DiskBlocks(files)
        self._marks = Watermarks() if watermarks is None else watermarks
        self._is_making_room = False
        """True from falling below the low watermark until the high one is reached."""
        self._thread = TierThread("kv-disk")
        self._is_shrinking = False
        """Blocks remain in slots beyond the new capacity."""

    @property
    def folder(self) -> Path:
        """Part of the folder owned by this tier."""
        return self.files.folder

    async def start(self) -> None:
        """Restore the slot table from the disk."""
        records, _ = await self._thread.run(self.files.recover)
        for number, record in enumerate(records):
            self.slot_table.restore(record.block, record.slot, record.checksum)
            if number % _RESTORE_BATCH == 0:
                await asyncio.sleep(0)
        self.slot_table.finish_restore()

    async def close(self) -> None:
        await self._thread.close()
        self._blocks.close()
        self.files.close()

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        if self.slot_table.num_free < len(blocks) or not blocks:
            await self._make_room_now(len(blocks))
        reserved = self.slot_table.reserve(blocks)
        if reserved:
            indexes = [index for index, _ in reserved]
            written, sums = [blocks[index] for index in indexes], [checksums[index] for index in indexes]
            await self._write(written, sums, [slot for _, slot in reserved], memory, slots[indexes])
        self._make_room_ahead()

    async def _write(
        self,
        blocks: Sequence[TierBlock],
        checksums: Sequence[int],
        disk_slots: Sequence[Slot],
        memory: SlotMemory,
        slots: Numbers,
    ) -> None:
        """Write blocks to reserved disk slots and register them."""
        keys, freed = [block.key for block in blocks], self.slot_table.evicting_slots()
        stored: list[BlockKey] = []
        try:
            sums, elapsed_s = await self._thread.run(
                self._blocks.write, blocks, checksums, disk_slots, memory, slots, freed
            )
            await self._complete_eviction(freed)
            for key, checksum in zip(keys, sums, strict=True):
                if checksum is not None:
                    self.slot_table.seal(key, checksum)
                    stored.append(key)
        finally:
            stored_keys = set(stored)
            self.slot_table.cancel(key for key in keys if key not in stored_keys)
        self.slot_table.register(stored)
        self.stats.record_stored(len(stored), elapsed_s)
        for key in keys:
            if key not in stored_keys:
                self.on_corrupt(key)

    async def _make_room_now(self, count: int) -> None:
        """Free `count` slots, and more in advance, since the disk is written anyway."""
        if count:
            self.slot_table.make_room(count + min(self._slots_of(self._marks.high), _MAX_EVICTION_BATCH))
        evicting_slots = self.slot_table.evicting_slots()
        if evicting_slots:
            await self._thread.run(self.files.remove, evicting_slots)
        await self._complete_eviction(evicting_slots)

    def _make_room_ahead(self) -> None:
        """Evict below the low watermark; the slots become free with the next write."""
        num_spare = self.slot_table.num_free + len(self.slot_table.evicting_slots())
        high = self._slots_of(self._marks.high)
        if num_spare < self._slots_of(self._marks.low):
            self._is_making_room = True
        if self._is_making_room:
            target = min(high, num_spare + _MAX_EVICTION_BATCH)
            self.slot_table.make_room(target)
            self._is_making_room = target < high

    def _slots_of(self, share: float) -> int:
        return int(share * self.slot_table.num_slots)

    async def resize(self, num_slots: int) -> None:
        """Change the capacity; excess blocks are evicted and files at the end deleted once empty. KvoltError on
        errors."""
        is_smaller = num_slots < self.slot_table.num_slots
        await self._thread.run(self.files.resize, num_slots)
        self.slot_table.resize(num_slots)
        self._is_shrinking = is_smaller

    async def _complete_eviction(self, evicting_slots: Sequence[Slot]) -> None:
        """Free slots whose removal is durable; delete files when shrinking."""
        self.slot_table.complete_eviction(evicting_slots)
        if self._is_shrinking:
            end = self.slot_table.end
            self._is_shrinking = end > self.slot_table.num_slots
            await self._thread.run(self.files.trim, max(end, self.slot_table.num_slots))

    @property
    def has_pending_work(self) -> bool:
        return bool(self.slot_table.evicting_slots())

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        def into_slots(
            keys: Sequence[BlockKey], expected: Sequence[int], disk_slots: Sequence[Slot]
        ) -> list[int | None]:
            return self._blocks.read(keys, expected, disk_slots, memory, slots)

        return await self.read_with(self._thread, blocks, into_slots)

    async def read_with(
        self, thread: TierThread, blocks: Sequence[TierBlock], read: Read
    ) -> list[int | None]:
        """Like `read`, with another read function and thread."""
        keys = [block.key for block in blocks]
        disk_slots = self.slot_table.hold(keys)
        expected = [self.slot_table.checksum(key) for key in keys]
        try:
            checksums, elapsed_s = await thread.run(read, keys, expected, disk_slots)
        finally:
            self.slot_table.release(keys)
        for key, checksum in zip(keys, checksums, strict=True):
            if checksum is None:
                self.stats.failures["corrupt"] += 1
                log.error("block corrupt, will be recomputed: tier=disk key=%s", key.hex())
                self.slot_table.forget([key])
        self.stats.record_loaded(len(keys) - checksums.count(None), elapsed_s)
        return checksums
