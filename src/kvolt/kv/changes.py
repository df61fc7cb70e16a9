"""ChangeLog: changes of a pool since they were last taken, in the form of KV events.

Consecutive blocks of a chain are merged into one Stored, consecutive removals into one Removed. Knows no pool and no
event ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.kv.names import BlockNames

Change = Stored | Removed | Cleared


class ChangeLog:
    """See the module. Holds at most `limit` blocks; beyond that it drops all changes and sets `is_lost`."""

    __slots__ = (
        "_changes",
        "_num_blocks",
        "_parent",
        "_position",
        "_removed",
        "_stored",
        "_tier",
        "is_lost",
        "limit",
        "published",
    )

    def __init__(self, limit: int, tier: Tier = Tier.DEVICE) -> None:
        self.limit = limit
        self._tier = tier
        self._parent: SequenceHash | None = None
        self._position = 0
        self.published = PublishedHashes()
        self._reset()

    def store_run(self, names: BlockNames, parent: SequenceHash | None, position: int) -> None:
        """Record stored consecutive blocks; `parent` and `position` of the first."""
        self.published.add_all(names.sequence_hashes)
        if not self._is_full(len(names)):
            self._append(names, parent, position)

    def _append(self, names: BlockNames, parent: SequenceHash | None, position: int) -> None:
        if not (self._stored and parent == self._stored[-1]):
            self._close()
            self._parent, self._position = parent, position
        self._stored += names.sequence_hashes

    def remove_run(self, hashes: Sequence[SequenceHash]) -> None:
        hashes = self.published.remove_all(hashes)
        if not hashes or self._is_full(len(hashes)):
            return
        if self._stored:
            self._close()
        self._removed += hashes

    def clear(self) -> None:
        """Record that the pool was cleared, which supersedes earlier changes."""
        self.published.clear()
        self._reset()
        self._changes.append(Cleared(self._tier))

    def take(self) -> tuple[Change, ...]:
        """Return and reset all changes, in order."""
        self._close()
        changes = tuple(self._changes)
        self._reset()
        return changes

    def complete(self, runs: Iterable[tuple[BlockNames, SequenceHash | None, int]]) -> tuple[Change, ...]:
        """These runs as changes, all of them: the complete contents."""
        for run in runs:
            self._append(*run)
        return self.take()

    def _reset(self) -> None:
        self._changes: list[Change] = []
        self._num_blocks = 0
        self._stored: list[SequenceHash] = []  # open run; this or `_removed` is empty
        self._removed: list[SequenceHash] = []
        self.is_lost = False

    def _is_full(self, num_blocks: int) -> bool:
        self._num_blocks += num_blocks
        if self._num_blocks > self.limit and not self.is_lost:
            self._reset()
            self.is_lost = True
        return self.is_lost

    def _close(self) -> None:
        if self._stored:
            self._changes.append(Stored.from_hashes(self._stored, self._parent, self._position, self._tier))
            self._stored = []
        if self._removed:
            self._changes.append(Removed.from_hashes(self._removed, self._tier))
            self._removed = []


class PublishedHashes:
    """Published hashes with the number of names that have each.

    Events identify blocks by 64-bit hashes: two names with the same hash are one block there, removed with the second.
    Such collisions are rare.
    """

    __slots__ = ("_known", "_num_extra")

    def __init__(self) -> None:
        self._known: set[SequenceHash] = set()
        self._num_extra: Counter[SequenceHash] = Counter()

    def add_all(self, hashes: Sequence[SequenceHash]) -> None:
        known = self._known
        if known.isdisjoint(hashes):
            num_all = len(known) + len(hashes)
            known.update(hashes)
            if len(known) == num_all:
                return
            known.difference_update(hashes)  # some occur twice
        for each in hashes:
            if each in known:
                self._num_extra[each] += 1
            known.add(each)

    def remove_all(self, hashes: Sequence[SequenceHash]) -> Sequence[SequenceHash]:
        """Remove one occurrence of each; return the hashes that no name has any more."""
        if not self._num_extra:
            self._known.difference_update(hashes)
            return hashes
        removed: list[SequenceHash] = []
        for each in hashes:
            if each not in self._num_extra:
                self._known.remove(each)
                removed.append(each)
                continue
            self._num_extra[each] -= 1
            if not self._num_extra[each]:
                del self._num_extra[each]
        return removed

    def clear(self) -> None:
        self._known.clear()
        self._num_extra.clear()

    def counts(self) -> Counter[SequenceHash]:
        return Counter(self._known) + self._num_extra
