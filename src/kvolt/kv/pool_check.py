"""A pool's books held against themselves. For tests, and for an engine at rest.

Part of `pool`, whose inside it looks at; changes nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvolt.core.ids import SequenceHash
from kvolt.kv.lifecycle import BlockState

if TYPE_CHECKING:
    from kvolt.kv.pool import Block, BlockPool


def check_pool(pool: BlockPool) -> None:
    """AssertionError, with the story, where the pool contradicts itself or its rules were broken."""
    free, inactive = set(pool._free), set(pool._inactive)
    assert len(free) == len(pool._free), f"a block is free twice: {pool._free}"
    hashes: dict[SequenceHash, int] = {}
    num_duplicates = 0
    for block in pool._blocks:
        assert (block.num_holders > 0) == block.state.is_held, _story(pool, block)
        assert (block.id in free) == (block.state is BlockState.FREE), _story(pool, block)
        assert (block.id in inactive) == (block.state is BlockState.INACTIVE), _story(pool, block)
        assert (block.name is None) == (block.state in (BlockState.FREE, BlockState.WRITING)), _story(
            pool, block
        )
        if block.name is None:
            continue
        if block.state is BlockState.DUPLICATE:
            num_duplicates += 1
            assert block.id in pool._duplicates.get(block.name.key, ()), _story(pool, block)
            known = pool._by_key.get(block.name.key)
            assert known is not None, _story(pool, block)
            assert pool._blocks[known].state is BlockState.REGISTERED, _story(pool, block)
            continue
        assert pool._by_key.get(block.name.key) == block.id, _story(pool, block)
        hashes[block.name.sequence_hash] = hashes.get(block.name.sequence_hash, 0) + 1
        if block.parent is not None:
            _check_parent(pool, block)
    ages = {block_id: age for age, block_id in enumerate(pool._inactive)}
    for block_id, age in ages.items():
        parent = pool._blocks[block_id].parent
        above = None if parent is None else pool._by_key.get(parent.key)
        assert above not in ages or age < ages[above], f"{above} would be evicted before {block_id} below"
    assert len(pool._by_key) == sum(hashes.values()), "a key leads to a block without it"
    assert num_duplicates == sum(map(len, pool._duplicates.values())), f"lost: {pool._duplicates}"
    assert hashes == pool._num_by_hash, f"{hashes} are here, {pool._num_by_hash} are counted"


def _check_parent(pool: BlockPool, block: Block) -> None:
    assert block.parent is not None
    parent_id = pool._by_key.get(block.parent.key)
    assert parent_id is not None, f"the parent is gone before its child: {_story(pool, block)}"
    parent = pool._blocks[parent_id]
    assert block.position == parent.position + 1, f"{_story(pool, block)} follows {parent}"
    if block.state is BlockState.REGISTERED:
        assert parent.state is BlockState.REGISTERED, (
            f"held below a block that is not: {_story(pool, block)}, {parent}"
        )


def _story(pool: BlockPool, block: Block) -> str:
    return f"{block}, known under its key: {block.name and pool._by_key.get(block.name.key)}"
