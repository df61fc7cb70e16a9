"""Consistency check of a BlockPool, block by block. For tests and idle engines. Reads the pool's private state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from kvolt.core.ids import SequenceHash
from kvolt.kv.lifecycle import BlockId, BlockState
from kvolt.kv.names import BlockName
from kvolt.kv.pool import BlockPool
from kvolt.kv.run import Run

_NAMELESS = (BlockState.FREE, BlockState.WRITING)


@dataclass
class Block:
    """One block of a run."""

    id: BlockId
    state: BlockState
    num_holders: int
    name: BlockName | None
    parent: BlockName | None
    position: int


def check_pool(pool: BlockPool) -> None:
    """AssertionError if the pool is inconsistent or a rule of its chains is violated."""
    blocks = {block.id: block for run in pool.runs() for block in blocks_of(run)}
    _check_runs(pool)
    counts: Counter[SequenceHash] = Counter()
    duplicates: Counter[bytes] = Counter()
    for block in blocks.values():
        if block.name is None:
            continue
        known = pool._by_key.get(block.name.key)
        assert known is not None, f"{block} has a name but is not indexed"
        if block.state is BlockState.DUPLICATE:
            duplicates[block.name.key] += 1
            is_listed = block.id in pool._duplicates.get(block.name.key, ())
            assert is_listed, f"{block} is not listed as a duplicate of {known}"
            assert blocks[known].state is BlockState.REGISTERED, f"{block} should have the name of {known}"
            continue
        assert known == block.id, f"the name of {block} is indexed as {known}"
        counts[block.name.sequence_hash] += 1
        if block.parent is not None:
            _check_parent(pool, blocks, block, block.parent)
    oldest_first = [block_id for run in pool._inactive for block_id in reversed(run.ids)]
    ages = {block_id: age for age, block_id in enumerate(oldest_first)}
    for block_id, age in ages.items():
        parent = blocks[block_id].parent
        above = None if parent is None else pool._by_key.get(parent.key)
        is_after = above not in ages or age < ages[above]
        assert is_after, f"parent {above} would be evicted before its child {block_id}"
    assert len(pool._by_key) == counts.total(), "a key is indexed for a block without it"
    assert duplicates == {key: len(ids) for key, ids in pool._duplicates.items()}, "duplicates are miscounted"
    counts = counts if pool._publishes_changes else Counter()
    assert counts == pool._log.published.counts(), (
        f"hashes: {counts} present, {pool._log.published.counts()} counted"
    )


def blocks_of(run: Run) -> Iterator[Block]:
    for index, block_id in enumerate(run.ids):
        parent = run.name_at(index - 1) if index else run.parent
        yield Block(block_id, run.state, run.num_holders, run.name_at(index), parent, run.position + index)


def _check_runs(pool: BlockPool) -> None:
    free = set(pool._free)
    assert len(free) == len(pool._free), f"duplicate free block: {pool._free}"
    for block_id, run in enumerate(pool._run_of):
        assert (run is None) == (block_id in free), f"block {block_id} is free and in {run}"
        assert run is None or run.ids.count(BlockId(block_id)) == 1, f"block {block_id} is not in {run}"
    inactive = list(pool._inactive)
    runs = list(pool.runs())
    assert sum(len(run.ids) for run in runs) + len(free) == len(pool._run_of), "a block is in two runs"
    assert sum(len(run.ids) for run in inactive) == pool._inactive.num_blocks, (
        "inactive blocks are miscounted"
    )
    assert {run for run in runs if run.state is BlockState.INACTIVE} == set(inactive), (
        "an inactive run is not queued"
    )
    for run in runs:
        assert run.state is not BlockState.FREE, f"{run} is free"
        assert (run.num_holders > 0) == run.state.is_held, f"wrong holders: {run}"
        assert len(run.names) == (0 if run.state in _NAMELESS else len(run.ids)), f"wrong names: {run}"
        has_duplicates = any(key in pool._duplicates for key in run.names.keys)
        assert not has_duplicates or len(run.ids) == 1, f"{run} has duplicates but several blocks"


def _check_parent(pool: BlockPool, blocks: dict[BlockId, Block], block: Block, name: BlockName) -> None:
    parent_id = pool._by_key.get(name.key)
    assert parent_id is not None, f"the parent was evicted before its child: {block}"
    parent = blocks[parent_id]
    assert block.position == parent.position + 1, f"{block} follows {parent}"
    if block.state is BlockState.REGISTERED:
        assert parent.state is BlockState.REGISTERED, (
            f"held block with a parent that is not held: {block}, {parent}"
        )
