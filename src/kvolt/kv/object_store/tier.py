"""ObjectTier: blocks in a shared object store, as a lower tier.

Usually a
prefix of a prompt's blocks exists, so its end is found with a few concurrent queries (`lookup`). State is bounded.
Changes are not published to routers, since all workers reach the store equally.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvolt.core.errors import KvoltError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Tier
from kvolt.kv.object_store.blocks import ObjectBlocks, ReadResult
from kvolt.kv.tiers.lower_tier import KnownKeys, SharedTier
from kvolt.kv.tiers.slot_memory import SlotMemory
from kvolt.kv.tiers.slot_table import TierBlock
from kvolt.kv.tiers.tier_thread import TierThread
from kvolt.transfer.memory.slabs import Numbers

log = logging.getLogger(__name__)

_MAX_ABSENT = 1 << 14
_ABSENT_S = 10.0
"""Time for which a missing block is not queried again."""
_MAX_QUERIES = 16
"""Concurrent queries: a prompt of 4,000 blocks takes three rounds."""
_BATCH_BLOCKS = 64
"""Blocks per call; a cancelled read or write waits for at most one batch."""
_LOOKUP_S = 0.5
"""Deadline for one lookup."""
_SLOW_READ_S = 2.0
"""A read cancelled after this time was too slow; one cancelled earlier was not needed any more."""
_PAUSE_S = 10.0
"""Backoff after the store failed."""


class ObjectTier(SharedTier):
    """See the module."""

    tier = Tier.OBJECT
    lookup_s = 0.02

    def __init__(self, blocks: ObjectBlocks, now: Callable[[], float]) -> None:
        super().__init__()
        self._blocks = blocks
        self._now = now
        self._absent: OrderedDict[BlockKey, float] = OrderedDict()
        """Missing blocks, with the time of the next query."""
        self._corrupt = KnownKeys(_MAX_ABSENT)
        """Invalid objects, to be overwritten by the next write."""
        self._retry_at = 0.0
        # Separate threads, so that reads do not wait for writes, nor lookups for reads.
        self._readers, self._writers = TierThread("kv-object-read"), TierThread("kv-object-write")
        self._lookups = TierThread("kv-object-lookup")

    async def close(self) -> None:
        for thread in (self._readers, self._writers, self._lookups):
            await thread.close()
        await asyncio.to_thread(self._blocks.close)

    def has(self, key: BlockKey) -> bool:
        return super().has(key) and self._now() >= self._retry_at

    # --- lookup

    async def lookup(self, keys: Sequence[BlockKey], worth_s: float = math.inf) -> None:
        start = self._known.num_known(keys)
        now = self._now()
        if start == len(keys) or now < self._retry_at or self._absent.get(keys[start], 0.0) > now:
            return
        try:
            async with asyncio.timeout(_LOOKUP_S):
                await self._find_end(keys, start)
        except TimeoutError:
            log.warning("object store lookup timed out: url=%s timeout_s=%g", self._blocks.url, _LOOKUP_S)
            self._retry_at = self._now() + _PAUSE_S
        except KvoltError as error:
            self._back_off(error)

    async def _find_end(self, keys: Sequence[BlockKey], start: int) -> None:
        """Search for the end of the existing prefix from `start` on, with several queries per round."""
        end = len(keys)
        while start < end:
            probes = _spread(start, end, _MAX_QUERIES)
            exist = await self._lookups.ask(self._blocks.exist, [keys[index] for index in probes])
            num_existing = exist.index(False) if False in exist else len(probes)
            if num_existing < len(probes):
                end = probes[num_existing]
            if num_existing:
                self._add_known(keys[start : probes[num_existing - 1] + 1])
                start = probes[num_existing - 1] + 1
        if end < len(keys):
            self._add_absent(keys[end])

    def _add_known(self, keys: Sequence[BlockKey]) -> None:
        self._known.add(keys)
        for key in keys:
            self._absent.pop(key, None)

    def _add_absent(self, key: BlockKey) -> None:
        self._known.forget([key])
        self._absent[key] = self._now() + _ABSENT_S
        self._absent.move_to_end(key)
        if len(self._absent) > _MAX_ABSENT:
            self._absent.popitem(last=False)

    def _back_off(self, error: KvoltError) -> None:
        log.warning("object store unreachable: retry_s=%g error=%s", _PAUSE_S, error.message)
        self._retry_at = self._now() + _PAUSE_S

    # --- reading and writing

    async def write(
        self, blocks: Sequence[TierBlock], checksums: Sequence[int], memory: SlotMemory, slots: Numbers
    ) -> None:
        keys = [block.key for block in blocks]
        self._writing.update(keys)
        try:
            for start in range(0, len(keys), _BATCH_BLOCKS):
                batch = slice(start, start + _BATCH_BLOCKS)
                replaced = self._corrupt.keys() & set(keys[batch])
                are_new, elapsed_s = await self._writers.run(
                    self._blocks.write, keys[batch], checksums[batch], memory, slots[batch], replaced
                )
                self._corrupt.forget(replaced)
                self._add_known(keys[batch])
                self.stats.record_stored(sum(are_new), elapsed_s)
        finally:
            self._writing.difference_update(keys)

    async def read(self, blocks: Sequence[TierBlock], memory: SlotMemory, slots: Numbers) -> list[int | None]:
        keys = [block.key for block in blocks]
        checksums: list[int | None] = []
        started_at = self._now()
        try:
            for start in range(0, len(keys), _BATCH_BLOCKS):
                batch = slice(start, start + _BATCH_BLOCKS)
                results, elapsed_s = await self._readers.run(
                    self._blocks.read, keys[batch], memory, slots[batch]
                )
                checksums += [
                    self._checksum_of(key, each) for key, each in zip(keys[batch], results, strict=True)
                ]
                self.stats.record_loaded(sum(each is not None for each in checksums[batch]), elapsed_s)
        except asyncio.CancelledError:
            if self._now() - started_at > _SLOW_READ_S:  # cancelled because of the delay
                self._retry_at = self._now() + _PAUSE_S
            raise
        except KvoltError as error:
            self._back_off(error)
            self.stats.failures["unread"] += len(keys) - len(checksums)
        return checksums + [None] * (len(keys) - len(checksums))

    def _checksum_of(self, key: BlockKey, result: ReadResult) -> int | None:
        if isinstance(result, int):
            self._add_known([key])
            return result
        self._add_absent(key)
        self.stats.failures["gone" if result is None else "corrupt"] += 1
        if result is not None:
            self._corrupt.add([key])
            log.error(
                "block corrupt, will be recomputed: tier=object key=%s reason=%s", key.hex(), result.reason
            )
        return None

    def forget(self, keys: Sequence[BlockKey] | None = None) -> int:
        if keys is None:
            self._absent.clear()
        return super().forget(keys)

    def check_integrity(self) -> None:
        assert not self._known.keys() & self._absent.keys(), "a block is both known and absent"


def _spread(start: int, end: int, max_count: int) -> list[int]:
    """At most `max_count` evenly spread indexes of [start, end), including `start`."""
    count = min(end - start, max_count)
    return [start + number * (end - start) // count for number in range(count)]
