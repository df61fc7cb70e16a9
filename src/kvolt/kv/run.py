"""Run: blocks one below the other that live the same life, and the order in which runs were let go.

Whoever holds a block holds all before it, so that long stretches of a chain have the same holders and the same state:
a pool keeps its books of those, and not of each block. Knows no pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.lifecycle import BlockId, BlockMove, BlockState, next_state
from kvolt.kv.names import BlockName, Names


@dataclass(slots=True, eq=False)
class Run:
    """See the module. It has at least one block."""

    ids: list[BlockId]
    state: BlockState
    num_holders: int
    names: Names = field(default_factory=Names)
    """Of its blocks, or of none."""
    parent: BlockName | None = None
    """Name of the block before it. A name and not a block: the name may pass on to another one."""
    position: int = 0
    """Of its first block in the sequence, where it has names."""
    older: Run | None = None
    newer: Run | None = None
    """Its neighbours in a RunQueue, and itself where it has none."""

    def move(self, move: BlockMove) -> None:
        self.state = next_state(self.ids[0], self.state, move)

    def index_of(self, block: BlockId) -> int:
        return len(self.ids) - 1 if self.ids[-1] == block else self.ids.index(block)  # mostly it is the last

    def name_at(self, index: int) -> BlockName | None:
        return self.names[index] if self.names else None

    def cut(self, start: int) -> Run:
        """Take away the blocks from `start` on, which may not be the first; the two are alike in all else."""
        ids = self.ids[start:]
        del self.ids[start:]
        if not self.names:
            return Run(ids, self.state, self.num_holders)
        parent = self.names[start - 1]
        names = self.names.cut(start)
        return Run(ids, self.state, self.num_holders, names, parent, self.position + start)

    def join(self, below: Run) -> None:
        """Take the blocks of a run that begins where this one ends, and is its like."""
        self.ids += below.ids
        self.names.extend(below.names)

    def forget(self) -> None:
        self.names, self.parent = Names(), None


class RunQueue:
    """Runs in the order in which they were let go. A linked list: any of them may leave, or be cut in two."""

    def __init__(self) -> None:
        self._end = Run([], BlockState.FREE, 0)
        self.num_blocks = 0
        self.clear()

    def __iter__(self) -> Iterator[Run]:
        """Oldest first."""
        run = self._end.newer
        while run is not self._end:
            assert run is not None
            yield run
            run = run.newer

    def take(self, at_most: int) -> tuple[list[BlockId], list[BlockKey], list[SequenceHash]]:
        """Evict the oldest blocks of one run, from its end on; them, their keys and hashes. There must be one."""
        run = self._end.newer
        assert run is not None
        next_state(run.ids[0], run.state, BlockMove.EVICT)
        ids, names = run.ids, run.names
        if len(ids) <= at_most:
            self.remove(run)
            return ids, names.keys, names.sequence_hashes
        self.num_blocks -= at_most
        start = len(ids) - at_most
        taken = ids[start:], names.keys[start:], names.sequence_hashes[start:]
        del ids[start:], names.keys[start:], names.sequence_hashes[start:]
        return taken

    def append(self, run: Run) -> None:
        assert self._end.older is not None
        self._link(self._end.older, run)
        self.num_blocks += len(run.ids)

    def remove(self, run: Run) -> None:
        assert run.older is not None
        assert run.newer is not None
        run.older.newer, run.newer.older = run.newer, run.older
        run.older = run.newer = None
        self.num_blocks -= len(run.ids)

    def cut(self, start: int, run: Run) -> Run:
        """`run.cut` of one that is here: both parts are, and the end is to go first."""
        end = run.cut(start)
        assert run.older is not None
        self._link(run.older, end)
        return end

    def clear(self) -> None:
        self._end.older = self._end.newer = self._end
        self.num_blocks = 0

    def _link(self, older: Run, run: Run) -> None:
        """Put `run` after `older`."""
        newer = older.newer
        assert newer is not None
        run.older, run.newer = older, newer
        older.newer = newer.older = run
