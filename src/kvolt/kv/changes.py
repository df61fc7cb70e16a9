"""The changes of a pool since they were last taken, as KV events tell them.

Owns how changes are put together: blocks stored one after the other down a chain are one Stored, blocks removed
one after the other one Removed. Knows no pool and no event ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, Removed, Stored, StoredBlock, Tier
from kvolt.kv.lifecycle import BlockName

Change = Stored | Removed | Cleared


class ChangeLog:
    """See the module. Holds `limit` blocks at most: past that it forgets all, and says so by `is_lost`."""

    __slots__ = (
        "_changes",
        "_limit",
        "_num_blocks",
        "_parent",
        "_position",
        "_removed",
        "_stored",
        "is_lost",
    )

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parent: SequenceHash | None = None
        self._position = 0
        self._reset()

    def store(self, name: BlockName, parent: SequenceHash | None, position: int) -> None:
        self.store_run((name,), parent, position)

    def store_run(self, names: Sequence[BlockName], parent: SequenceHash | None, position: int) -> None:
        """Blocks one below the other; `parent` and `position` are of the first."""
        if self._is_full(len(names)):
            return
        if not (self._stored and parent == self._stored[-1].sequence_hash):
            self._close()
            self._parent, self._position = parent, position
        self._stored += [StoredBlock(name.sequence_hash, name.local_hash) for name in names]

    def remove_run(self, hashes: Sequence[SequenceHash]) -> None:
        if not hashes or self._is_full(len(hashes)):
            return
        if self._stored:
            self._close()
        self._removed += hashes

    def clear(self) -> None:
        """What came before no longer matters."""
        self._reset()
        self._changes.append(Cleared(Tier.DEVICE))

    def take(self) -> tuple[Change, ...]:
        """All changes in order, once."""
        self._close()
        changes = tuple(self._changes)
        self._reset()
        return changes

    def _reset(self) -> None:
        self._changes: list[Change] = []
        self._num_blocks = 0
        self._stored: list[StoredBlock] = []  # the open run; it or the next is empty
        self._removed: list[SequenceHash] = []
        self.is_lost = False

    def _is_full(self, num_more: int) -> bool:
        self._num_blocks += num_more
        if self._num_blocks > self._limit and not self.is_lost:
            self._reset()
            self.is_lost = True
        return self.is_lost

    def _close(self) -> None:
        if self._stored:
            self._changes.append(Stored(tuple(self._stored), self._parent, self._position))
            self._stored = []
        if self._removed:
            self._changes.append(Removed(tuple(self._removed)))
            self._removed = []
