"""TieredCache: blocks between an engine's memory and the tiers below it.

Copies blocks of the engine into the host's slots and back, a part at a time, and holds them against their checksums
whenever they move: one that is not what it was is a miss, and nothing else. Which blocks lie where: `HostTier`.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.books import TierBlock
from kvolt.kv.tiers.host_tier import Brought, HostTier, numbers_of
from kvolt.kv.tiers.lower import LowerTier
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.runtime.tasks import Crew
from kvolt.transfer.device_memory import Sums
from kvolt.transfer.memory import Numbers, Slab


@dataclass(frozen=True, slots=True)
class Fetched:
    """Of blocks that were asked for, from the first on."""

    num_blocks: int = 0
    by_tier: tuple[tuple[Tier, int], ...] = ()


class TieredCache:
    """See the module. `start`, then anything, then `close`."""

    def __init__(
        self,
        slabs: Sequence[Slab],
        num_host_blocks: int,
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
    ) -> None:
        """`slabs`: the engine's memory, by ranks. `lower`, `eviction`: see `HostTier`."""
        self._slabs = tuple(slab.for_thread() for slab in slabs)
        shape = BlockShape.of(slabs)
        self.host = HostTier(shape, num_host_blocks, lower, eviction, self._slabs[0].device)
        self._crew = Crew("kv tiers")
        self._thread = TierThread("kv-host")

    async def start(self) -> None:
        await self.host.start()

    async def close(self) -> None:
        await self._crew.close()
        await asyncio.to_thread(self._thread.close)
        await self.host.close()

    async def offload(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool] = lambda: True
    ) -> int:
        """Copy blocks of the engine's memory; how many were new and are kept. `are_held`: whether they were as they
        should be until now; where they were not, others' bytes may have been copied."""

        async def copy(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
            keys = [blocks[index].key for index in places]
            sources = numbers_of(numbers[index] for index in places)
            return await self._thread.run(self.host.memory.fill, slots, keys, self._slabs, sources)

        return await self.host.store(blocks, copy, are_held)

    async def fetch(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> Fetched:
        """Bring blocks into these of the engine's memory; how many came, from the first on. The next part comes from
        below while one is copied."""
        came: Counter[Tier] = Counter()
        at_once = self.host.at_once
        parts = [blocks[start : start + at_once] for start in range(0, len(blocks), at_once)]
        ahead: asyncio.Task[Brought] | None = None
        num_here = 0
        try:
            for index, part in enumerate(parts):
                brought = await (ahead or self.host.bring(part))
                ahead = None
                if index + 1 < len(parts) and len(brought.keys) == len(part):
                    ahead = self._crew.start(self.host.bring(parts[index + 1]), "bring")
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

    def _let_go(self, ahead: asyncio.Task[Brought]) -> None:
        if not ahead.cancelled() and ahead.exception() is None:
            self.host.release(ahead.result().keys)

    async def _up(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> int:
        """Blocks of the host, held until this is over; how many came whole, from the first on."""
        if not keys:
            return 0
        books = self.host.books
        slots = numbers_of(map(books.slot, keys))
        try:
            sums, took_s = await self._thread.run(
                self.host.memory.empty, slots, keys, self._slabs, numbers_of(numbers)
            )
            wanted = map(books.checksum, keys)
            are_good = [found == due for found, due in zip(sums.tolist(), wanted, strict=True)]
        finally:
            self.host.release(keys)
        num_good = are_good.index(False) if False in are_good else len(keys)
        if num_good < len(keys):
            self.host.spoiled(keys[num_good])
        self.host.stats[Tier.HOST].loaded(num_good, took_s)
        return num_good
