"""Blocks published per DP rank and tier, so that each is published once and can be counted. Pure.

An engine may hold one of kvolt's blocks under several names of its own: vLLM gives the blocks of a reloaded adapter new
names. Such a block is published once, and removed with its last name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier


class HeldBlocks:
    """See the module."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, Tier], Counter[int]] = {}
        """Number of engine names per block, by rank and tier."""

    @property
    def num_on_device(self) -> int:
        """Device blocks of all ranks."""
        return sum(len(names) for (_, tier), names in self._names.items() if tier is Tier.DEVICE)

    @property
    def num_blocks(self) -> int:
        """Blocks of all ranks and tiers."""
        return sum(map(len, self._names.values()))

    def num_of_rank(self, rank: int) -> int:
        """Blocks of one rank, in all tiers."""
        return sum(len(names) for (owner, _), names in self._names.items() if owner == rank)

    def on_device(self, rank: int) -> Collection[int]:
        """Sequence hashes of one rank's device blocks."""
        return self._names.get((rank, Tier.DEVICE), ())

    def clear(self) -> None:
        self._names.clear()

    def deduplicate(self, rank: int, changes: tuple[KvChange, ...]) -> tuple[KvChange, ...]:
        """The part of a rank's changes that was not published before."""
        return tuple(new for change in changes for new in self._new_changes(rank, change))

    def _new_changes(self, rank: int, change: KvChange) -> Iterator[KvChange]:
        match change:
            case Stored():
                yield from self._new_stored(change, self._names.setdefault((rank, change.tier), Counter()))
            case Removed():
                yield from self._new_removed(change, self._names.setdefault((rank, change.tier), Counter()))
            case Cleared():
                for key in [*self._names]:
                    if key[0] == rank and change.tier in (None, key[1]):
                        del self._names[key]
                yield change

    def _new_stored(self, change: Stored, names: Counter[int]) -> Iterator[Stored]:
        hashes = change.sequence_hashes
        are_new = [block not in names for block in hashes]
        names.update(hashes)
        if all(are_new):
            yield change
            return
        for index, is_new in enumerate(are_new):
            if is_new:
                parent = hashes[index - 1] if index else change.parent
                yield Stored.from_hashes(hashes[index : index + 1], parent, tier=change.tier)

    def _new_removed(self, change: Removed, names: Counter[int]) -> Iterator[Removed]:
        hashes = change.sequence_hashes
        names.subtract(hashes)
        removed = [block for block in hashes if names[block] <= 0]
        for block in removed:
            del names[block]
        if len(removed) == len(hashes):
            yield change
        elif removed:
            yield Removed.from_hashes(removed, change.tier)
