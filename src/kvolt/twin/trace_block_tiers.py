"""KV tiers of a twin's workers: blocks without bytes that take time on simulated links.

Eviction, onboarding and recomputation are decided by the code of real workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, cast

import msgspec
import numpy as np
from msgspec import Meta

from kvolt.core.card import EngineInfo
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import KvChange, Tier
from kvolt.engines.contract import Engine
from kvolt.engines.sim.links import SimLink
from kvolt.engines.sim.transfers import SimTransfers
from kvolt.kv.tiers.cache import TieredCache
from kvolt.kv.tiers.eviction import EVICTIONS
from kvolt.kv.tiers.host_tier import HostTier
from kvolt.kv.tiers.lower_tier import LowerTier, SlotTableTier
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import SlotTable, TierBlock
from kvolt.transfer.memory.pieces import Sums
from kvolt.transfer.memory.slabs import Numbers
from kvolt.worker.kv.tiering import TieredEngine, Tiering, TieringFactory

_DOWN, _UP, _WRITE, _READ = "host_down", "host_up", "disk_write", "disk_read"


class TwinTiers(msgspec.Struct, frozen=True, kw_only=True):
    """KV tiers of each worker."""

    host_blocks: Annotated[int, Meta(ge=0)] = 0
    """Host tier capacity in blocks; 0 disables all tiers."""
    disk_blocks: Annotated[int, Meta(ge=0)] = 0
    disk_touches: Annotated[int, Meta(ge=1, le=15)] = 1
    eviction: str = "lru"
    host_bytes_per_s: Annotated[float, Meta(gt=0)] = 48e9
    """Bandwidth in each direction, as measured on an H200 with checksums."""
    disk_bytes_per_s: Annotated[float, Meta(gt=0)] = 3e9

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise ValueError(f"unknown eviction policy {self.eviction!r}; known: {', '.join(EVICTIONS)}")
        if self.disk_blocks and not self.host_blocks:
            raise ValueError("disk_blocks requires host_blocks")


def trace_block_tiering(tiers: TwinTiers, block_bytes: int) -> TieringFactory | None:
    if not tiers.host_blocks:
        return None

    def new(
        engine: Engine,
        info: EngineInfo,
        now: Callable[[], float],
        publish: Callable[[tuple[KvChange, ...]], None],
    ) -> Tiering:
        shape = BlockShape(block_bytes)
        transfers = SimTransfers(
            [
                SimLink(_DOWN, tiers.host_bytes_per_s),
                SimLink(_UP, tiers.host_bytes_per_s),
                SimLink(_WRITE, tiers.disk_bytes_per_s),
                SimLink(_READ, tiers.disk_bytes_per_s),
            ],
            now,
        )
        lower: list[tuple[LowerTier, int]] = []
        if tiers.disk_blocks:
            lower.append(
                (_TraceBlockDisk(tiers.disk_blocks, tiers.eviction, shape, transfers), tiers.disk_touches)
            )
        memory = _TraceBlockMemory(shape, tiers.host_blocks)
        host = HostTier(shape, tiers.host_blocks, lower, tiers.eviction, memory=memory)
        cache = TieredCache(host, _TraceBlockCopies(shape, transfers), info.capacity.kv_total_blocks)
        step_tokens = info.capacity.max_batch_tokens
        return Tiering(
            cast("TieredEngine", engine), cache, now, publish, info.step_model, info.block_size, step_tokens
        )

    return new


class _TraceBlockMemory(SlotMemory):
    """Slots without memory."""

    def steps(self) -> Iterator[int]:
        yield from ()


class _TraceBlockCopies:
    """`Copies` on simulated links."""

    def __init__(self, shape: BlockShape, transfers: SimTransfers) -> None:
        self._shape = shape
        self._transfers = transfers

    async def offload(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._move(len(keys), _DOWN)

    async def onboard(self, slots: Numbers, keys: Sequence[BlockKey], blocks: Numbers) -> tuple[Sums, float]:
        return await self._move(len(keys), _UP)

    async def close(self) -> None:
        self._transfers.close()

    async def _move(self, num_blocks: int, link: str) -> tuple[Sums, float]:
        took_s = await transfer_s(self._transfers, num_blocks * self._shape.block_bytes, link)
        return np.zeros(num_blocks, dtype=np.uint64), took_s


async def transfer_s(transfers: SimTransfers, num_bytes: int, link: str) -> float:
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await transfers.move(num_bytes, link)
    return loop.time() - began_at


class _TraceBlockDisk(SlotTableTier):
    """Disk tier on simulated links."""

    tier = Tier.DISK

    def __init__(self, num_slots: int, eviction: str, shape: BlockShape, transfers: SimTransfers) -> None:
        super().__init__(SlotTable(Tier.DISK, num_slots, eviction))
        self._shape = shape
        self._transfers = transfers

    async def close(self) -> None: ...

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        keys = [blocks[index].key for index, _ in self.slot_table.reserve(blocks)]
        try:
            took_s = await transfer_s(self._transfers, len(keys) * self._shape.block_bytes, _WRITE)
        except BaseException:
            self.slot_table.cancel(keys)
            raise
        for key in keys:
            self.slot_table.seal(key, 0)
        self.slot_table.register(keys)
        self.stats.record_stored(len(keys), took_s)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        keys = [block.key for block in blocks]
        self.slot_table.hold(keys)
        try:
            took_s = await transfer_s(self._transfers, len(keys) * self._shape.block_bytes, _READ)
        finally:
            self.slot_table.release(keys)
        self.stats.record_loaded(len(keys), took_s)
        return [0] * len(keys)
