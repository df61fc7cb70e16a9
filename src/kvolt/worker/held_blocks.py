"""Holdings: the set of blocks that a worker holds, derived from its KV events.

Kept beside the journal and not asked of the engine: an answer must stand at an event, and an engine that is asked
is between two. Bounded by what the engine holds, and by a bound of its own for one that forgets to tell what it
removed. Kept in the same index as a router's, so that both sides have the same digests at the same cost. Knows no
numbers of events and no router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvolt.core.kv_events import TIER_LEVEL, Cleared, KvChange, KvDigest, Removed, Stored, Tier
from kvolt.router.index.prefix_index import MIN_MAX_BYTES, BlockIndex

MAX_BLOCKS = 2_000_000

_BYTES_PER_BLOCK = 256
"""More than the index takes: nothing may go from it before the bound in blocks is seen to be reached."""


class Holdings:
    """See the module. Past its bound it forgets all and says so by `is_lost`, for good."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._index = BlockIndex(max(max_blocks * _BYTES_PER_BLOCK, MIN_MAX_BYTES))
        self._slots: dict[int, int] = {}
        """By rank."""
        self._shelves: dict[tuple[int, Tier], None] = {}
        """Ranks and tiers that ever held a block."""
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
                    self._shelves[dp_rank, tier] = None
                case Removed(hashes=hashes, tier=tier):
                    self._index.remove(slot, hashes, TIER_LEVEL[tier])
                case Cleared(tier=tier):
                    self._index.clear(slot, None if tier is None else TIER_LEVEL[tier])
        if self._index.num_pairs > self._max_blocks:
            self._lose()

    def digests(self, dp_rank: int | None = None) -> tuple[KvDigest, ...]:
        """Of every tier of one rank that ever held a block, or of all ranks."""
        return tuple(
            KvDigest(*self._index.digest(self._slots[rank], TIER_LEVEL[tier]), rank, tier)
            for rank, tier in self._shelves
            if dp_rank is None or rank == dp_rank
        )

    def contents(self) -> Iterator[tuple[int, Tier, list[int]]]:
        """Rank, tier and blocks."""
        for rank, tier in self._shelves:
            yield rank, tier, self._index.contents(self._slots[rank], TIER_LEVEL[tier])

    def _lose(self) -> None:
        self.is_lost = True
        self._index = BlockIndex(MIN_MAX_BYTES)
        self._slots.clear()
        self._shelves.clear()
