"""Run: consecutive blocks of a chain with equal state and holders; RunQueue: runs in order of release.

A holder of a block holds all blocks before it, so long stretches of a chain have equal holders and state. A pool keeps
state per run instead of per block.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.core.kv_events import Stored
from kvolt.kv.lifecycle import BlockId, BlockMove, BlockState, next_state
from kvolt.kv.names import BlockName, BlockNames


@dataclass(slots=True, eq=False)
class Run:
    """See the module. Has at least one block."""

    ids: list[BlockId]
    state: BlockState
    num_holders: int
    names: BlockNames = field(default_factory=BlockNames)
    """Names of all its blocks, or empty."""
    parent: BlockName | None = None
    """Name of the preceding block; not its id, since the name may move to another block."""
    position: int = 0
    """Position of its first block in the sequence, if named."""
    older: Run | None = None
    newer: Run | None = None
    """Neighbors in the RunQueue."""

    def move(self, move: BlockMove) -> None:
        self.state = next_state(self.ids[0], self.state, move)

    def index_of(self, block: BlockId) -> int:
        return len(self.ids) - 1 if self.ids[-1] == block else self.ids.index(block)  # usually the last

    def name_at(self, index: int) -> BlockName | None:
        return self.names[index] if self.names else None

    def split_off(self, start: int) -> Run:
        """Split off the blocks from `start` > 0 on into a run with equal state."""
        ids = self.ids[start:]
        del self.ids[start:]
        if not self.names:
            return Run(ids, self.state, self.num_holders)
        parent = self.names[start - 1]
        names = self.names.split_off(start)
        return Run(ids, self.state, self.num_holders, names, parent, self.position + start)

    def join(self, next_run: Run) -> None:
        """Append the blocks of the following run, which has equal state."""
        self.ids += next_run.ids
        self.names.extend(next_run.names)

    def forget(self) -> None:
        self.names, self.parent = BlockNames(), None


class RunQueue:
    """Runs in order of release. A linked list, since any run may be removed or split."""

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

    def pop_blocks(self, max_blocks: int) -> tuple[list[BlockId], list[BlockKey], list[SequenceHash]]:
        """Remove up to `max_blocks` blocks from the end of the oldest run; return ids, keys and hashes. Must not be
        empty."""
        run = self._end.newer
        assert run is not None
        next_state(run.ids[0], run.state, BlockMove.EVICT)
        ids, names = run.ids, run.names
        if len(ids) <= max_blocks:
            self.remove(run)
            return ids, names.keys, names.sequence_hashes
        self.num_blocks -= max_blocks
        start = len(ids) - max_blocks
        removed = ids[start:], names.keys[start:], names.sequence_hashes[start:]
        del ids[start:], names.keys[start:], names.sequence_hashes[start:]
        return removed

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

    def split_off(self, start: int, run: Run) -> Run:
        """Split a queued run; both parts stay queued and the end is evicted first."""
        end = run.split_off(start)
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


def chains(runs: Iterable[Run], indexed: Container[BlockKey]) -> list[Stored]:
    """Named blocks of these runs as chains, parents first; `indexed`: keys of all named blocks."""
    children: dict[BlockKey | None, list[Run]] = {}
    for run in runs:
        if run.state in (BlockState.REGISTERED, BlockState.INACTIVE):
            has_parent = run.parent is not None and run.parent.key in indexed
            children.setdefault(run.parent.key if run.parent and has_parent else None, []).append(run)
    stored: list[Stored] = []
    heads = children.pop(None, [])[::-1]
    while heads:
        head = run = heads.pop()
        names = BlockNames()
        while True:
            names.extend(run.names)
            for key in run.names.keys[:-1]:
                heads += children.get(key, ())
            below = children.get(run.names.keys[-1])
            if not below:
                break
            heads += below[:0:-1]
            run = below[0]
        parent = head.parent.sequence_hash if head.parent else None
        stored.append(Stored.from_hashes(names.sequence_hashes, parent, head.position))
    return stored


def common_prefix_len(one: list[BlockId], other: list[BlockId]) -> int:
    """Length of the common prefix."""
    count = min(len(one), len(other))
    if one[:count] == other[:count]:
        return count
    return next(index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
