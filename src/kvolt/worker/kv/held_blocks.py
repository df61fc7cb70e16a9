"""Blocks that a worker holds, derived from its KV events.

Derived from events and not queried from the engine, so that a snapshot is exact as of an event number. Uses the same
index as routers, so that digests are equal. Bounded, for engines that publish no removals.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvolt.core.kv_events import TIER_LEVEL, Cleared, KvChange, KvDigest, Removed, Stored, Tier
from kvolt.router.index.prefix_index import MIN_MAX_BYTES, BlockIndex

MAX_BLOCKS = 2_000_000

_BYTES_PER_BLOCK = 256
"""More than the index needs: the bound in blocks must be reached before the index evicts."""


class HeldBlocks:
    """See the module. Above its bound it drops everything and sets `is_lost`, permanently."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._index = BlockIndex(max(max_blocks * _BYTES_PER_BLOCK, MIN_MAX_BYTES))
        self._slots: dict[int, int] = {}
        """Index slot per DP rank."""
        self._rank_tiers: dict[tuple[int, Tier], None] = {}
        """DP ranks and tiers that have held a block, in order of their first one."""
        self.is_lost = False

    @property
    def num_blocks(self) -> int:
        return self._index.num_pairs

    def apply(self, changes: Iterable[KvChange], dp_rank: int) -> None:
        if self.is_lost:
            return
        slot = self._slots.get(dp_rank)
        if slot is None:
            slot = self._slots[dp_rank] = self._index.add_worker()
        for change in changes:
            match change:
                case Stored(hashes=hashes, tier=tier):
                    self._index.store(slot, hashes, TIER_LEVEL[tier])
                    self._rank_tiers[dp_rank, tier] = None
                case Removed(hashes=hashes, tier=tier):
                    self._index.remove(slot, hashes, TIER_LEVEL[tier])
                case Cleared(tier=tier):
                    self._index.clear(slot, None if tier is None else TIER_LEVEL[tier])
        if self._index.num_pairs > self._max_blocks:
            self._lose()

    def digests(self, dp_rank: int | None = None) -> tuple[KvDigest, ...]:
        """Digests per tier of one DP rank, or of all ranks."""
        return tuple(
            KvDigest(*self._index.digest(self._slots[rank], TIER_LEVEL[tier]), rank, tier)
            for rank, tier in self._rank_tiers
            if dp_rank is None or rank == dp_rank
        )

    def contents(self) -> Iterator[tuple[int, Tier, list[int]]]:
        """DP rank, tier and block hashes."""
        for rank, tier in self._rank_tiers:
            yield rank, tier, self._index.contents(self._slots[rank], TIER_LEVEL[tier])

    def _lose(self) -> None:
        self.is_lost = True
        self._index = BlockIndex(MIN_MAX_BYTES)
        self._slots.clear()
        self._rank_tiers.clear()
