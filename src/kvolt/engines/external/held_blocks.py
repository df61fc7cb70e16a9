"""HeldBlocks: the blocks that each rank has told of, so that none is told twice and all of them can be counted.

An engine may hold a block of ours under several names of its own: to vLLM those of an adapter that was unloaded and
loaded again are new, and to routers the same. Such a block is told once, and gone with the last of them. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier


class HeldBlocks:
    """See the module."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Tier], Counter[int]] = {}
        """How many names of the engine's each block has, of each rank and tier."""

    @property
    def num_on_device(self) -> int:
        """Of all ranks."""
        return sum(len(names) for (_, tier), names in self._names.items() if tier is Tier.DEVICE)

    @property
    def num_blocks(self) -> int:
        """Of all ranks, in each tier."""
        return sum(map(len, self._names.values()))

    def num_of(self, rank: int) -> int:
        """Of one rank, in each tier."""
        return sum(len(names) for (owner, _), names in self._names.items() if owner == rank)

    def on_device(self, rank: int) -> Collection[int]:
        """Of one rank, by their SequenceHashes."""
        return self._names.get((rank, Tier.DEVICE), ())

    def clear(self) -> None:
        self._names.clear()

    def once(self, rank: int, changes: tuple[KvChange, ...]) -> tuple[KvChange, ...]:
        """Of what a rank tells, that which is news."""
        return tuple(news for change in changes for news in self._news(rank, change))

    def _news(self, rank: int, change: KvChange) -> Iterator[KvChange]:
        match change:
            case Stored():
                yield from self._stored(change, self._names.setdefault((rank, change.tier), Counter()))
            case Removed():
                yield from self._removed(change, self._names.setdefault((rank, change.tier), Counter()))
            case Cleared():
                for key in [*self._names]:
                    if key[0] == rank and change.tier in (None, key[1]):
                        del self._names[key]
                yield change

    def _stored(self, change: Stored, names: Counter[int]) -> Iterator[Stored]:
        hashes = change.sequence_hashes
        are_new = [block not in names for block in hashes]
        names.update(hashes)
        if all(are_new):
            yield change
            return
        for index, is_new in enumerate(are_new):
            if is_new:
                parent = hashes[index - 1] if index else change.parent
                yield Stored.of(hashes[index : index + 1], parent, tier=change.tier)

    def _removed(self, change: Removed, names: Counter[int]) -> Iterator[Removed]:
        hashes = change.sequence_hashes
        names.subtract(hashes)
        gone = [block for block in hashes if names[block] <= 0]
        for block in gone:
            del names[block]
        if len(gone) == len(hashes):
            yield change
        elif gone:
            yield Removed.of(gone, change.tier)
