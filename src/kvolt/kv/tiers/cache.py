"""TieredCache: blocks that leave an engine's memory, kept below it and brought back: in the host's, and on a disk.

Owns the tiers of one owner and every move between them. What is offloaded goes to the host; from there what is worth
it goes to the disk, a batch at a time and at leisure. What is asked for comes back by way of the host. Blocks are
looked at by their checksums whenever they move: one that is not what it was is a miss, here and below, and nothing
else. The books are touched on the event loop only; bytes move in threads, one for each tier, in slots that the books
keep for them meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.books import Slot, TierBlock, TierBooks
from kvolt.kv.tiers.disk import DiskFiles, check_read
from kvolt.kv.tiers.eviction import TouchFilter
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.runtime.tasks import Crew
from kvolt.transfer.memory import Numbers, Slab

log = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20
"""Moved between two tiers at a time."""
_MOST_BATCH = 1024
_LATELY = 0.25
"""What the last load counts, where the speed of a tier is worked out."""
_GUESSED_BYTES_PER_S = {Tier.HOST: 4e9, Tier.DISK: 0.5e9}
_RESTORED_AT_ONCE = 512
"""Blocks that are found again, before others have a turn."""
_PAUSE_S = 5.0
"""After a disk would not take blocks, before it is asked again."""
_FLUSH_S = 5.0
"""For what waits to be written to the disk, when all ends."""


@dataclass(slots=True)
class TierStats:
    """Of one tier, for metrics and for who chooses between fetching and computing."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_s: float = 0.0
    loaded_s: float = 0.0
    block_s: float | None = None
    """How long it takes to load one, by those that were lately."""
    failures: Counter[str] = field(default_factory=Counter)
    """Blocks by what became of them: corrupt, unread, unwritten, no_room."""

    def loaded(self, count: int, took_s: float) -> None:
        self.num_loaded += count
        self.loaded_s += took_s
        if count:
            each_s = took_s / count
            before_s = each_s if self.block_s is None else self.block_s
            # One slow load may be chance; a quick one is what it can do.
            self.block_s = min((1 - _LATELY) * before_s + _LATELY * each_s, 2.0 * each_s)


@dataclass(frozen=True, slots=True)
class Fetched:
    """Of blocks that were asked for, from the first on."""

    num_blocks: int = 0
    by_tier: tuple[tuple[Tier, int], ...] = ()


class _Brought(NamedTuple):
    """Blocks that the host has, and where they lay before."""

    keys: Sequence[BlockKey]
    tiers: list[Tier]


