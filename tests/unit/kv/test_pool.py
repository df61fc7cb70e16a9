"""The block pool: who holds what, what is found again, what is thrown out first."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.unit.kv.names import Mirror, keys_of, name_of, names_of, put, seen

from kvolt.core.errors import ConfigError
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.kv import BlockId, BlockNames, BlockPool, IllegalMove
from kvolt.kv.pool_check import check_pool


def idle(pool: BlockPool, *paths: tuple[int, ...]) -> None:
    """Add chains to the pool without holders."""
    for path in paths:
        pool.release(reversed(put(pool, path)))


def allocated(pool: BlockPool, count: int) -> list[BlockId]:
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def removed(pool: BlockPool) -> list[int]:
    return [
        found
        for change in pool.take_changes()
        if isinstance(change, Removed)
        for found in change.sequence_hashes
    ]


def test_a_pool_without_blocks_is_refused() -> None:
    with pytest.raises(ConfigError):
        BlockPool(0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    blocks = allocated(pool, 3)
    assert len(set(blocks)) == 3
    assert (pool.num_free, pool.num_used) == (0, 3)
    assert pool.allocate(1) is None
    assert pool.allocate(0) == []
    pool.release(blocks)
    assert (pool.num_free, pool.num_used, len(pool._by_key)) == (3, 0, 0)
    check_pool(pool)


def test_a_registered_prefix_is_found_and_shared() -> None:
    pool = BlockPool(8)
    blocks = put(pool, (1, 2, 3))
    assert pool.match(keys_of((1, 2, 4))) == 2
    assert pool.match(keys_of((2, 2))) == 0
    assert pool.acquire(keys_of((1, 2, 4))) == blocks[:2]
    assert [pool.num_holders(block) for block in blocks] == [2, 2, 1]
    assert pool.num_used == 3
    pool.release(reversed(blocks))
    assert pool.num_used == 2
    pool.release(reversed(blocks[:2]))
    assert (pool.num_used, len(pool._by_key)) == (0, 3)
    check_pool(pool)


def test_what_is_released_without_a_name_cannot_be_found() -> None:
    pool = BlockPool(2)
    pool.release(allocated(pool, 2))
    assert len(pool._by_key) == 0
    assert pool.take_changes() == ()


def test_a_pool_that_tells_no_changes_finds_and_evicts_all_the_same() -> None:
    pool = BlockPool(4, publishes_changes=False)
    idle(pool, (1, 2))
    assert pool.match(keys_of((1, 2))) == 2
    allocated(pool, 3)
    assert pool.match(keys_of((1, 2))) == 1
    pool.clear()
    assert pool.take_changes() == ()
    check_pool(pool)


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    idle(pool, (1, 2))
    allocated(pool, 2)
    assert pool.match(keys_of((1, 2))) == 2
    allocated(pool, 1)
    assert pool.match(keys_of((1, 2))) == 1


def test_the_chain_used_longest_ago_goes_first_and_its_end_before_its_start() -> None:
    pool = BlockPool(6)
    idle(pool, (1, 1, 1), (2, 2, 2))
    pool.release(reversed(pool.acquire(keys_of((1, 1)))))  # its third block stays behind
    pool.take_changes()
    gone = []
    for _ in range(6):
        allocated(pool, 1)
        check_pool(pool)
        gone += removed(pool)
    in_order = [(1, 1, 1), (2, 2, 2), (2, 2), (2,), (1, 1), (1,)]
    assert gone == [name_of(path).sequence_hash for path in in_order]


def test_an_acquired_block_is_not_evicted() -> None:
    pool = BlockPool(3)
    idle(pool, (1, 2, 3))
    held = pool.acquire(keys_of((1, 2)))
    assert pool.num_free == 1
    assert pool.allocate(2) is None
    assert pool.match(keys_of((1, 2, 3))) == 3
    allocated(pool, 1)
    assert pool.match(keys_of((1, 2, 3))) == 2
    pool.release(reversed(held))
    check_pool(pool)


def test_a_duplicate_has_no_effect_and_is_freed_at_its_end() -> None:
    pool = BlockPool(4)
    first, second = allocated(pool, 1), allocated(pool, 1)
    assert pool.register(first[0], name_of((1,)), None, 0)
    pool.take_changes()
    assert not pool.register(second[0], name_of((1,)), None, 0)
    assert pool.block_of(name_of((1,)).key) == first[0]
    pool.release(second)
    assert pool.take_changes() == ()
    assert (pool.num_used, len(pool._by_key)) == (1, 1)
    check_pool(pool)


def test_a_duplicate_inherits_the_name_without_a_word() -> None:
    pool = BlockPool(4)
    first, second = allocated(pool, 1), allocated(pool, 2)
    pool.register(first[0], name_of((1,)), None, 0)
    pool.register(second[0], name_of((1,)), None, 0)
    assert pool.register(second[1], name_of((1, 2)), second[0], 1)
    pool.take_changes()
    pool.release(first)
    assert pool.block_of(name_of((1,)).key) == second[0]
    assert pool.num_used == 2
    assert pool.take_changes() == ()
    check_pool(pool)
    allocated(pool, 2)
    check_pool(pool)  # nothing above a held block was evicted
    assert pool.match(keys_of((1, 2))) == 2


def test_duplicates_inherit_in_turn() -> None:
    pool = BlockPool(3)
    blocks = allocated(pool, 3)
    for block in blocks:
        pool.register(block, name_of((1,)), None, 0)
    for block, after in ((blocks[0], blocks[1]), (blocks[1], blocks[2]), (blocks[2], blocks[2])):
        pool.release([block])
        assert pool.block_of(name_of((1,)).key) == after
        check_pool(pool)
    assert (pool.num_used, len(pool._by_key)) == (0, 1)


def test_a_held_block_takes_the_name_of_an_inactive_one() -> None:
    pool = BlockPool(4)
    idle(pool, (1, 2))
    pool.take_changes()
    blocks = allocated(pool, 2)
    assert pool.register(blocks[0], name_of((1,)), None, 0)
    check_pool(pool)
    assert pool.block_of(name_of((1,)).key) == blocks[0]
    assert pool.match(keys_of((1, 2))) == 2
    assert pool.take_changes() == ()
    assert (pool.num_used, len(pool._by_key)) == (2, 2)


def test_a_block_below_one_without_a_name_gets_none() -> None:
    pool = BlockPool(4)
    blocks = allocated(pool, 2)
    assert not pool.register(blocks[1], name_of((1, 2)), blocks[0], 1)
    assert pool.name_of(blocks[1]) is None
    assert len(pool._by_key) == 0
    pool.register(blocks[0], name_of((1,)), None, 0)
    assert pool.register(blocks[1], name_of((1, 2)), blocks[0], 1)


def test_retaining_is_one_more_hold() -> None:
    pool = BlockPool(4)
    blocks = put(pool, (1, 2))
    pool.retain(blocks)
    pool.release(reversed(blocks))
    assert pool.num_used == 2
    pool.release(reversed(blocks))
    assert pool.num_used == 0


def test_clearing_forgets_every_name_and_leaves_blocks_to_their_holders() -> None:
    pool = BlockPool(8)
    idle(pool, (5, 6))
    held = put(pool, (1, 2))
    twin = allocated(pool, 1)
    pool.register(twin[0], name_of((1,)), None, 0)
    assert pool.clear() == 4
    check_pool(pool)
    assert pool.take_changes() == (Cleared(Tier.DEVICE),)
    assert pool.contents() == []
    assert pool.num_used == 3
    more = allocated(pool, 1)
    assert not pool.register(more[0], name_of((1, 2, 3)), held[-1], 2)  # its parent is not indexed
    pool.release([*more, *reversed(held), *twin])
    assert (pool.num_used, pool.num_free, len(pool._by_key)) == (0, 8, 0)
    check_pool(pool)


def test_two_names_with_one_hash_are_removed_with_the_second() -> None:
    pool = BlockPool(2)
    assert name_of((1,)).sequence_hash == name_of((9,)).sequence_hash
    idle(pool, (1,), (9,))
    mirror = Mirror()
    mirror.apply(pool.take_changes())
    allocated(pool, 1)
    assert pool.take_changes() == ()
    assert mirror.positions == seen(pool)
    allocated(pool, 1)
    assert pool.take_changes() == (Removed.from_hashes([name_of((1,)).sequence_hash]),)


def test_contents_are_runs_with_parents_first() -> None:
    pool = BlockPool(16)
    idle(pool, (1, 2, 3), (1, 2, 4, 5), (1, 6), (7,))
    contents = pool.contents()
    assert sorted(len(run.sequence_hashes) for run in contents) == [1, 1, 2, 3]
    mirror = Mirror()
    mirror.apply(contents)  # which insists on parents
    paths = [(1,), (1, 2), (1, 2, 3), (1, 2, 4), (1, 2, 4, 5), (1, 6), (7,)]
    assert mirror.positions == {name_of(path).sequence_hash: len(path) - 1 for path in paths}


def test_a_long_chain_needs_no_stack() -> None:
    pool = BlockPool(3000)
    blocks = allocated(pool, 3000)
    parent = None
    for position, block in enumerate(blocks):
        path = (1, *position.to_bytes(2, "big"))
        pool.register(block, name_of(path), parent, position)
        parent = block
    assert [len(run.sequence_hashes) for run in pool.contents()] == [3000]


def test_untaken_changes_are_bounded_and_end_in_the_contents() -> None:
    pool = BlockPool(2)
    mirror = Mirror()
    idle(pool, (1, 1))
    mirror.apply(pool.take_changes())
    for number in range(2, 7):
        idle(pool, (number, number))
    changes = pool.take_changes()
    assert [type(change) for change in changes] == [Cleared, Stored]
    mirror.apply(changes)
    assert mirror.positions == seen(pool)
    assert pool.take_changes() == ()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool, held, named: pool.release([held, held]),
        lambda pool, held, named: pool.release([held, BlockId(7)]),
        lambda pool, held, named: pool.retain([held, BlockId(7)]),
        lambda pool, held, named: pool.register(named, name_of((4,)), None, 0),
        lambda pool, held, named: pool.register(BlockId(7), name_of((4,)), None, 0),
        lambda pool, held, named: pool.register(named, name_of((4, 5)), held, 1),
    ],
    ids=["twice", "free", "retain", "named", "not held", "below nothing"],
)
def test_misuse_raises_and_changes_nothing(misuse: Callable[[BlockPool, BlockId, BlockId], object]) -> None:
    pool = BlockPool(8)
    (held,) = allocated(pool, 1)
    (named,) = put(pool, (1,))
    pool.take_changes()
    with pytest.raises(IllegalMove):
        misuse(pool, held, named)
    check_pool(pool)
    assert (pool.num_holders(held), pool.num_holders(named), pool.num_used) == (1, 1, 2)
    assert pool.name_of(held) is None
    assert pool.name_of(named) == name_of((1,))
    assert pool.take_changes() == ()


def test_a_duplicate_is_not_registered_twice() -> None:
    pool = BlockPool(2)
    blocks = allocated(pool, 2)
    for block in blocks:
        pool.register(block, name_of((1,)), None, 0)
    with pytest.raises(IllegalMove):
        pool.register(blocks[1], name_of((1,)), None, 0)
    check_pool(pool)


def test_integrity_sees_a_chain_released_from_the_wrong_end() -> None:
    pool = BlockPool(4)
    pool.release(put(pool, (1, 2)))
    with pytest.raises(AssertionError, match="would be evicted before"):
        check_pool(pool)


def test_integrity_sees_a_block_held_without_its_parent() -> None:
    pool = BlockPool(4)
    blocks = put(pool, (1, 2))
    pool.release(blocks[:1])
    with pytest.raises(AssertionError, match="held block with a parent that is not held"):
        check_pool(pool)


def test_a_run_is_split_where_a_part_of_it_is_acquired() -> None:
    pool = BlockPool(8)
    blocks = put(pool, (1, 2, 3, 4))
    assert [run.ids for run in pool.runs()] == [blocks], "one holder, one run"
    held = pool.acquire(keys_of((1, 2)))
    assert sorted(run.num_holders for run in pool.runs()) == [1, 2]
    pool.release(reversed(blocks))
    pool.release(reversed(held))
    check_pool(pool)
    pool.take_changes()
    allocated(pool, 8)
    gone = [name_of(path).sequence_hash for path in ((1, 2, 3, 4), (1, 2, 3), (1, 2), (1,))]
    assert removed(pool) == gone


def test_a_block_in_the_middle_of_an_inactive_run_passes_its_name_on() -> None:
    pool = BlockPool(8)
    idle(pool, (1, 2, 3))
    blocks = allocated(pool, 2)
    assert pool.register(blocks[0], name_of((1,)), None, 0)
    assert pool.register(blocks[1], name_of((1, 2)), blocks[0], 1)
    check_pool(pool)
    assert pool.match(keys_of((1, 2, 3))) == 3
    assert pool.acquire(keys_of((1, 2, 3)))[:2] == blocks
    check_pool(pool)


def test_a_name_twice_in_one_sequence_is_a_duplicate() -> None:
    """No chain of hashes has one, but a trace may say anything."""
    pool = BlockPool(8)
    blocks = allocated(pool, 3)
    names = BlockNames.of([name_of((1,)), name_of((2,)), name_of((1,))])
    pool.register_run(blocks, names, 0, 3)
    check_pool(pool)
    assert len(pool._by_key) == 2
    pool.release(reversed(blocks))
    check_pool(pool)


def test_a_lineage_runs_over_cuts() -> None:
    pool = BlockPool(8)
    put(pool, (1, 2, 3))
    pool.acquire(keys_of((1, 2)))
    assert list(pool.lineage(keys_of((1, 2, 3))[-1])) == list(names_of((1, 2, 3)))
    assert len(pool.lineage(keys_of((5,))[0])) == 0
