"""TieredCache: blocks that leave an engine's memory, kept below it and brought back.

Owns the host's tier and the order of those below it. What is offloaded goes to the host; from there what is worth it
goes further down (`TierWriter`), to each of them. What is asked for comes back by way of the host. Blocks are held
against their checksums whenever they move: one that is not what it was is a miss, here and below, and nothing else. The
books are touched on the event loop only; bytes move in threads, in slots that the books keep for them meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.books import TierBlock, TierBooks
from kvolt.kv.tiers.lower import LowerTier, TierStats
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.kv.tiers.writer import TierWriter
from kvolt.runtime.tasks import Crew
from kvolt.transfer.memory import Numbers, Slab

log = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20
"""Moved between two tiers at a time."""
_MOST_BATCH = 1024
_GUESSED_BYTES_PER_S = {Tier.HOST: 4e9, Tier.DISK: 0.5e9, Tier.OBJECT: 0.1e9}


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
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
    ) -> None:
        """`slabs`: the engine's memory, by ranks. `lower`: the tiers below the host, the fastest first, and how often
        a block is to be seen before it is written there, which costs something."""
        self._slabs = tuple(slab.for_thread() for slab in slabs)
        self.shape = BlockShape.of(slabs)
        self._memory = SlotMemory(self.shape, num_host_blocks, self._slabs[0].device)
        self.host = TierBooks(Tier.HOST, num_host_blocks, eviction)
        self.lower = tuple(tier for tier, _ in lower)
        self._writers = [
            TierWriter(tier, self.host, self._memory, touches, self._at_once) for tier, touches in lower
        ]
        self._coming: dict[BlockKey, asyncio.Future[None]] = {}
        """Being brought from below: over when it is here, or not."""
        self._num_clears = 0
        self._crew = Crew("kv tiers")
        self._thread, self._memory_thread = TierThread("kv-host"), TierThread("kv-memory")
        self.stats = {Tier.HOST: TierStats(), **{each.tier: each.stats for each in self.lower}}

    async def start(self) -> None:
        """What tiers below have kept is found from now on. The host's memory is made meanwhile."""
        self._crew.start(self._grow(), "make memory")
        for writer in self._writers:
            await writer.lower.start()
            writer.start(self._crew)

    def on_change(self, told: Callable[[], None]) -> None:
        """Call this when blocks have come to a tier below or gone from it, besides what was asked for."""
        for writer in self._writers:
            writer.on_change = told

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
        """What waits for a tier below is written, as far as that is quick."""
        await asyncio.gather(*(writer.close() for writer in self._writers))
        await self._crew.close()
        for tier in self.lower:
            await tier.close()
        await asyncio.to_thread(self._give_back)

    def _give_back(self) -> None:
        self._thread.close()
        self._memory_thread.close()
        self._memory.close()

    # --- what is here

    def size(self, tier: Tier) -> tuple[int, int | None]:
        """Blocks in a tier that there is, and how many it can hold, where that is known."""
        books: TierBooks | LowerTier = self.host
        if tier is not Tier.HOST:
            books = next(each for each in self.lower if each.tier is tier)
        return len(books), books.num_slots

    def tiers_of(self, keys: Sequence[BlockKey], start: int = 0) -> list[Tier]:
        """Where each of `keys` from `start` on lies, up to the first that lies nowhere, as far as is known."""
        found: list[Tier] = []
        for key in keys[start:]:
            tier = self._tier_of(key)
            if tier is None:
                break
            found.append(tier)
        return found

    def _tier_of(self, key: BlockKey) -> Tier | None:
        if self.host.has(key) or key in self._coming:
            return Tier.HOST
        for each in self.lower:
            if each.has(key):
                return each.tier
        return None

    def has_any(self, keys: Sequence[BlockKey]) -> bool:
        """Whether one of them is here: where a later one is, those before it mostly are, in one tier or another."""
        return any(self.host.has(key) or any(each.has(key) for each in self.lower) for key in keys)

    @property
    def knows_all(self) -> bool:
        """Whether there is no more in the tiers than is known: nothing to `look` for."""
        return all(each.tier is not Tier.OBJECT for each in self.lower)

    async def look(self, keys: Sequence[BlockKey]) -> None:
        """Find out what tiers have of these, where that is not known. Not for long."""
        for each in self.lower:
            await each.look(keys)

    def block_s(self, tier: Tier) -> float:
        """How long it takes to bring one block from there, by what was measured, or a guess before that."""
        above_s = 0.0 if tier is Tier.HOST else self.block_s(Tier.HOST)
        known_s = self.stats[tier].block_s
        return above_s + (self.shape.block_bytes / _GUESSED_BYTES_PER_S[tier] if known_s is None else known_s)

    def take_changes(self) -> tuple[Change, ...]:
        """Since the last time, for who routes."""
        changes = self.host.take_changes()
        for each in self.lower:
            changes = (*changes, *each.take_changes())
        return changes

    @property
    def num_dropped(self) -> int:
        """Blocks that were worth a tier below and went before it was their turn."""
        return sum(writer.num_dropped for writer in self._writers)

    def clear(self) -> int:
        """Forget what nobody is at; how many blocks."""
        self._num_clears += 1  # what is under way is not kept
        return self.host.forget(self.host) + sum(writer.clear() for writer in self._writers)

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
                sums, took_s = await self._thread.run(self._memory.fill, slots, keys, self._slabs, sources)
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
            stats.stored(len(keys), took_s)
        for block in blocks:
            self._seen(block.key)
        return len(keys)

    def _seen(self, key: BlockKey) -> None:
        for writer in self._writers:
            writer.want(key)

    # --- up

    async def fetch(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> Fetched:
        """Bring blocks into these of the engine's memory; how many came, from the first on. The next part comes from
        below while one is copied."""
        came: Counter[Tier] = Counter()
        at_once = self._at_once
        parts = [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]
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
        slots = _numbers(map(self.host.slot, keys))
        try:
            sums, took_s = await self._thread.run(
                self._memory.empty, slots, keys, self._slabs, _numbers(numbers)
            )
            wanted = map(self.host.checksum, keys)
            are_good = [found == due for found, due in zip(sums.tolist(), wanted, strict=True)]
        finally:
            self.host.release(keys)
        num_good = are_good.index(False) if False in are_good else len(keys)
        if num_good < len(keys):
            bad = keys[num_good]
            self.stats[Tier.HOST].failures["corrupt"] += 1
            log.error("block %s in the host's memory is not what it was: it is computed again", bad.hex())
            self.host.forget([bad])
        self.stats[Tier.HOST].loaded(num_good, took_s)
        return num_good

    async def _bring(self, blocks: Sequence[TierBlock]) -> _Brought:
        """What of these the tiers below have into the host, up to the first that none has. All that is there then is
        held, from the first on."""
        keys = [block.key for block in blocks]
        tiers = self.tiers_of(keys)
        keys = keys[: len(tiers)]
        others = [self._coming[key] for key in keys if key in self._coming]
        if any(tier is not Tier.HOST for tier in tiers):
            # Those that are here are not to go for those that come.
            here = [key for key in keys if self.host.has(key)]
            self.host.hold(here)
            try:
                for lower in self.lower:
                    lying = zip(blocks, tiers, strict=False)
                    await self._read(lower, [block for block, tier in lying if tier is lower.tier])
            finally:
                self.host.release(here)
        for other in others:
            await asyncio.wait([other])
        present = keys[: self.host.match(keys)]
        self.host.hold(present)
        return _Brought(present, tiers[: len(present)])

    async def _read(self, lower: LowerTier, blocks: Sequence[TierBlock]) -> None:
        """Those that are there still and are not here yet: between two tiers others had their turn."""
        there = [block for block in blocks if lower.has(block.key)]
        reserved = self.host.reserve(there)
        if not reserved:
            return
        wanted = [there[index] for index, _ in reserved]
        loop = asyncio.get_running_loop()
        coming = {block.key: loop.create_future() for block in wanted}
        self._coming.update(coming)
        sums: list[int | None] = [None] * len(wanted)
        cleared = self._num_clears
        try:
            sums = await lower.read(wanted, self._memory, _numbers(slot for _, slot in reserved))
        finally:
            if cleared != self._num_clears:
                sums = [None] * len(wanted)
            for block, checksum in zip(wanted, sums, strict=True):
                if checksum is None:
                    self.host.cancel([block.key])
                else:
                    self.host.seal(block.key, checksum)
                    self.host.register([block.key])
                del self._coming[block.key]
                coming[block.key].set_result(None)
        for block in wanted:
            self._seen(block.key)

    # ---

    @property
    def _at_once(self) -> int:
        return max(min(_BATCH_BYTES // self.shape.slot_bytes, _MOST_BATCH, self.host.num_slots // 4), 1)

    def check_integrity(self) -> None:
        self.host.check_integrity()
        for each in self.lower:
            each.check_integrity()


def _numbers(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)
