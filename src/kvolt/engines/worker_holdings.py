"""Holdings: which blocks a worker's engine holds, by the changes that it told.

Kept beside the journal and not asked of the engine: an answer must stand at an event, and an engine that is asked
is between two. Bounded by what the engine holds, and by a bound of its own for one that forgets to tell what it
removed. Knows no numbers of events and no router.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kvolt.core.kv_digest import EMPTY_DIGEST, digest_of
from kvolt.core.kv_events import Cleared, KvChange, KvDigest, Removed, Stored, Tier

MAX_BLOCKS = 2_000_000
"""About 200 MB of names."""


@dataclass(slots=True)
class _Shelf:
    """The blocks of one rank in one tier."""

    blocks: set[int] = field(default_factory=set)
    digest: int = EMPTY_DIGEST


class Holdings:
    """See the module. Past its bound it forgets all and says so by `is_lost`, for good."""

    def __init__(self, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._shelves: dict[tuple[int, Tier], _Shelf] = {}
        self.num_blocks = 0
        self.is_lost = False

    def apply(self, changes: Iterable[KvChange], dp_rank: int) -> None:
        if self.is_lost:
            return
        for change in changes:
            match change:
                case Stored():
                    self._store(self._shelf(dp_rank, change.tier), change.sequence_hashes)
                case Removed():
                    self._remove(self._shelf(dp_rank, change.tier), change.sequence_hashes)
                case Cleared():
                    self._clear(dp_rank, change.tier)
        if self.num_blocks > self._max_blocks:
            self.is_lost = True
            self._shelves.clear()
            self.num_blocks = 0

    def digests(self, dp_rank: int | None = None) -> tuple[KvDigest, ...]:
        """Of every tier of one rank that ever held a block, or of all ranks."""
        return tuple(
            KvDigest(len(shelf.blocks), shelf.digest, rank, tier)
            for (rank, tier), shelf in self._shelves.items()
            if dp_rank is None or rank == dp_rank
        )

    def contents(self) -> Iterator[tuple[int, Tier, set[int]]]:
        """Rank, tier and blocks, the own sets: to be read at once."""
        for (dp_rank, tier), shelf in self._shelves.items():
            yield dp_rank, tier, shelf.blocks

    def _shelf(self, dp_rank: int, tier: Tier) -> _Shelf:
        return self._shelves.setdefault((dp_rank, tier), _Shelf())

    def _store(self, shelf: _Shelf, hashes: tuple[int, ...]) -> None:
        before = len(shelf.blocks)
        # Nearly always all of them are new. Those that are not must not be in the digest twice.
        new = (
            hashes
            if shelf.blocks.isdisjoint(hashes)
            else [each for each in hashes if each not in shelf.blocks]
        )
        shelf.blocks.update(new)
        num_new = len(shelf.blocks) - before
        shelf.digest ^= digest_of(new if num_new == len(new) else dict.fromkeys(new))
        self.num_blocks += num_new

    def _remove(self, shelf: _Shelf, hashes: tuple[int, ...]) -> None:
        gone = dict.fromkeys(each for each in hashes if each in shelf.blocks)
        shelf.blocks.difference_update(gone)
        shelf.digest ^= digest_of(gone)
        self.num_blocks -= len(gone)

    def _clear(self, dp_rank: int, tier: Tier | None) -> None:
        for (rank, shelf_tier), shelf in self._shelves.items():
            if rank == dp_rank and tier in (None, shelf_tier):
                self.num_blocks -= len(shelf.blocks)
                shelf.blocks = set()
                shelf.digest = EMPTY_DIGEST
