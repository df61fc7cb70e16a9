"""DiskTier: blocks on a disk, by the books of who owns that part of it. Bytes and journal: `DiskFiles`."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.books import TierBlock, TierBooks
from kvolt.kv.tiers.disk import DiskFiles, check_read
from kvolt.kv.tiers.lower import TierStats
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory import Numbers

log = logging.getLogger(__name__)

_RESTORED_AT_ONCE = 512
"""Blocks that are found again, before others have a turn."""


class DiskTier:
    """A `LowerTier`."""

    tier = Tier.DISK
    look_s = None

    def __init__(self, files: DiskFiles, eviction: str = "lru") -> None:
        self._files = files
        self.books = TierBooks(Tier.DISK, files.num_slots, eviction, is_durable=True)
        self.stats = TierStats()
        self._thread = TierThread("kv-disk")
        self._is_shrinking = False
        """Whether blocks lie beyond its end still."""

    @property
    def folder(self) -> Path:
        """The part that is ours."""
        return self._files.folder

    @property
    def num_slots(self) -> int:
        return self.books.num_slots

    def __len__(self) -> int:
        return len(self.books)

    async def start(self) -> None:
        """What the disk has is found from now on."""
        found, _ = await self._thread.run(self._files.recover)
        for number, written in enumerate(found):
            self.books.restore(written.block, written.slot, written.checksum)
            if number % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self.books.restored()

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.close)
        self._files.close()

    def has(self, key: BlockKey) -> bool:
        return self.books.has(key)

    def knows(self, key: BlockKey) -> bool:
        return self.books.knows(key)

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """The books know all."""

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        self.books.make_room(len(blocks))
        await self._bury()
        reserved = self.books.reserve(blocks)
        if not reserved:
            return
        which = [index for index, _ in reserved]
        written, sums = [blocks[index] for index in which], [checksums[index] for index in which]
        keys = [block.key for block in written]
        is_written = False
        try:
            _, took_s = await self._thread.run(
                self._files.write, written, sums, [slot for _, slot in reserved], memory, slots[which]
            )
            is_written = True
        finally:
            if not is_written:
                self.books.cancel(keys)
        for key, checksum in zip(keys, sums, strict=True):
            self.books.seal(key, checksum)
        self.books.register(keys)
        self.stats.stored(len(keys), took_s)

    async def resize(self, num_slots: int) -> None:
        """What is too much goes, and its room once the end of a file's worth is free. KvoltError where it cannot be."""
        is_less = num_slots < self.books.num_slots
        await self._thread.run(self._files.resize, num_slots)
        self.books.resize(num_slots)
        self._is_shrinking = is_less

    async def _bury(self) -> None:
        """What is not to be found any more is so for good."""
        condemned = self.books.condemned()
        if condemned:
            await self._thread.run(self._files.remove, condemned)
            self.books.bury(condemned)
        if self._is_shrinking:
            end = self.books.end
            self._is_shrinking = end > self.books.num_slots
            await self._thread.run(self._files.trim, max(end, self.books.num_slots))

    @property
    def has_chores(self) -> bool:
        return bool(self.books.condemned())

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        keys = [block.key for block in blocks]
        held, sums = self.books.hold(keys), [self.books.checksum(key) for key in keys]
        try:
            are_good, took_s = await self._thread.run(
                check_read, self._files, keys, sums, held, memory, slots
            )
        finally:
            self.books.release(keys)
        for key, is_good in zip(keys, are_good, strict=True):
            if not is_good:
                self.stats.failures["corrupt"] += 1
                log.error(
                    "block %s on the disk is not what was written there: it is computed again", key.hex()
                )
                self.books.forget([key])
        self.stats.loaded(sum(are_good), took_s)
        return [checksum if is_good else None for checksum, is_good in zip(sums, are_good, strict=True)]

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        return self.books.forget(self.books if keys is None else keys)

    def take_changes(self) -> tuple[Change, ...]:
        return self.books.take_changes()

    def check_integrity(self) -> None:
        self.books.check_integrity()
