"""HostTier: blocks in slots of the host's memory, and the tiers below it that they go down to and come back from.

Owns the host's books and the order of the tiers. Who has bytes for it, an engine or another process, gives them to
`store`; who wants some asks `bring`, which leaves them in slots that stay as they are until `release`. What is stored
goes further down where that is worth it (`TierWriter`), to each tier. The books are touched on the event loop only;
bytes move in threads, in slots that the books keep for them meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from kvolt.core.errors import Unsupported
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.changes import Change
from kvolt.kv.tiers.lower_tier import Inspecting, LowerTier, Resizable, TierStats
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock, TierBooks
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.kv.tiers.writer import TierWriter
from kvolt.runtime.tasks import Crew
from kvolt.transfer.memory.device_memory import DeviceMemory, Sums
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_BATCH_BYTES = 256 << 20
"""Moved between two tiers at a time."""
_MOST_BATCH = 1024
_MADE_S = 60.0
"""For the memory, before the rest of it is made beside work."""
WAITING_SHARE = 0.25
"""Of the slots, for blocks that wait for a tier below, unless somebody says otherwise."""
_GUESSED_BYTES_PER_S = {Tier.HOST: 4e9, Tier.PEER: 2e9, Tier.DISK: 0.5e9, Tier.OBJECT: 0.1e9}

Fill = Callable[[Numbers, list[int]], Awaitable[tuple[Sums, float]]]
"""Bytes into slots, for the blocks at these places of those that were given; their checksums, and how long it took."""


class Brought(NamedTuple):
    """Blocks that the host has and holds, and where they lay before."""

    keys: Sequence[BlockKey]
    tiers: list[Tier]


class HostTier:
    """See the module. `start`, then anything, then `close`."""

    def __init__(
        self,
        shape: BlockShape,
        num_blocks: int,
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
        device: DeviceMemory | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        """`lower`: the tiers below, the fastest first, and how often a block is to be seen before it is written there,
        which costs something. `device`: that should reach the memory fast. `memory`: in place of a new one."""
        self.shape = shape
        self.memory = SlotMemory(shape, num_blocks, device) if memory is None else memory
        self.books = TierBooks(Tier.HOST, num_blocks, eviction)
        self.lower = tuple(tier for tier, _ in lower)
        self._writers = [
            TierWriter(tier, self.books, self.memory, touches, self.at_once) for tier, touches in lower
        ]
        self.keep_for_below(WAITING_SHARE)
        for tier in self.lower:
            if isinstance(tier, Inspecting):
                tier.on_spoiled = self.spoiled
        self.stats = {Tier.HOST: TierStats(), **{each.tier: each.stats for each in self.lower}}
        self._coming: dict[BlockKey, tuple[Tier, asyncio.Future[None]]] = {}
        """Being brought from a tier below: over when it is here, or not."""
        self.is_passed_by: Callable[[Tier], bool] = lambda tier: False
        """Whether blocks of a tier come to the engine without passing through here."""
        self.num_clears = 0
        """So often was all forgotten: what was under way then is not kept."""
        self._resizing = asyncio.Lock()
        self._is_shrinking = False
        """Whether blocks lie beyond its end still."""
        self._crew = Crew("kv host tier")
        self._memory_thread = TierThread("kv-memory")

    async def start(self) -> None:
        """What tiers below have kept is found from now on. The memory is there, too, unless it takes very long: blocks
        that come while it is made wait, and so does who computes them."""
        growing = self._crew.start(self._grow(), "make memory")
        for writer in self._writers:
            await writer.lower.start()
            writer.start(self._crew)
        await asyncio.wait([growing], timeout=_MADE_S)

    def keep_for_below(self, share: float) -> None:
        """Such a share of the slots is for blocks that are next to be written below: they stay until they are."""
        offered = [writer for writer in self._writers if writer.lower.tier is not Tier.PEER]
        for writer in offered:
            writer.waiting_share = share / len(offered)

    def on_change(self, told: Callable[[], None]) -> None:
        """Call this when blocks have come to a tier below or gone from it, besides what was asked for."""
        for writer in self._writers:
            writer.on_change = told

    async def _grow(self) -> None:
        """All of it, part by part and between other work: blocks that come first would wait for each part."""
        try:
            for num_slots in self.memory.steps():
                # By the books, which know at once: the memory is told by its thread, in its turn.
                if num_slots > self.books.num_slots:
                    return
                await self._memory_thread.run(self.memory.reach, num_slots)
        except OSError as error:
            num_slots = self.memory.num_reached
            log.warning("the host tier has memory for %d blocks only: %s", num_slots, error)
            self.books.resize(max(num_slots, 1))

    async def close(self) -> None:
        """What waits for a tier below is written, as far as that is quick."""
        await asyncio.gather(*(writer.close() for writer in self._writers))
        await self._crew.close()
        for tier in self.lower:
            await tier.close()
        if self.memory.num_bytes:
            await self._memory_thread.run(self.memory.close)
        await self._memory_thread.close()

    async def resize(self, tier: Tier, num_blocks: int) -> None:
        """A tier of ours holds so many from now on. KvoltError where it cannot, or has no size of its own."""
        if tier is Tier.HOST:
            async with self._resizing:
                self._is_shrinking = num_blocks < self.books.num_slots
                self.books.resize(num_blocks)
                await self._fit_memory()
            self._crew.start(self._grow(), "make memory")
            return
        for writer in self._writers:
            if writer.lower.tier is tier and isinstance(writer.lower, Resizable):
                await writer.lower.resize(num_blocks)
                writer.wake()
                return
        raise Unsupported(f"there is no {tier} tier here that has a size", feature=f"resize {tier}")

    async def _fit_memory(self) -> None:
        """As much as its blocks take, and no less than it may hold."""
        end = self.books.end
        self._is_shrinking = self._is_shrinking and end > self.books.num_slots
        await self._memory_thread.run(self.memory.resize, self.books.num_slots, end)

    # --- what is here

    @property
    def at_once(self) -> int:
        """Blocks that are moved together."""
        return max(min(_BATCH_BYTES // self.shape.slot_bytes, _MOST_BATCH, self.books.num_slots // 4), 1)

    def size(self, tier: Tier) -> tuple[int, int | None]:
        """Blocks in a tier that there is, and how many it can hold, where that is known."""
        books: TierBooks | LowerTier = self.books
        if tier is not Tier.HOST:
            books = next(each for each in self.lower if each.tier is tier)
        return len(books), books.num_slots

    def shape_in(self, tier: Tier) -> BlockShape:
        """Of blocks as they lie in a tier, as far as that is known here."""
        theirs = next((each for each in self.lower if each.tier is tier), None)
        return theirs.shape if isinstance(theirs, Resizable) else self.shape

    def tiers_of(self, keys: Sequence[BlockKey], start: int = 0) -> list[Tier]:
        """Where each of `keys` from `start` on lies, up to the first that lies nowhere, as far as is known."""
        found: list[Tier] = []
        for key in keys[start:]:
            tier = self._tier_of(key)
            if tier is None:
                break
            found.append(tier)
        return found

    def num_own(self, keys: Sequence[BlockKey]) -> int:
        """How many of these, from the first on, are here without another worker's help."""
        for index, key in enumerate(keys):
            coming_from = self._coming[key][0] if key in self._coming else None
            if coming_from is Tier.PEER or self._tier_of(key) in (None, Tier.PEER):
                return index
        return len(keys)

    def _tier_of(self, key: BlockKey) -> Tier | None:
        if self.books.has(key) or key in self._coming:
            return Tier.HOST
        for each in self.lower:
            if each.has(key):
                return each.tier
        return None

    def has_any(self, keys: Sequence[BlockKey]) -> bool:
        """Whether one of them is here: where a later one is, those before it mostly are, in one tier or another."""
        return any(self.books.has(key) or any(each.has(key) for each in self.lower) for key in keys)

    @property
    def knows_all(self) -> bool:
        """Whether there is no more in the tiers than is known: nothing to `look` for."""
        return all(each.look_s is None for each in self.lower)

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """Find out what tiers have of these, where that is not known and the answer comes within `worth_s`, about."""
        for each in self.lower:
            # A tier is asked for what follows: some look for the end of what they have from the first on.
            rest = keys[len(self.tiers_of(keys)) :]
            if rest and each.look_s is not None and each.look_s < worth_s:
                await each.look(rest, worth_s)

    def block_s(self, tier: Tier) -> float:
        """How long it takes to bring one block from there, by what was measured, or a guess before that."""
        above_s, stats = 0.0, self.stats[tier]
        known_s = stats.block_s
        if tier is not Tier.HOST and not self.is_passed_by(tier):
            above_s = self.block_s(Tier.HOST)
        elif known_s is None:
            # As long up as down. Rather too quick a guess: the first load tells, but only if there is one.
            known_s = stats.store_block_s
        return above_s + (self.shape.block_bytes / _GUESSED_BYTES_PER_S[tier] if known_s is None else known_s)

    def take_changes(self) -> tuple[Change, ...]:
        """Since the last time, for who routes."""
        changes = self.books.take_changes()
        for each in self.lower:
            changes = (*changes, *each.take_changes())
        return changes

    @property
    def num_dropped(self) -> int:
        """Blocks that were worth a tier below and went before it was their turn."""
        return sum(writer.num_dropped for writer in self._writers)

    @property
    def num_skipped(self) -> dict[Tier, int]:
        """Sightings of blocks that were too few to write the block to a tier below."""
        return {writer.lower.tier: writer.num_skipped for writer in self._writers}

    def clear(self) -> int:
        """Forget what nobody is at; how many blocks."""
        self.num_clears += 1
        num_below = sum(writer.clear() for writer in self._writers)  # first: blocks stay here for them
        return num_below + self.books.forget(self.books)

    # --- down

    def lacking(self, blocks: Sequence[TierBlock]) -> list[int]:
        """The places of those that would be new here."""
        return [index for index, block in enumerate(blocks) if not self.books.knows(block.key)]

    async def store(
        self, blocks: Sequence[TierBlock], fill: Fill, are_good: Callable[[], bool] = lambda: True
    ) -> int:
        """Keep those that are not here yet, as far as there is room; how many. `are_good`: asked once their bytes are
        here, whether they may be kept. Never an error but a cancellation, which leaves nothing."""
        stats, cleared = self.stats[Tier.HOST], self.num_clears
        reserved = self.books.reserve(blocks)
        # After it: blocks of this call that were here may have gone to make room, and were reserved anew.
        stats.failures["no_room"] += len(self.lacking(blocks))
        places = [index for index, _ in reserved]
        keys = [blocks[index].key for index in places]
        if keys:
            try:
                sums, took_s = await fill(numbers_of(slot for _, slot in reserved), places)
            except BaseException as error:
                self.books.cancel(keys)
                if not isinstance(error, Exception):
                    raise
                log.warning("blocks could not be offloaded: %s", str(error))
                stats.failures["unwritten"] += len(keys)
                return 0
            if not are_good() or cleared != self.num_clears:
                self.books.cancel(keys)
                stats.failures["late"] += len(keys)
                return 0
            for key, checksum in zip(keys, sums.tolist(), strict=True):
                self.books.seal(key, checksum)
            self.books.register(keys)
            stats.stored(len(keys), took_s)
        for block in blocks:
            self._seen(block.key)
        if self._is_shrinking:
            async with self._resizing:
                await self._fit_memory()
        return len(keys)

    def _seen(self, key: BlockKey) -> None:
        for writer in self._writers:
            writer.want(key)

    # --- up

    async def bring(self, blocks: Sequence[TierBlock]) -> Brought:
        """What of these the tiers below have into the host, up to the first that none has. All that is here then is
        held, from the first on, until `release`."""
        keys = [block.key for block in blocks]
        tiers = self.tiers_of(keys)
        keys = keys[: len(tiers)]
        others = [self._coming[key][1] for key in keys if key in self._coming]
        if any(tier is not Tier.HOST for tier in tiers):
            # Those that are here are not to go for those that come.
            here = [key for key in keys if self.books.has(key)]
            self.books.hold(here)
            try:
                for lower in self.lower:
                    lying = zip(blocks, tiers, strict=False)
                    await self._read(lower, [block for block, tier in lying if tier is lower.tier])
            finally:
                self.books.release(here)
        for other in others:
            await asyncio.wait([other])
        present = keys[: self.books.match(keys)]
        self.books.hold(present)
        return Brought(present, tiers[: len(present)])

    def release(self, keys: Sequence[BlockKey]) -> None:
        """Who brought them does not need them any more."""
        self.books.release(keys)

    def spoiled(self, key: BlockKey) -> None:
        """Its bytes are not what they were: it is not found any more."""
        self.stats[Tier.HOST].failures["corrupt"] += 1
        log.error("block %s in the host's memory is not what it was: it is computed again", key.hex())
        self.books.disown(key)

    async def _read(self, lower: LowerTier, blocks: Sequence[TierBlock]) -> None:
        """Those that are there still and are not here yet: between two tiers others had their turn."""
        there = [block for block in blocks if lower.has(block.key)]
        reserved = self.books.reserve(there)
        if not reserved:
            return
        wanted = [there[index] for index, _ in reserved]
        loop = asyncio.get_running_loop()
        coming = {block.key: loop.create_future() for block in wanted}
        self._coming.update({key: (lower.tier, over) for key, over in coming.items()})
        sums: list[int | None] = [None] * len(wanted)
        cleared = self.num_clears
        try:
            sums = await lower.read(wanted, self.memory, numbers_of(slot for _, slot in reserved))
        finally:
            if cleared != self.num_clears:
                sums = [None] * len(wanted)
            for key, over in coming.items():  # who waits looks when this is through
                del self._coming[key]
                over.set_result(None)
            for block, checksum in zip(wanted, sums, strict=True):
                if checksum is None:
                    self.books.cancel([block.key])
                else:
                    self.books.seal(block.key, checksum)
                    self.books.register([block.key])
        for block in wanted:
            self._seen(block.key)

    def check_integrity(self) -> None:
        self.books.check_integrity()
        for each in self.lower:
            each.check_integrity()


def numbers_of(values: Iterable[int]) -> Numbers:
    return np.fromiter(values, dtype=np.int64)
