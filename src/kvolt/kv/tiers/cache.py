"""TieredCache: offloads blocks of an engine's memory to the tiers and onboards them.

Copies blocks between the engine and host slots in parts and verifies checksums on every copy; a mismatch is a cache
miss. `HostTier` knows which block is in which tier.
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
from kvolt.kv.tiers.host_tier import HostTier, Onboarded, int64_array
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.runtime.tasks import Scope
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers, Slab

log = logging.getLogger(__name__)

_MAX_CONCURRENT_PARTS = 2
"""Bookkeeping of one part overlaps with the copy of another."""


@dataclass(frozen=True, slots=True)
class OnboardResult:
    """Onboarded prefix of the requested blocks."""

    num_blocks: int = 0
    by_tier: tuple[tuple[Tier, int], ...] = ()


class BlockCopier(Protocol):
    """Copies between an engine's blocks and host slots. Returns checksums and elapsed seconds."""

    async def offload(
        self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers
    ) -> tuple[Sums, float]: ...

    async def onboard(
        self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers
    ) -> tuple[Sums, float]: ...

    async def close(self) -> None: ...


class SlabCopier:
    """BlockCopier for slabs, with one thread per direction."""

    def __init__(self, slabs: Sequence[Slab], memory: SlotMemory) -> None:
        self._memory = memory
        # Separate threads, so that onboarding does not wait for offloads.
        self._down, self._up = _CopyThread("kv-down", slabs), _CopyThread("kv-up", slabs)

    async def offload(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._down.run(self._memory.fill, slots, keys, self._down.slabs, blocks)

    async def onboard(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._up.run(self._memory.empty, slots, keys, self._up.slabs, blocks)

    async def close(self) -> None:
        await asyncio.gather(self._down.close(), self._up.close())


class _CopyThread(TierThread):
    """Thread with its own view of the engine's slabs."""

    def __init__(self, name: str, slabs: Sequence[Slab]) -> None:
        super().__init__(name)
        self.slabs = tuple(slab.for_thread() for slab in slabs)


class DirectReader(Protocol):
    """Reads blocks of a tier directly into an engine's memory."""

    @property
    def tier(self) -> Tier: ...

    @property
    def is_usable(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def read(self, blocks: Sequence[TierBlock], numbers: Sequence[int]) -> int:
        """Read into these engine blocks; return the length of the intact prefix. Never raises."""
        ...


class _Part(NamedTuple):
    blocks: Sequence[TierBlock]
    direct: DirectReader | None


class TieredCache:
    """See the module. Call `start` first and `close` last."""

    def __init__(
        self, host: HostTier, copies: BlockCopier, num_device_blocks: int, direct: DirectReader | None = None
    ) -> None:
        """`direct`: reader for blocks of its tier that are not in the host tier."""
        self.host = host
        self._copies = copies
        self.num_device_blocks = num_device_blocks
        self._direct = direct
        host.bypasses_host = self._bypasses_host

    @classmethod
    def for_slabs(
        cls,
        slabs: Sequence[Slab],
        num_host_blocks: int,
        lower: Sequence[tuple[LowerTier, int]] = (),
        eviction: str = "lru",
        direct: DirectReader | None = None,
    ) -> Self:
        """`slabs`: the engine's memory, one per rank. `lower`, `eviction`: see `HostTier`."""
        host = HostTier(BlockShape.of(slabs), num_host_blocks, lower, eviction, slabs[0].device)
        return cls(host, SlabCopier(slabs, host.memory), slabs[0].num_blocks, direct)

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

    def _bypasses_host(self, tier: Tier) -> bool:
        return self._direct is not None and self._direct.is_usable and tier is self._direct.tier

    async def offload(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool] = lambda: True
    ) -> int:
        """Copy blocks from the engine; return how many were stored as new.

        `are_held`: whether the engine has held the blocks until now. If not, the copied bytes may belong to other
        blocks and nothing more is stored.
        """
        batch_blocks = self.host.batch_blocks
        cleared = self.host.num_clears
        storing: deque[asyncio.Task[int]] = deque()
        num_new = 0

        def are_valid() -> bool:
            return are_held() and self.host.num_clears == cleared

        async with Scope("offload") as scope:
            for start in range(0, len(blocks), batch_blocks):
                if len(storing) == _MAX_CONCURRENT_PARTS:
                    num_new += await storing.popleft()
                if not are_valid():
                    break
                batch = slice(start, start + batch_blocks)
                part = self._store(blocks[batch], numbers[batch], are_valid)
                storing.append(scope.start(part, "store"))
            for each in storing:
                num_new += await each
        return num_new

    async def _store(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], are_held: Callable[[], bool]
    ) -> int:
        async def copy(slots: Numbers, indexes: list[int]) -> tuple[Sums, float]:
            keys = [blocks[index].key for index in indexes]
            sources = int64_array(numbers[index] for index in indexes)
            return await self._copies.offload(slots, keys, sources)

        return await self.host.store(blocks, copy, are_held)

    async def onboard(
        self, blocks: Sequence[TierBlock], numbers: Sequence[int], timeout_s: float | None = None
    ) -> OnboardResult:
        """Load blocks into these engine blocks within the time limit; return the onboarded prefix.

        The next part is loaded from lower tiers while one is copied.
        """
        parts = deque(self._parts(blocks))
        held: deque[tuple[Onboarded, asyncio.Task[int]]] = deque()
        next_part: asyncio.Task[Onboarded] | None = None
        num_by_tier: Counter[Tier] = Counter()
        is_whole = True
        try:
            async with asyncio.timeout(timeout_s), Scope("fetch") as scope:
                num_started = 0
                while is_whole and (parts or held):
                    if parts and len(held) < _MAX_CONCURRENT_PARTS:
                        part = parts.popleft()
                        into = numbers[num_started : num_started + len(part.blocks)]
                        if part.direct is not None:
                            onboarded = Onboarded((), [part.direct.tier] * len(part.blocks))
                            copy = part.direct.read(part.blocks, into)
                        else:
                            onboarded = await (next_part or self.host.onboard(part.blocks))
                            next_part = None
                            copy = self._copy_up(onboarded.keys, into[: len(onboarded.keys)])
                        held.append((onboarded, scope.start(copy, "copy")))
                        num_started += len(onboarded.tiers)
                        if len(onboarded.tiers) < len(part.blocks):
                            parts.clear()  # blocks after a gap are useless
                        if parts and parts[0].direct is None:
                            next_part = scope.start(self.host.onboard(parts[0].blocks), "onboard")
                    else:
                        onboarded, copying = held[0]
                        num_good = await copying
                        held.popleft()
                        self.host.release(onboarded.keys)
                        num_by_tier.update(onboarded.tiers[:num_good])
                        is_whole = num_good == len(onboarded.tiers)
                if not is_whole:
                    scope.cancel()
        except TimeoutError:
            log.warning(
                "onboarding timed out: blocks=%d onboarded=%d timeout_s=%g",
                len(blocks),
                num_by_tier.total(),
                timeout_s or 0.0,
            )
        finally:  # all tasks have ended
            for onboarded, _ in held:
                self.host.release(onboarded.keys)
            if next_part is not None and not next_part.cancelled() and next_part.exception() is None:
                self.host.release(next_part.result().keys)
        return OnboardResult(num_by_tier.total(), tuple(sorted(num_by_tier.items())))

    def _parts(self, blocks: Sequence[TierBlock]) -> Iterator[_Part]:
        """Batches of blocks; those read directly and those read through the host are separate."""
        tiers = [] if self._direct is None else self.host.find_tiers([block.key for block in blocks])
        readers = [self._direct if self._bypasses_host(tier) else None for tier in tiers]
        readers += [None] * (len(blocks) - len(readers))
        batch_blocks, start = self.host.batch_blocks, 0
        for reader, run in groupby(readers):
            end = start + sum(1 for _ in run)
            for first in range(start, end, batch_blocks):
                yield _Part(blocks[first : min(first + batch_blocks, end)], reader)
            start = end

    async def _copy_up(self, keys: Sequence[BlockKey], numbers: Sequence[int]) -> int:
        """Copy held host blocks to the engine; return the length of the intact prefix."""
        if not keys:
            return 0
        slot_table = self.host.slot_table
        slots = int64_array(map(slot_table.slot, keys))
        expected = [slot_table.checksum(key) for key in keys]
        sums, elapsed_s = await self._copies.onboard(slots, keys, int64_array(numbers))
        actual = sums.tolist()
        num_good = next((index for index in range(len(keys)) if actual[index] != expected[index]), len(keys))
        if num_good < len(keys):
            self.host.mark_corrupt(keys[num_good])
        self.host.stats[Tier.HOST].record_loaded(num_good, elapsed_s)
        return num_good
