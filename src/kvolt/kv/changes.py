"""The changes of a pool since they were last taken, as KV events tell them.

Owns how changes are put together: blocks stored one after the other down a chain are one Stored, blocks removed
one after the other one Removed. Knows no pool and no event ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.kv.names import Names

Change = Stored | Removed | Cleared


class ChangeLog:
    """See the module. Holds `limit` blocks at most: past that it forgets all, and says so by `is_lost`."""

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
    )

    def __init__(self, limit: int, tier: Tier = Tier.DEVICE) -> None:
        self.limit = limit
        self._tier = tier
        self._parent: SequenceHash | None = None
        self._position = 0
        self._reset()

    def store_run(self, names: Names, parent: SequenceHash | None, position: int) -> None:
        """Blocks one below the other; `parent` and `position` are of the first."""
        if self._is_full(len(names)):
            return
        if not (self._stored and parent == self._stored[-1]):
            self._close()
            self._parent, self._position = parent, position
        self._stored += names.sequence_hashes

    def remove_run(self, hashes: Sequence[SequenceHash]) -> None:
        if not hashes or self._is_full(len(hashes)):
            return
        if self._stored:
            self._close()
        self._removed += hashes

    def clear(self) -> None:
        """What came before no longer matters."""
        self._reset()
        self._changes.append(Cleared(self._tier))

    def take(self) -> tuple[Change, ...]:
        """All changes in order, once."""
        self._close()
        changes = tuple(self._changes)
        self._reset()
        return changes

    def _reset(self) -> None:
        self._changes: list[Change] = []
        self._num_blocks = 0
        self._stored: list[SequenceHash] = []  # the open run; it or the next is empty
        self._removed: list[SequenceHash] = []
        self.is_lost = False

    def _is_full(self, num_more: int) -> bool:
        self._num_blocks += num_more
        if self._num_blocks > self.limit and not self.is_lost:
            self._reset()
            self.is_lost = True
        return self.is_lost

    def _close(self) -> None:
        if self._stored:
            self._changes.append(Stored.of(self._stored, self._parent, self._position, self._tier))
            self._stored = []
        if self._removed:
            self._changes.append(Removed.of(self._removed, self._tier))
            self._removed = []


class ToldHashes:
    """The hashes that were told of, each as often as a name has it.

    Events know blocks by 64 bits: two names that share them are one block there, gone with the second. Few ever do.
    """

    __slots__ = ("_known", "_num_more")

    def __init__(self) -> None:
        self._known: set[SequenceHash] = set()
        self._num_more: Counter[SequenceHash] = Counter()

    def add_all(self, hashes: Sequence[SequenceHash]) -> None:
        known = self._known
        if known.isdisjoint(hashes):
            num_all = len(known) + len(hashes)
            known.update(hashes)
            if len(known) == num_all:
                return
            known.difference_update(hashes)  # one of them is there twice
        for each in hashes:
            if each in known:
                self._num_more[each] += 1
            known.add(each)

    def remove_all(self, hashes: Sequence[SequenceHash]) -> Sequence[SequenceHash]:
        """Those of them that no name has any more."""
        if not self._num_more:
            self._known.difference_update(hashes)
            return hashes
        gone: list[SequenceHash] = []
        for each in hashes:
            if each not in self._num_more:
                self._known.remove(each)
                gone.append(each)
                continue
            self._num_more[each] -= 1
            if not self._num_more[each]:
                del self._num_more[each]
        return gone

    def clear(self) -> None:
        self._known.clear()
        self._num_more.clear()

    def counts(self) -> Counter[SequenceHash]:
        return Counter(self._known) + self._num_more
