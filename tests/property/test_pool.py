"""A block pool under whatever holders do: nothing is lost, given twice, or found where it is not."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.kv.names import Mirror, names_of, seen

from kvolt.kv import BlockId, BlockPool
from kvolt.kv.pool_check import blocks_of, check_pool

Path = tuple[int, ...]

paths = st.lists(st.sampled_from((1, 2, 9)), min_size=1, max_size=4).map(tuple)
"""Few numbers, so that paths share their starts; 1 and 9 share their routing hash."""
picks = st.integers(0, 1000)


@dataclass
class Holder:
    """Blocks of a path, of which the first `num_sealed` are full."""

    path: Path
    blocks: list[BlockId]
    num_sealed: int


def all_of(pool: BlockPool) -> dict[str, Any]:
    """All that is in it, and what it would tell."""
    return {
        "changes": deepcopy(pool).take_changes(),
        "blocks": {block.id: block for run in pool.runs() for block in blocks_of(run)},
        "inactive": [block for run in pool._inactive for block in reversed(run.ids)],
        "free": pool._free,
        "books": (pool._by_key, pool._duplicates, pool._log.published.counts()),
    }


class Pools(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 16))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.holders: list[Holder] = []
        self.memory: dict[BlockId, bytes] = {}
        """What lies in each block that was filled."""
        self.mirror = Mirror()

    def pick(self, number: int) -> Holder:
        return self.holders[number % len(self.holders)]

    @rule(path=paths, uses_cache=st.booleans())
    def begin(self, path: Path, uses_cache: bool) -> None:
        keys = names_of(path).keys if uses_cache else []
        num_found = self.pool.match(keys)
        found = self.pool.acquire(keys)
        assert len(found) == num_found
        assert [self.memory[block] for block in found] == keys[:num_found]
        num_free = self.pool.num_free
        fresh = self.pool.allocate(len(path) - num_found)
        assert (fresh is None) == (len(path) - num_found > num_free)
        if fresh is None:
            assert self.pool.num_free == num_free
            self.pool.release(reversed(found))
            return
        for block in fresh:
            self.memory.pop(block, None)
        self.holders.append(Holder(path, found + fresh, num_found))

    @rule(path=paths, uses_cache=st.booleans(), ends=st.booleans())
    def run(self, path: Path, uses_cache: bool, ends: bool) -> None:
        num_holders = len(self.holders)
        self.begin(path, uses_cache)
        if len(self.holders) > num_holders:
            self.seal(num_holders, len(path))
            if ends:
                self.end(num_holders)

    @precondition(lambda self: self.holders)
    @rule(number=picks, count=st.integers(1, 5), at_once=st.booleans())
    def seal(self, number: int, count: int, at_once: bool = False) -> None:
        holder = self.pick(number)
        end = min(holder.num_sealed + count, len(holder.path))
        names = names_of(holder.path)
        one_by_one = deepcopy(self.pool) if at_once else self.pool
        for position in range(holder.num_sealed, end):
            block, name = holder.blocks[position], names[position]
            self.memory[block] = name.key
            one_by_one.register(block, name, holder.blocks[position - 1] if position else None, position)
        if at_once:
            self.pool.register_run(holder.blocks, names, holder.num_sealed, end)
            assert all_of(self.pool) == all_of(one_by_one)
            check_pool(self.pool)
        holder.num_sealed = end

    @precondition(lambda self: self.pool.num_used > self.pool.num_blocks // 2)
    @rule()
    def end_all(self) -> None:
        while self.holders:
            self.end(0)

    @precondition(lambda self: self.holders)
    @rule(number=picks)
    def end(self, number: int) -> None:
        holder = self.pick(number)
        self.holders.remove(holder)
        self.pool.release(reversed(holder.blocks))

    @precondition(lambda self: self.holders)
    @rule(number=picks, count=st.integers(1, 5))
    def retain(self, number: int, count: int) -> None:
        holder = self.pick(number)
        blocks = holder.blocks[: min(count, holder.num_sealed)]
        if blocks:
            self.pool.retain(blocks)
            self.holders.append(Holder(holder.path[: len(blocks)], blocks, len(blocks)))

    @precondition(lambda self: len(self.pool._by_key) > 5)  # so that something is there more often than not
    @rule()
    def clear(self) -> None:
        num_used = self.pool.num_used
        assert self.pool.clear() >= 0
        assert self.pool.num_used == num_used
        assert len(self.pool._by_key) == 0

    @invariant()
    def the_books_are_right(self) -> None:
        check_pool(self.pool)
        holders = Counter(block for holder in self.holders for block in holder.blocks)
        assert self.pool.num_used == len(holders)
        assert all(
            self.pool.num_holders(BlockId(block)) == holders[BlockId(block)]
            for block in range(self.pool.num_blocks)
        )

    @invariant()
    def names_are_of_what_lies_there(self) -> None:
        for block in range(self.pool.num_blocks):
            name = self.pool.name_of(BlockId(block))
            assert name is None or self.memory[BlockId(block)] == name.key

    @invariant()
    def changes_lead_to_the_contents(self) -> None:
        self.mirror.apply(self.pool.take_changes())
        assert self.mirror.positions == seen(self.pool)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for holder in self.holders:
            self.pool.release(reversed(holder.blocks))
        self.holders.clear()
        self.the_books_are_right()
        assert self.pool.num_used == 0
        assert self.pool.allocate(self.pool.num_blocks) is not None
        self.changes_lead_to_the_contents()
        assert self.mirror.positions == {}


TestPools = Pools.TestCase
