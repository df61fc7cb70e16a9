"""PeerTier: blocks in other workers' tiers, as a lower tier of a worker.

Knows only the locations named by requests: which worker presumably has how much of a prompt (`kv_sources`). Read-only.
A worker that is gone or has evicted the blocks is a cache miss and is not contacted for a while.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

import numpy as np

from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import BlockKey, InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.request import KvSource
from kvolt.kv.shared_pool.slot_reads import read_verified
from kvolt.kv.shared_pool.wire import FetchBlocks, FetchResult
from kvolt.kv.tiers.lower_tier import LowerTier
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_READ_S = 3.0
"""Deadline for a batch of blocks; computing them takes less."""
_SLOW_READ_S = 1.0
"""A read cancelled after this time was too slow; one cancelled earlier was not needed any more."""
_BACKOFF_S = 10.0
"""Time for which a worker that failed is not contacted."""
_INCOMPATIBLE_BACKOFF_S = 600.0
"""Backoff for a worker with another block shape."""
_MAX_KNOWN = 1 << 16

OpenFetch = Callable[[InstanceId, FetchBlocks], AbstractAsyncContextManager[FetchResult]]
"""Fetches blocks of another worker, readable while the context is open. KvoltError if it does not respond."""


class PeerTier(LowerTier):
    """See the module. Empty before `connect`."""

    tier = Tier.PEER

    def __init__(self, agent: TransferAgent, now: Callable[[], float]) -> None:
        """`agent`: shared agent of the process; not closed here."""
        super().__init__()
        self._agent = agent
        self._now = now
        self._open_fetch: OpenFetch | None = None
        self._own_id = InstanceId("")
        self._sources: OrderedDict[BlockKey, InstanceId] = OrderedDict()
        """Worker that presumably has a block; bounded, least recently named first."""
        self._backoff_until: dict[InstanceId, float] = {}
        self._thread = TierThread("kv-peer")

    def connect(self, open_fetch: OpenFetch, own_id: InstanceId) -> None:
        """Set how other workers are contacted, and the id of this worker."""
        self._open_fetch, self._own_id = open_fetch, own_id

    async def close(self) -> None:
        await self._thread.close()

    def __len__(self) -> int:
        return len(self._sources)

    def add_sources(self, keys: Sequence[BlockKey], sources: Sequence[KvSource]) -> None:
        """Record which workers have prefixes of these blocks, as named by a request."""
        now = self._now()
        for source in sources:
            if source.instance == self._own_id or self._backoff_until.get(source.instance, -math.inf) > now:
                continue
            for key in keys[: max(source.num_blocks, 0)]:
                self._sources[key] = source.instance
                self._sources.move_to_end(key)
        while len(self._sources) > _MAX_KNOWN:
            self._sources.popitem(last=False)

    def has(self, key: BlockKey) -> bool:
        return self._open_fetch is not None and key in self._sources

    def has_or_pending(self, key: BlockKey) -> bool:
        """True, since nothing is written to peers."""
        return True

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        """No-op: peers fill their own tiers."""

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        checksums: list[int | None] = [None] * len(blocks)
        by_source: dict[InstanceId, list[int]] = {}
        for index, block in enumerate(blocks):
            source = self._sources.get(block.key)
            if source is not None:  # else removed since `has`
                by_source.setdefault(source, []).append(index)
        for source, indexes in by_source.items():
            requested = [blocks[index] for index in indexes]
            received = await self._read_from(source, requested, memory, slots[np.asarray(indexes)])
            for index, checksum in zip(indexes, received, strict=True):
                checksums[index] = checksum
        # Also the received ones: the source may evict them before the next request, which names sources again.
        self.forget([block.key for block in blocks])
        return checksums

    async def _read_from(
        self, source: InstanceId, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers
    ) -> list[int | None]:
        assert self._open_fetch is not None
        keys = [block.key for block in blocks]
        started_at = time.perf_counter()
        try:
            await self._thread.run(memory.grow_to, int(slots.max()) + 1)
            request = FetchBlocks(tuple(blocks), memory.shape)
            async with asyncio.timeout(_READ_S), self._open_fetch(source, request) as result:
                checksums = await read_verified(
                    self._agent, self._thread, result, memory, slots, keys, _READ_S
                )
        except asyncio.CancelledError:
            if time.perf_counter() - started_at > _SLOW_READ_S:  # cancelled because of the delay
                self._back_off(source, _BACKOFF_S)
            raise
        except (KvoltError, TimeoutError) as error:
            reason = error.message if isinstance(error, KvoltError) else f"timeout after {_READ_S:g} s"
            log.warning("fetch from worker failed: worker=%s error=%s", source, reason)
            self.stats.failures["unread"] += len(keys)
            if not isinstance(error, Overloaded):  # it responds and may serve the next fetch
                self._back_off(
                    source, _INCOMPATIBLE_BACKOFF_S if isinstance(error, InvalidRequest) else _BACKOFF_S
                )
            return [None] * len(keys)
        num_intact = sum(each is not None for each in checksums)
        num_bad = min(len(result.checksums), len(keys)) - num_intact
        if num_bad:
            log.error("corrupt blocks from worker: worker=%s blocks=%d", source, num_bad)
        self.stats.failures["corrupt"] += num_bad
        self.stats.failures["gone"] += len(keys) - num_intact - num_bad
        self.stats.record_loaded(num_intact, time.perf_counter() - started_at)
        return checksums

    def _back_off(self, source: InstanceId, for_s: float) -> None:
        now = self._now()
        self._backoff_until = {each: until for each, until in self._backoff_until.items() if until > now}
        self._backoff_until[source] = now + for_s
        self.forget([key for key, known in self._sources.items() if known == source])

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        """Remove the sources of these blocks; the peers keep them."""
        if keys is None:
            self._sources.clear()
        else:
            for key in keys:
                self._sources.pop(key, None)
        return 0