class TieredCache:
    """See the module. `start`, then anything, then `close`."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        num_host_blocks: int,
        *,
        files: DiskFiles | None = None,
        eviction: str = "lru",
        disk_touches: int = 1,
    ) -> None:
        """`slabs`: the engine's memory, by ranks. `disk_touches`: how often a block is to be seen before it is written
        to the disk, which wears it out."""
        self._slabs = tuple(slab.for_thread() for slab in slabs)
        self.shape = files.shape if files is not None else BlockShape.of(slabs)
        self._memory = SlotMemory(self.shape, num_host_blocks, self._slabs[0].device)
        self._files = files
        self.host = TierBooks(Tier.HOST, num_host_blocks, eviction)
        self.disk = (
            None if files is None else TierBooks(Tier.DISK, files.num_slots, eviction, is_durable=True)
        )
        self._filter: TouchFilter[BlockKey] = TouchFilter(
            disk_touches, 4 * num_host_blocks, 4 * num_host_blocks
        )
        self._waiting: OrderedDict[BlockKey, None] = OrderedDict()
        """To be written to the disk."""
        self._writing: asyncio.Task[None] | None = None
        self._coming: dict[BlockKey, asyncio.Future[None]] = {}
        """Being brought from the disk: over when it is here, or not."""
        self._has_waiting = asyncio.Event()
        self._closing = asyncio.Event()
        self._num_clears = 0
        self.on_change: Callable[[], None] = lambda: None
        """Told when blocks have come to the disk or gone from it, besides what was asked for."""
        self._crew = Crew("kv tiers")
        self._host_thread, self._disk_thread = TierThread("kv-host"), TierThread("kv-disk")
        self._memory_thread = TierThread("kv-memory")
        self.stats = {tier: TierStats() for tier in (Tier.HOST, Tier.DISK)}
        self.num_dropped = 0
        """Blocks that were worth the disk and went before it was their turn."""

    async def start(self) -> None:
        """What the disk has is found from now on. The host's memory is made meanwhile."""
        self._crew.start(self._grow(), "make memory")
        if self.disk is None or self._files is None:
            return
        found, _ = await self._disk_thread.run(self._files.recover)
        for number, written in enumerate(found):
            self.disk.restore(written.block, written.slot, written.checksum)
            if number % _RESTORED_AT_ONCE == 0:
                await asyncio.sleep(0)
        self.disk.restored()
        self._writing = self._crew.start(self._write_on(), "write to disk")

    async def _grow(self) -> None:
        """All of it, part by part and between other work: blocks that come first would wait for each part."""
        try:
            for num_slots in self._memory.steps():
                await self._memory_thread.run(self._memory.reach, num_slots)
        except OSError as error:
            num_slots = self._memory.num_reached
            log.warning("the host tier has memory for %d blocks only: %s", num_slots, error)
            self.host.resize(max(num_slots, 1))

    async def close(self) -> None:
        """What waits for the disk is written, as far as that is quick."""
        self._closing.set()
        self._has_waiting.set()
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=_FLUSH_S)
        try:
            async with asyncio.timeout(_FLUSH_S):
                while (self._waiting or self._condemned) and self.disk is not None:
                    if not await self._write_batch():
                        break
        except TimeoutError:
            log.warning("%d blocks were not written to the disk tier in time", len(self._waiting))
        await self._crew.close()
        await asyncio.to_thread(self._give_back)

    def _give_back(self) -> None:
        for thread in (self._host_thread, self._disk_thread, self._memory_thread):
            thread.close()
        self._memory.close()
        if self._files is not None:
            self._files.close()

    # --- what is here

    def books(self, tier: Tier) -> TierBooks | None:
        """Of a tier, if there is one."""
        return self.host if tier is Tier.HOST else self.disk

    def num_bytes(self, tier: Tier) -> int:
        """Of the blocks there."""
        books = self.books(tier)
        return 0 if books is None else len(books) * self.shape.block_bytes

    def tiers_of(self, keys: Sequence[BlockKey], start: int = 0) -> list[Tier]:
        """Where each of `keys` from `start` on lies, up to the first that lies nowhere."""
        found: list[Tier] = []
        for key in keys[start:]:
            if self.host.has(key) or key in self._coming:
                found.append(Tier.HOST)
            elif self.disk is not None and self.disk.has(key):
                found.append(Tier.DISK)
            else:
                break
        return found

    def has_any(self, keys: Sequence[BlockKey]) -> bool:
        """Whether one of them is here: where a later one is, those before it mostly are, in one tier or another."""
        return any(self.host.has(key) or (self.disk is not None and self.disk.has(key)) for key in keys)

    def block_s(self, tier: Tier) -> float:
        """How long it takes to bring one block from there, by what was measured, or a guess before that."""
        above_s = self.block_s(Tier.HOST) if tier is Tier.DISK else 0.0
        known_s = self.stats[tier].block_s
        return above_s + (self.shape.block_bytes / _GUESSED_BYTES_PER_S[tier] if known_s is None else known_s)

    def take_changes(self) -> tuple[Change, ...]:
        """Since the last time, for who routes."""
        changes = self.host.take_changes()
        return changes if self.disk is None else (*changes, *self.disk.take_changes())

    def clear(self) -> int:
        """Forget what nobody is at; how many blocks."""
        self._num_clears += 1  # what is under way is not kept
        num_gone = self.host.forget(self.host)
        self._waiting.clear()
        self._has_waiting.set()  # the disk is to know of it
        return num_gone + (0 if self.disk is None else self.disk.forget(self.disk))

    # --- down

    def lacking(self, blocks: Sequence[TierBlock]) -> list[int]:
        """The places of those that would be new to the host."""
        return [index for index, block in enumerate(blocks) if not self.host.knows(block.key)]

    async def offload(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool] = lambda: True
    ) -> int:
        """Copy blocks of the engine's memory; how many were new and are kept. `are_held`: whether they were as they
        should be until now; where they were not, others' bytes may have been copied."""
        stats, cleared = self.stats[Tier.HOST], self._num_clears
        num_lacking = len(self.lacking(blocks))
        reserved = self.host.reserve(blocks)
        stats.failures["no_room"] += num_lacking - len(reserved)
        keys = [blocks[index].key for index, _ in reserved]
        if keys:
            slots = _numbers(slot for _, slot in reserved)
            sources = _numbers(numbers[index] for index, _ in reserved)
            try:
                sums, took_s = await self._host_thread.run(
                    self._memory.fill, slots, keys, self._slabs, sources
                )
            except BaseException as error:
                self.host.cancel(keys)
                if not isinstance(error, Exception):
                    raise
                log.warning("blocks could not be offloaded: %s", str(error))
                stats.failures["unwritten"] += len(keys)
                return 0
            if not are_held() or cleared != self._num_clears:
                self.host.cancel(keys)
                stats.failures["late"] += len(keys)
                return 0
            for key, checksum in zip(keys, sums.tolist(), strict=True):
                self.host.seal(key, checksum)
            self.host.register(keys)
            stats.num_stored += len(keys)
            stats.stored_s += took_s
        for block in blocks:
            self._want_on_disk(block.key)
        return len(keys)

    def _want_on_disk(self, key: BlockKey) -> None:
        if self.disk is None or self.disk.knows(key) or not self.host.has(key) or not self._filter.sees(key):
            return
        self._waiting[key] = None
        if len(self._waiting) > self.host.num_slots:
            self._waiting.popitem(last=False)
            self.num_dropped += 1
        self._has_waiting.set()

    async def _write_on(self) -> None:
        """Until it `is_closing`: a batch that has begun is ended."""
        while not self._is_closing:
            await self._has_waiting.wait()
            self._has_waiting.clear()
            while not self._is_closing and (self._waiting or self._condemned):
                if not await self._write_batch():
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PAUSE_S):
                            await self._closing.wait()

    @property
    def _is_closing(self) -> bool:
        return self._closing.is_set()

    @property
    def _condemned(self) -> list[Slot]:
        return self.disk.condemned() if self.disk is not None else []

    async def _write_batch(self) -> bool:
        """What waits first; whether the disk takes blocks."""
        assert self.disk is not None
        blocks: list[TierBlock] = []
        while self._waiting and len(blocks) < self._at_once:
            key, _ = self._waiting.popitem(last=False)
            if self.host.has(key) and not self.disk.knows(key):
                blocks.append(self.host.block(key))
            elif not self.disk.knows(key):
                self.num_dropped += 1
        keys = [block.key for block in blocks]
        held = self.host.hold(keys, is_asked=False)
        try:
            self.disk.make_room(len(blocks))
            await self._bury()
            await self._write(blocks, held)
        except Exception as error:  # the next may be better: nobody else would go on with this
            no_room = isinstance(error, KvoltError) and error.fields.get("reason") == "no_room"
            self.stats[Tier.DISK].failures["no_room" if no_room else "unwritten"] += len(blocks)
            told = error.message if isinstance(error, KvoltError) else repr(error)
            log.warning("%d blocks were not written to the disk tier: %s", len(blocks), told)
            return False
        finally:
            self.host.release(keys)
            self.on_change()
        return True

    async def _bury(self) -> None:
        """What is not to be found any more is so for good."""
        assert self.disk is not None
        assert self._files is not None
        condemned = self._condemned
        if condemned:
            await self._disk_thread.run(self._files.remove, condemned)
            self.disk.bury(condemned)

    async def _write(self, blocks: Sequence[TierBlock], held: Sequence[Slot]) -> None:
        assert self.disk is not None
        assert self._files is not None
        disk, stats, cleared = self.disk, self.stats[Tier.DISK], self._num_clears
        reserved = disk.reserve(blocks)
        written = [blocks[index] for index, _ in reserved]
        keys, slots = [block.key for block in written], [slot for _, slot in reserved]
        sums = [self.host.checksum(key) for key in keys]
        sources = _numbers(held[index] for index, _ in reserved)
        if not keys:
            return
        is_written = False
        try:
            _, took_s = await self._disk_thread.run(
                self._files.write, written, sums, slots, self._memory, sources
            )
            is_written = True
        finally:
            if not is_written:
                disk.cancel(keys)
        for key, checksum in zip(keys, sums, strict=True):
            disk.seal(key, checksum)
        disk.register(keys)
        if cleared != self._num_clears:
            disk.forget(keys)
        stats.num_stored += len(keys)
        stats.stored_s += took_s

    # --- up

    async def fetch(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> Fetched:
        """Bring blocks into these of the engine's memory; how many came, from the first on. The next part comes from
        the disk while one is copied."""
        came: Counter[Tier] = Counter()
        parts = [keys[start : start + self._at_once] for start in range(0, len(keys), self._at_once)]
        ahead: asyncio.Task[_Brought] | None = None
        num_here = 0
        try:
            for index, part in enumerate(parts):
                brought = await (ahead or self._bring(part))
                ahead = None
                if index + 1 < len(parts) and len(brought.keys) == len(part):
                    ahead = self._crew.start(self._bring(parts[index + 1]), "bring")
                num_good = await self._up(brought.keys, numbers[num_here : num_here + len(brought.keys)])
                num_here += num_good
                came.update(brought.tiers[:num_good])
                if num_good < len(part):
                    break
        finally:
            if ahead is not None:  # what it brings is not wanted any more
                ahead.cancel()
                ahead.add_done_callback(self._let_go)
        return Fetched(num_here, tuple(sorted(came.items())))

    def _let_go(self, ahead: asyncio.Task[_Brought]) -> None:
        if not ahead.cancelled() and ahead.exception() is None:
            self.host.release(ahead.result().keys)

    async def _up(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> int:
        """Blocks of the host, held until this is over; how many came whole, from the first on."""
        if not keys:
            return 0
        stats = self.stats[Tier.HOST]
        slots = _numbers(map(self.host.slot, keys))
        try:
            sums, took_s = await self._host_thread.run(
                self._memory.empty, slots, keys, self._slabs, _numbers(numbers)
            )
            wanted = map(self.host.checksum, keys)
            are_good = [found == due for found, due in zip(sums.tolist(), wanted, strict=True)]
        finally:
            self.host.release(keys)
        num_good = are_good.index(False) if False in are_good else len(keys)
        if num_good < len(keys):
            self._lost(Tier.HOST, keys[num_good])
        stats.loaded(num_good, took_s)
        return num_good

    async def _bring(self, keys: Sequence[BlockKey]) -> _Brought:
        """What of these the disk has into the host, up to the first that neither has. All that is there then is held,
        from the first on."""
        tiers = self.tiers_of(keys)
        others = [self._coming[key] for key in keys[: len(tiers)] if key in self._coming]
        wanted = [key for key, tier in zip(keys, tiers, strict=False) if tier is Tier.DISK]
        if wanted:
            # Those that are here are not to go for those that come.
            here = [key for key in keys[: len(tiers)] if self.host.has(key)]
            self.host.hold(here)
            try:
                await self._read(wanted)
            finally:
                self.host.release(here)
        for other in others:
            await asyncio.wait([other])
        present = keys[: self.host.match(keys[: len(tiers)])]
        self.host.hold(present)
        return _Brought(present, tiers[: len(present)])

    async def _read(self, keys: Sequence[BlockKey]) -> None:
        assert self.disk is not None
        assert self._files is not None
        disk, stats = self.disk, self.stats[Tier.DISK]
        reserved = self.host.reserve([disk.block(key) for key in keys])
        wanted = [keys[index] for index, _ in reserved]
        if not wanted:
            return
        into = _numbers(slot for _, slot in reserved)
        loop = asyncio.get_running_loop()
        coming = {key: loop.create_future() for key in wanted}
        self._coming.update(coming)
        slots = disk.hold(wanted)
        are_good, took_s = [False] * len(wanted), 0.0
        sums = [disk.checksum(key) for key in wanted]
        try:
            are_good, took_s = await self._disk_thread.run(
                check_read, self._files, wanted, sums, slots, self._memory, into
            )
        finally:
            disk.release(wanted)
            for key, checksum, is_good in zip(wanted, sums, are_good, strict=True):
                if is_good:
                    self.host.seal(key, checksum)
                    self.host.register([key])
                else:
                    self.host.cancel([key])
                del self._coming[key]
                coming[key].set_result(None)
        for key, is_good in zip(wanted, are_good, strict=True):
            if not is_good:
                self._lost(Tier.DISK, key)
        stats.loaded(sum(are_good), took_s)

    def _lost(self, tier: Tier, key: BlockKey) -> None:
        """It is not what it was: nobody finds it there any more."""
        self.stats[tier].failures["corrupt"] += 1
        books = self.host if tier is Tier.HOST else self.disk
        assert books is not None
        books.forget([key])
        log.error(
            "block %s in the %s tier is not what was written there: it is computed again", key.hex(), tier
        )

    # ---

    @property
    def _at_once(self) -> int:
        return max(min(_BATCH_BYTES // self.shape.slot_bytes, _MOST_BATCH, self.host.num_slots // 4), 1)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        if self.disk is not None:
            self.disk.check_integrity()


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)
