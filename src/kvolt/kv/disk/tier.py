"""DiskTier: blocks on a disk, by the books of who owns that part of it. Bytes and journal: `DiskFiles`, `DiskBlocks`.

A slot is written again only once the disk has kept the record that it holds nothing any more. So that a write need
not wait for that first, some slots are kept free (`Watermarks`): what goes for them is recorded with the blocks
that are written next.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.disk.blocks import DiskBlocks
from kvolt.kv.disk.files import DiskFiles
from kvolt.kv.tiers.lower_tier import TierStats
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot, TierBlock, TierBooks
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_RESTORED_AT_ONCE = 512
"""Blocks that are found again, before others have a turn."""
_MOST_AHEAD = 1024
"""Blocks that go ahead of need at a time: others wait for it."""


class Watermarks(msgspec.Struct, frozen=True):
    """Shares of a tier's slots: where fewer are free than the low one, room is made up to the high one. Both 0: room is
    made for what comes when it comes."""

    low: float = 0.01
    high: float = 0.02

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= self.high <= 0.5:
            raise ConfigError(
                f"watermarks of {self.low:g} and {self.high:g} are none",
                key="tiers.disk_low_water",
                remedy="shares of the disk to be kept free, the low one first, of half of it at most: 0.01 and 0.02",
            )


Read = Callable[[Sequence[BlockKey], Sequence[int], Sequence[Slot]], list[int | None]]
"""Brings blocks that should have these checksums from these slots; the checksum of each that came whole."""


class DiskTier:
    """A `LowerTier`."""

    tier = Tier.DISK
    look_s = None

    def __init__(self, files: DiskFiles, eviction: str = "lru", watermarks: Watermarks | None = None) -> None:
        self.files = files
        self._blocks = DiskBlocks(files)
        self._marks = Watermarks() if watermarks is None else watermarks
        self.on_spoiled: Callable[[BlockKey], None] = lambda key: None
        self._is_making_room = False
        """From when fewer slots are free than the low mark until as many are as the high one."""
        self.books = TierBooks(Tier.DISK, files.num_slots, eviction, is_durable=True)
        self.stats = TierStats()
        self._thread = TierThread("kv-disk")
        self._is_shrinking = False
        """Whether blocks lie beyond its end still."""

    @property
    def folder(self) -> Path:
        """The part that is ours."""
        return self.files.folder

    @property
    def shape(self) -> BlockShape:
        """Of blocks as they lie there."""
        return self.files.shape

    @property
    def num_slots(self) -> int:
        return self.books.num_slots

    def __len__(self) -> int:
        return len(self.books)

    async def start(self) -> None:
        """What the disk has is found from now on."""
        found, _ = await self._thread.run(self.files.recover)
        for number, written in enumerate(found):
            self.books.restore(written.block, written.slot, written.checksum)
            if number % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self.books.restored()

    async def close(self) -> None:
        await self._thread.close()
        self._blocks.close()
        self.files.close()

    def has(self, key: BlockKey) -> bool:
        return self.books.has(key)

    def knows(self, key: BlockKey) -> bool:
        return self.books.knows(key)

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """The books know all."""

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        if self.books.num_free < len(blocks) or not blocks:
            await self._make_room_now(len(blocks))
        reserved = self.books.reserve(blocks)
        if reserved:
            which = [index for index, _ in reserved]
            written, sums = [blocks[index] for index in which], [checksums[index] for index in which]
            await self._write(written, sums, [slot for _, slot in reserved], memory, slots[which])
        self._make_room_ahead()

    async def _write(
        self,
        blocks: Sequence[TierBlock],
        checksums: Sequence[int],
        places: Sequence[Slot],
        memory: SlotMemory,
        slots: Numbers,
    ) -> None:
        """Into places that are reserved for them."""
        keys, gone = [block.key for block in blocks], self.books.condemned()
        kept: list[BlockKey] = []
        try:
            sums, took_s = await self._thread.run(
                self._blocks.write, blocks, checksums, places, memory, slots, gone
            )
            await self._bury(gone)
            for key, checksum in zip(keys, sums, strict=True):
                if checksum is not None:
                    self.books.seal(key, checksum)
                    kept.append(key)
        finally:
            left = set(kept)
            self.books.cancel(key for key in keys if key not in left)
        self.books.register(kept)
        self.stats.stored(len(kept), took_s)
        for key in keys:
            if key not in left:
                self.on_spoiled(key)

    async def _make_room_now(self, count: int) -> None:
        """For so many, and for others while the disk is waited for anyway."""
        if count:
            self.books.make_room(count + min(self._slots_of(self._marks.high), _MOST_AHEAD))
        condemned = self.books.condemned()
        if condemned:
            await self._thread.run(self.files.remove, condemned)
        await self._bury(condemned)

    def _make_room_ahead(self) -> None:
        """Some go, if it is time, whose slots come free with the next write."""
        num_spare = self.books.num_free + len(self.books.condemned())
        high = self._slots_of(self._marks.high)
        if num_spare < self._slots_of(self._marks.low):
            self._is_making_room = True
        if self._is_making_room:
            wanted = min(high, num_spare + _MOST_AHEAD)
            self.books.make_room(wanted)
            self._is_making_room = wanted < high

    def _slots_of(self, share: float) -> int:
        return int(share * self.books.num_slots)

    async def resize(self, num_slots: int) -> None:
        """What is too much goes, and its room once the end of a file's worth is free. KvoltError where it cannot be."""
        is_less = num_slots < self.books.num_slots
        await self._thread.run(self.files.resize, num_slots)
        self.books.resize(num_slots)
        self._is_shrinking = is_less

    async def _bury(self, condemned: Sequence[Slot]) -> None:
        """These are gone for good."""
        self.books.bury(condemned)
        if self._is_shrinking:
            end = self.books.end
            self._is_shrinking = end > self.books.num_slots
            await self._thread.run(self.files.trim, max(end, self.books.num_slots))

    @property
    def has_chores(self) -> bool:
        return bool(self.books.condemned())

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        def into_slots(
            keys: Sequence[BlockKey], due: Sequence[int], held: Sequence[Slot]
        ) -> list[int | None]:
            return self._blocks.read(keys, due, held, memory, slots)

        return await self.read_by(self._thread, blocks, into_slots)

    async def read_by(self, thread: TierThread, blocks: Sequence[TierBlock], read: Read) -> list[int | None]:
        """As `read`, to wherever that call brings them."""
        keys = [block.key for block in blocks]
        held, due = self.books.hold(keys), [self.books.checksum(key) for key in keys]
        try:
            came, took_s = await thread.run(read, keys, due, held)
        finally:
            self.books.release(keys)
        for key, checksum in zip(keys, came, strict=True):
            if checksum is None:
                self.stats.failures["corrupt"] += 1
                log.error(
                    "block %s on the disk is not what was written there: it is computed again", key.hex()
                )
                self.books.forget([key])
        self.stats.loaded(len(keys) - came.count(None), took_s)
        return came

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        return self.books.forget(self.books if keys is None else keys)

    def take_changes(self) -> tuple[Change, ...]:
        return self.books.take_changes()

    def check_integrity(self) -> None:
        self.books.check_integrity()
