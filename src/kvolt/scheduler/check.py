"""Integrity check of a scheduler: compares its parts with each other and with the pool. For tests and idle engines.

Part of `scheduler`, whose internal state it reads; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from kvolt.core.ids import RequestId
from kvolt.kv import BlockId, BlockPool
from kvolt.kv.pool_check import check_pool
from kvolt.scheduler.holds import BlockHolds
from kvolt.scheduler.prefetched_blocks import PrefetchedBlocks
from kvolt.scheduler.sequence import ChoiceGroup, Sequence
from kvolt.scheduler.step_planner import StepPlanner


def check_scheduler(
    pool: BlockPool,
    groups: Mapping[RequestId, ChoiceGroup],
    planner: StepPlanner,
    holds: BlockHolds,
    prefetched: PrefetchedBlocks,
) -> None:
    """AssertionError with details if sequences and pool disagree."""
    check_pool(pool)
    holders = Counter(
        chain(
            *(sequence.blocks for sequence in planner.running),
            holds,
            prefetched,
        )
    )
    for block in range(pool.num_blocks):
        expected, counted = holders[BlockId(block)], pool.num_holders(BlockId(block))
        assert expected == counted, f"block {block} has {expected} holders, but {counted} in the pool"
    for queue in (planner.running, planner.waiting):
        assert queue == sorted(queue, key=lambda sequence: sequence.order), f"out of order: {queue}"
    held_back = [sequence for group in groups.values() for sequence in group.held_back]
    queued = {id(sequence) for sequence in chain(planner.running, planner.waiting, held_back)}
    live = {id(sequence) for group in groups.values() for sequence in group.live}
    assert queued == live, "a live sequence is in no queue, or an ended one is queued"
    assert len(planner.running) + len(planner.waiting) + len(held_back) == len(live)
    for sequence in chain(planner.waiting, held_back):
        assert not sequence.blocks, f"{sequence} waits with blocks"
    _check_prefetched(pool, groups, planner, prefetched)
    readers = Counter(chain(*planner.shared._blocks.values()))
    assert planner.shared._blocks.keys() <= set(planner.running), "an ended sequence is counted as a reader"
    assert readers == Counter(planner.shared._num_readers), "wrong reader counts of shared blocks"
    for sequence in planner.running:
        _check_running(pool, planner.limits.block_size, sequence)


def _check_prefetched(
    pool: BlockPool,
    groups: Mapping[RequestId, ChoiceGroup],
    planner: StepPlanner,
    prefetched: PrefetchedBlocks,
) -> None:
    assert prefetched.num_blocks == sum(1 for _ in prefetched), "wrong count of prefetched blocks"
    assert not prefetched._expected.keys() & groups.keys(), "an arrived request is still expected"
    for request_id, queued in prefetched._queued.items():
        group = groups.get(request_id)
        assert group is not None, f"blocks are prefetched for {request_id}, which has ended"
        assert not group.has_started, f"blocks are prefetched for {request_id}, which has started"
        cached = [pool.block_of(key) for key in planner.reusable_keys(group.first)]
        assert cached[: len(queued.blocks)] == queued.blocks, (
            f"{request_id} will not find its prefetched blocks"
        )


def _check_running(pool: BlockPool, block_size: int, sequence: Sequence) -> None:
    assert len(set(sequence.blocks)) == len(sequence.blocks), f"duplicate block: {sequence}"
    assert sequence.num_computed < len(sequence.tokens), f"nothing left to compute: {sequence}"
    assert sequence.num_computed <= len(sequence.blocks) * block_size, f"KV without a block: {sequence}"
    assert sequence.num_sealed == sequence.num_computed // block_size, (
        f"a full block without a name: {sequence}"
    )
    for position, block in enumerate(sequence.blocks):
        name = pool.name_of(block)
        known = sequence.naming.names[position] if position < sequence.num_sealed else None
        assert name is None or name == known, f"block {block} of {sequence} is known as {name}"
