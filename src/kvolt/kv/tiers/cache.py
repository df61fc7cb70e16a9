"""TieredCache: blocks between an engine's memory and the tiers below it.

Copies blocks of the engine into the host's slots and back, a part at a time, and holds them against their checksums
whenever they move: one that is not what it was is a miss, and nothing else. Which blocks lie where: `HostTier`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple, Protocol, Self

from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.tiers.host_tier import Brought, HostTier, numbers_of
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slab_copies import SlabCopies
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.runtime.tasks import Scope
from kvolt.transfer.memory.device_memory import Sums
from kvolt.transfer.memory.slabs import Numbers, Slab

log = logging.getLogger(__name__)

_UNDER_WAY = 2
"""Parts at a time: the books of one are kept while another's bytes are copied."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """Of blocks that were asked for, from the first on."""

    num_blocks: int = 0
    by_tier: tuple[tuple[Tier, int], ...] = ()


class Copies(Protocol):
    """How bytes go between an engine's blocks and slots of the host. Gives the checksums of what went, and how long it
    took."""

    async def down(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]: ...

    async def up(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]: ...

    async def close(self) -> None: ...


class Direct(Protocol):
    """A way from a tier to an engine's blocks that does not pass through the host's memory."""

    @property
    def tier(self) -> Tier: ...

    @property
    def is_usable(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def read(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> int:
        """Into these of the engine's blocks; how many came whole, from the first on. Never an error."""
        ...


class _Part(NamedTuple):
    blocks: Sequence[TierBlock]
    past_host: Direct | None


class TieredCache:
    """See the module. `start`, then anything, then `close`."""

    def __init__(
        self, host: HostTier, copies: Copies, num_device_blocks: int, direct: Direct | None = None
    ) -> None:
        """`direct`: for blocks of its tier that the host has not."""
        self.host = host
        self._copies = copies
        self.num_device_blocks = num_device_blocks
        self._direct = direct
        host.is_passed_by = self._is_past_host

    @classmethod
    def over(
        cls,
        slabs: Sequence[Slab],
        num_host_blocks: int,
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
        direct: Direct | None = None,
    ) -> Self:
        """`slabs`: the engine's memory, by ranks. `lower`, `eviction`: see `HostTier`."""
        host = HostTier(BlockShape.of(slabs), num_host_blocks, lower, eviction, slabs[0].device)
        return cls(host, SlabCopies(slabs, host.memory), slabs[0].num_blocks, direct)

    async def start(self) -> None:
        await self.host.start()
        if self._direct is not None:
            try:
                await self._direct.start()
            except BaseException:
                await self.close()
                raise

    async def close(self) -> None:
        try:
            if self._direct is not None:
                await self._direct.close()
        finally:
            await self._copies.close()
            await self.host.close()

    def _is_past_host(self, tier: Tier) -> bool:
        return self._direct is not None and self._direct.is_usable and tier is self._direct.tier

    async def offload(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool] = lambda: True
    ) -> int:
        """Copy blocks of the engine's memory; how many were new and are kept. `are_held`: whether they were as they
        should be until now; where they were not, others' bytes may have been copied, and none are from then on."""
        at_once = self.host.at_once
        cleared = self.host.num_clears
        storing: deque[asyncio.Task[int]] = deque()
        num_new = 0

        def are_wanted() -> bool:
            return are_held() and self.host.num_clears == cleared

        async with Scope("offload") as scope:
            for start in range(0, len(blocks), at_once):
                if len(storing) == _UNDER_WAY:
                    num_new += await storing.popleft()
                if not are_wanted():
                    break
                some = slice(start, start + at_once)
                part = self._store(blocks[some], numbers[some], are_wanted)
                storing.append(scope.start(part, "store"))
            for each in storing:
                num_new += await each
        return num_new

    async def _store(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool]
    ) -> int:
        async def copy(slots: Numbers, places: list[int]) -> tuple[Sums, float]:
            keys = [blocks[index].key for index in places]
            sources = numbers_of(numbers[index] for index in places)
            return await self._copies.down(slots, keys, sources)

        return await self.host.store(blocks, copy, are_held)

    async def fetch(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], timeout_s: float | None = None
    ) -> Fetched:
        """Bring blocks into these of the engine's memory; how many came, from the first on, within that time. The next
        part comes from below while one is copied."""
        parts = deque(self._parts(blocks))
        held: deque[tuple[Brought, asyncio.Task[int]]] = deque()
        ahead: asyncio.Task[Brought] | None = None
        came: Counter[Tier] = Counter()
        is_whole = True
        try:
            async with asyncio.timeout(timeout_s), Scope("fetch") as scope:
                num_brought = 0
                while is_whole and (parts or held):
                    if parts and len(held) < _UNDER_WAY:
                        part = parts.popleft()
                        into = numbers[num_brought : num_brought + len(part.blocks)]
                        if part.past_host is not None:
                            brought = Brought((), [part.past_host.tier] * len(part.blocks))
                            up = part.past_host.read(part.blocks, into)
                        else:
                            brought = await (ahead or self.host.bring(part.blocks))
                            ahead = None
                            up = self._bring_up(brought.keys, into[: len(brought.keys)])
                        held.append((brought, scope.start(up, "up")))
                        num_brought += len(brought.tiers)
                        if len(brought.tiers) < len(part.blocks):
                            parts.clear()  # what follows would be of no use
                        if parts and parts[0].past_host is None:
                            ahead = scope.start(self.host.bring(parts[0].blocks), "bring")
                    else:
                        brought, copying = held[0]
                        num_good = await copying
                        held.popleft()
                        self.host.release(brought.keys)
                        came.update(brought.tiers[:num_good])
                        is_whole = num_good == len(brought.tiers)
                if not is_whole:
                    scope.cancel()
        except TimeoutError:
            log.warning("of %d blocks %d came within %g s", len(blocks), came.total(), timeout_s or 0.0)
        finally:  # nothing is under way any more
            for brought, _ in held:
                self.host.release(brought.keys)
            if ahead is not None and not ahead.cancelled() and ahead.exception() is None:
                self.host.release(ahead.result().keys)
        return Fetched(came.total(), tuple(sorted(came.items())))

    def _parts(self, blocks: Sequence[TierBlock]) -> Iterator[_Part]:
        """Blocks that are moved together: apart from others those that need not pass through the host."""
        lying = [] if self._direct is None else self.host.tiers_of([block.key for block in blocks])
        ways = [self._direct if self._is_past_host(tier) else None for tier in lying]
        ways += [None] * (len(blocks) - len(ways))
        at_once, start = self.host.at_once, 0
        for way, run in groupby(ways):
            end = start + sum(1 for _ in run)
            for first in range(start, end, at_once):
                yield _Part(blocks[first : min(first + at_once, end)], way)
            start = end

    async def _bring_up(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> int:
        """Blocks of the host, which are held meanwhile; how many came whole, from the first on."""
        if not keys:
            return 0
        books = self.host.books
        slots, due = numbers_of(map(books.slot, keys)), [books.checksum(key) for key in keys]
        sums, took_s = await self._copies.up(slots, keys, numbers_of(numbers))
        found = sums.tolist()
        num_good = next((index for index in range(len(keys)) if found[index] != due[index]), len(keys))
        if num_good < len(keys):
            self.host.spoiled(keys[num_good])
        self.host.stats[Tier.HOST].loaded(num_good, took_s)
        return num_good
