"""KV tiers of a twin's workers: blocks without bytes that take time on a worker's own links.

What is kept, what goes for what, what is brought and what is computed again is decided by the code of real workers.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, cast

import msgspec
import numpy as np
from msgspec import Meta

from kvolt.core.card import EngineInfo
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import KvChange, Tier
from kvolt.engines.contract import Engine
from kvolt.engines.sim.links import Link
from kvolt.engines.sim.transfers import SimTransfers
from kvolt.kv.changes import Change
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.lower_tier import LowerTier, TierStats
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock, TierBooks
from kvolt.transfer.memory.device_memory import Sums
from kvolt.transfer.memory.slabs import Numbers
from kvolt.worker.tiering import NewTiering, TieredEngine, Tiering

_DOWN, _UP, _WRITE, _READ = "host_down", "host_up", "disk_write", "disk_read"


class TwinTiers(msgspec.Struct, frozen=True, kw_only=True):
    """Of each worker."""

    host_blocks: Annotated[int, Meta(ge=0)] = 0
    """0: there are none."""
    disk_blocks: Annotated[int, Meta(ge=0)] = 0
    disk_touches: Annotated[int, Meta(ge=1, le=15)] = 1
    eviction: str = "lru"
    host_bytes_per_s: Annotated[float, Meta(gt=0)] = 48e9
    """Each way: what an H200 was measured to do, checksums included."""
    disk_bytes_per_s: Annotated[float, Meta(gt=0)] = 3e9

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise ValueError(f"no rule of eviction is {self.eviction!r}; known: {', '.join(EVICTIONS)}")
        if self.disk_blocks and not self.host_blocks:
            raise ValueError("blocks go to a disk by way of the host's memory: give it some")


def tiering_on_paper(tiers: TwinTiers, block_bytes: int) -> NewTiering | None:
    if not tiers.host_blocks:
        return None

    def new(
        engine: Engine,
        info: EngineInfo,
        now: Callable[[], float],
        tell: Callable[[tuple[KvChange, ...]], None],
    ) -> Tiering:
        shape = BlockShape(block_bytes)
        transfers = SimTransfers(
            [
                Link(_DOWN, tiers.host_bytes_per_s),
                Link(_UP, tiers.host_bytes_per_s),
                Link(_WRITE, tiers.disk_bytes_per_s),
                Link(_READ, tiers.disk_bytes_per_s),
            ],
            now,
        )
        lower: list[tuple[LowerTier, int]] = []
        if tiers.disk_blocks:
            lower.append(
                (_PaperDisk(tiers.disk_blocks, tiers.eviction, shape, transfers), tiers.disk_touches)
            )
        memory = _PaperMemory(shape, tiers.host_blocks)
        host = HostTier(shape, tiers.host_blocks, lower, tiers.eviction, memory=memory)
        cache = TieredCache(host, _PaperCopies(shape, transfers), info.capacity.kv_total_blocks)
        step_tokens = info.capacity.max_batch_tokens
        return Tiering(
            cast("TieredEngine", engine), cache, now, tell, info.step_model, info.block_size, step_tokens
        )

    return new


class _PaperMemory(SlotMemory):
    """Slots that hold nothing."""

    def steps(self) -> Iterator[int]:
        yield from ()


class _PaperCopies:
    """A `Copies`."""

    def __init__(self, shape: BlockShape, transfers: SimTransfers) -> None:
        self._shape = shape
        self._transfers = transfers

    async def down(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._move(len(keys), _DOWN)

    async def up(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._move(len(keys), _UP)

    async def close(self) -> None:
        self._transfers.close()

    async def _move(self, num_blocks: int, link: str) -> tuple[Sums, float]:
        took_s = await moved_s(self._transfers, num_blocks * self._shape.block_bytes, link)
        return np.zeros(num_blocks, dtype=np.uint64), took_s


async def moved_s(transfers: SimTransfers, num_bytes: int, link: str) -> float:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await transfers.move(num_bytes, link)
    return loop.time() - began_at


class _PaperDisk:
    """A `LowerTier`."""

    tier = Tier.DISK
    look_s: float | None = None
    has_chores = False

    def __init__(self, num_slots: int, eviction: str, shape: BlockShape, transfers: SimTransfers) -> None:
        self._books = TierBooks(Tier.DISK, num_slots, eviction)
        self._shape = shape
        self._transfers = transfers
        self.stats = TierStats()

    @property
    def num_slots(self) -> int | None:
        return self._books.num_slots

    def __len__(self) -> int:
        return len(self._books)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def has(self, key: BlockKey) -> bool:
        return self._books.has(key)

    def knows(self, key: BlockKey) -> bool:
        return self._books.knows(key)

    async def look(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        """The books know all."""

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        keys = [blocks[index].key for index, _ in self._books.reserve(blocks)]
        try:
            took_s = await moved_s(self._transfers, len(keys) * self._shape.block_bytes, _WRITE)
        except BaseException:
            self._books.cancel(keys)
            raise
        for key in keys:
            self._books.seal(key, 0)
        self._books.register(keys)
        self.stats.stored(len(keys), took_s)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        keys = [block.key for block in blocks]
        self._books.hold(keys)
        try:
            took_s = await moved_s(self._transfers, len(keys) * self._shape.block_bytes, _READ)
        finally:
            self._books.release(keys)
        self.stats.loaded(len(keys), took_s)
        return [0] * len(keys)

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        return self._books.forget(self._books if keys is None else keys)

    def take_changes(self) -> tuple[Change, ...]:
        return self._books.take_changes()

    def check_integrity(self) -> None:
        self._books.check_integrity()
