"""Integrity check of a scheduler: its state against itself and against the pool. For tests and idle engines.

Part of `scheduler`, whose inside it looks at; changes nothing.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import TYPE_CHECKING

from kvolt.kv import BlockId
from kvolt.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from kvolt.scheduler.scheduler import Scheduler


def check_books(one: Scheduler) -> None:
    """AssertionError, with the story, where sequences and pool do not agree."""
    one.pool.check_integrity()
    holders = Counter(
        chain(
            *(sequence.blocks for sequence in one._planner.running),
            *one._deferred,
            one._holds,
            one._arrivals,
        )
    )
    for block in range(one.pool.num_blocks):
        found, counted = holders[BlockId(block)], one.pool.num_holders(BlockId(block))
        assert found == counted, f"block {block} has {found} holders, and {counted} in the pool's books"
    assert one._in_flight or not one._deferred, "blocks wait for a step that is not under way"
    for queue in (one._planner.running, one._planner.waiting):
        assert queue == sorted(queue, key=lambda sequence: sequence.order), f"out of order: {queue}"
    held_back = [sequence for group in one._groups.values() for sequence in group.held_back]
    queued = {id(sequence) for sequence in chain(one._planner.running, one._planner.waiting, held_back)}
    live = {id(sequence) for group in one._groups.values() for sequence in group.live}
    assert queued == live, "a sequence is in no queue, or in one after its end"
    assert (
        len(one._planner.running) + len(one._planner.waiting) + len(held_back) == one._num_live == len(live)
    )
    for sequence in chain(one._planner.waiting, held_back):
        assert not sequence.blocks, f"{sequence} waits with blocks"
    _check_arrivals(one)
    readers = Counter(chain(*one._planner.shared._blocks.values()))
    assert one._planner.shared._blocks.keys() <= set(one._planner.running), (
        "a reader is counted that runs no more"
    )
    assert readers == Counter(one._planner.shared._num_readers), (
        "readers of shared blocks are counted wrongly"
    )
    for sequence in one._planner.running:
        _check_running(one, sequence)


def _check_arrivals(one: Scheduler) -> None:
    arrivals = one._arrivals
    assert arrivals.num_blocks == sum(1 for _ in arrivals), "blocks kept for who waits are counted wrongly"
    assert not arrivals._expected.keys() & one._groups.keys(), "a request is expected that is here"
    for request_id, queued in arrivals._queued.items():
        group = one._groups.get(request_id)
        assert group is not None, f"blocks are kept for {request_id}, which is gone"
        assert not group.has_started, f"blocks are kept for {request_id}, which has its own"
        found = [one.pool.block_of(key) for key in one._planner.reusable_keys(group.first)]
        assert found[: len(queued.blocks)] == queued.blocks, f"{request_id} will not find what is kept for it"


def _check_running(one: Scheduler, sequence: Sequence) -> None:
    block_size = one.limits.block_size
    assert len(set(sequence.blocks)) == len(sequence.blocks), f"a block is there twice: {sequence}"
    assert sequence.num_computed < len(sequence.tokens), f"nothing is left to compute: {sequence}"
    assert sequence.num_computed <= len(sequence.blocks) * block_size, f"KV without a block: {sequence}"
    assert sequence.num_sealed == sequence.num_computed // block_size, f"a full block unnamed: {sequence}"
    for position, block in enumerate(sequence.blocks):
        name = one.pool.name_of(block)
        known = sequence.naming.names[position] if position < sequence.num_sealed else None
        assert name is None or name == known, f"block {block} of {sequence} is known as {name}"
