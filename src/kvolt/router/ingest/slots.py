"""InstanceSlots: index slots of one worker, one per rank; applies feed actions to them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kvolt.core.kv_events import HASHES_DTYPE, TIER_LEVEL, Cleared, KvDigest, KvEvent, Removed, Stored, Tier
from kvolt.router.index.prefix_index import BlockIndex
from kvolt.router.ingest.feed import Comparison, IngestStats


class InstanceSlots:
    """See the module. `close` releases the slots."""

    def __init__(self, index: BlockIndex, dp_ranks: Sequence[int], stats: IngestStats) -> None:
        """Raises ValueError if the index has no free slot."""
        self._index = index
        self._stats = stats
        self._by_rank: dict[int, int] = {}
        try:
            for dp_rank in dp_ranks:
                self._by_rank[dp_rank] = index.add_worker()
        except ValueError:
            self.close()
            raise

    def slot_of(self, dp_rank: int) -> int | None:
        return self._by_rank.get(dp_rank)

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(self._by_rank.values())

    def close(self) -> None:
        while self._by_rank:
            self._index.remove_worker(self._by_rank.popitem()[1])

    def apply(self, events: Sequence[KvEvent]) -> None:
        index = self._index
        for event in events:
            slot = self._by_rank.get(event.dp_rank)
            if slot is None:
                self._stats.num_unknown_ranks += 1
                continue
            change = event.change
            match change:
                case Stored():
                    self._stats.has_lower_tiers |= change.tier is not Tier.DEVICE
                    index.store(slot, change.hashes, TIER_LEVEL[change.tier])
                case Removed():
                    index.remove(slot, change.hashes, TIER_LEVEL[change.tier])
                case Cleared():
                    index.clear(slot, None if change.tier is None else TIER_LEVEL[change.tier])

    def clear(self) -> None:
        for slot in self._by_rank.values():
            self._index.clear(slot)

    def replace(self, blocks: Mapping[tuple[int, Tier], bytes]) -> None:
        for dp_rank, slot in self._by_rank.items():
            for tier, level in TIER_LEVEL.items():
                self._stats.has_lower_tiers |= tier is not Tier.DEVICE and bool(blocks.get((dp_rank, tier)))
                self._replace(slot, level, blocks.get((dp_rank, tier), b""))

    def _replace(self, slot: int, level: int, packed: bytes) -> None:
        index = self._index
        num_before, _ = index.digest(slot, level)
        if num_before and (not packed or index.num_evicted(slot, level)):
            index.clear(slot, level)
            num_before = 0
        if not num_before:
            if packed:
                index.store(slot, packed, level)
            return
        # Usually most blocks are indexed already: apply the difference only.
        before = np.array(index.contents(slot, level), dtype=HASHES_DTYPE)
        after = np.frombuffer(packed, dtype=HASHES_DTYPE)
        index.remove(slot, np.setdiff1d(before, after).tobytes(), level)
        index.store(slot, np.setdiff1d(after, before).tobytes(), level)

    def compare(self, digests: Sequence[KvDigest]) -> Comparison:
        for each in digests:
            slot = self._by_rank.get(each.dp_rank)
            if slot is None:
                continue
            level = TIER_LEVEL[each.tier]
            if self._index.digest(slot, level) != (each.num_blocks, each.digest):
                is_crowded = self._index.num_evicted(slot, level) > 0
                return Comparison.CROWDED if is_crowded else Comparison.DIFFER
        return Comparison.AGREE
