"""A pool's books held against themselves. For tests, and for an engine at rest.

Part of `pool`, whose inside it looks at block by block; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvolt.core.ids import SequenceHash
from kvolt.kv.lifecycle import BlockId, BlockState
from kvolt.kv.names import BlockName
from kvolt.kv.run import Run

if TYPE_CHECKING:
    from kvolt.kv.pool import BlockPool

_NAMELESS = (BlockState.FREE, BlockState.WRITING)


@dataclass
class Block:
    """What its run says of one block."""

    id: BlockId
    state: BlockState
    num_holders: int
    name: BlockName | None
    parent: BlockName | None
    position: int


def check_pool(pool: BlockPool) -> None:
    """AssertionError, with the story, where the pool contradicts itself or its rules were broken."""
    blocks = {block.id: block for run in pool.runs() for block in blocks_of(run)}
    _check_runs(pool)
    counts: Counter[SequenceHash] = Counter()
    duplicates: Counter[bytes] = Counter()
    for block in blocks.values():
        if block.name is None:
            continue
        known = pool._by_key.get(block.name.key)
        assert known is not None, f"{block} has a name, and nobody finds it"
        if block.state is BlockState.DUPLICATE:
            duplicates[block.name.key] += 1
            assert block.id in pool._duplicates.get(block.name.key, ()), f"{block} is no duplicate of {known}"
            assert blocks[known].state is BlockState.REGISTERED, f"{block} should have the name of {known}"
            continue
        assert known == block.id, f"{block} has a name that leads to {known}"
        counts[block.name.sequence_hash] += 1
        if block.parent is not None:
            _check_parent(pool, blocks, block, block.parent)
    oldest_first = [block_id for run in pool._inactive for block_id in reversed(run.ids)]
    ages = {block_id: age for age, block_id in enumerate(oldest_first)}
    for block_id, age in ages.items():
        parent = blocks[block_id].parent
        above = None if parent is None else pool._by_key.get(parent.key)
        assert above not in ages or age < ages[above], f"{above} would be evicted before {block_id} below"
    assert len(pool._by_key) == counts.total(), "a key leads to a block without it"
    assert duplicates == {key: len(ids) for key, ids in pool._duplicates.items()}, f"lost: {pool._duplicates}"
    counts = counts if pool._tells_changes else Counter()
    assert counts == pool._hashes.counts(), f"{counts} are here, {pool._hashes.counts()} are counted"


def blocks_of(run: Run) -> Iterator[Block]:
    for index, block_id in enumerate(run.ids):
        parent = run.name_at(index - 1) if index else run.parent
        yield Block(block_id, run.state, run.num_holders, run.name_at(index), parent, run.position + index)


def _check_runs(pool: BlockPool) -> None:
    free = set(pool._free)
    assert len(free) == len(pool._free), f"a block is free twice: {pool._free}"
    for block_id, run in enumerate(pool._run_of):
        assert (run is None) == (block_id in free), f"block {block_id} is free, and in {run}"
        assert run is None or run.ids.count(BlockId(block_id)) == 1, f"block {block_id} is not in {run}"
    inactive = list(pool._inactive)
    runs = list(pool.runs())
    assert sum(len(run.ids) for run in runs) + len(free) == len(pool._run_of), "a block is in two runs"
    assert sum(len(run.ids) for run in inactive) == pool._inactive.num_blocks, (
        "inactive blocks are miscounted"
    )
    assert {run for run in runs if run.state is BlockState.INACTIVE} == set(inactive), "a run is lost"
    for run in runs:
        assert run.state is not BlockState.FREE, f"{run} is free"
        assert (run.num_holders > 0) == run.state.is_held, f"wrong holders: {run}"
        assert len(run.names) == (0 if run.state in _NAMELESS else len(run.ids)), f"wrong names: {run}"
        has_twins = any(key in pool._duplicates for key in run.names.keys)
        assert not has_twins or len(run.ids) == 1, f"{run} has duplicates, and is not alone"


def _check_parent(pool: BlockPool, blocks: dict[BlockId, Block], block: Block, name: BlockName) -> None:
    parent_id = pool._by_key.get(name.key)
    assert parent_id is not None, f"the parent is gone before its child: {block}"
    parent = blocks[parent_id]
    assert block.position == parent.position + 1, f"{block} follows {parent}"
    if block.state is BlockState.REGISTERED:
        assert parent.state is BlockState.REGISTERED, f"held below a block that is not: {block}, {parent}"
