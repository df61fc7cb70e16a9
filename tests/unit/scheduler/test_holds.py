"""Both ends of a handoff: blocks kept for a peer, and blocks filled from one."""

from __future__ import annotations

import pytest
from tests.unit.kv.names import keys_of, names_of, put
from tests.unit.scheduler.scheduler_lab import Lab, digest, limits, request, root, scheduler

from kvolt.core.errors import InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.kv import BlockPool
from kvolt.kv.pool_check import check_pool
from kvolt.scheduler.holds import BlockHolds

A = RequestId("a")


def test_a_finished_requests_blocks_are_kept_until_they_are_released() -> None:
    lab = Lab(scheduler(num_blocks=4))
    lab.scheduler.add_request(request("a", (1, 2, 3, 4, 5), max_tokens=1), keep_blocks=True)
    assert lab.scheduler.holds.find(A) is None
    lab.run()
    kept = lab.scheduler.holds.find(A)
    assert kept is not None
    blocks, names = kept
    assert (len(blocks), len(names)) == (3, 2)
    assert [lab.scheduler.pool.block_of(name.key) for name in names] == blocks[:2]
    assert lab.scheduler.pool.num_used == 3
    lab.scheduler.check_integrity()
    lab.scheduler.add_request(request("b", (9,) * 5, max_tokens=1))
    assert lab.scheduler.plan() is None  # there is no room, and it waits
    assert lab.scheduler.release_kept(A)
    assert not lab.scheduler.release_kept(A)
    lab.run()
    assert lab.scheduler.pool.num_used == 0


def test_of_several_choices_the_first_ones_blocks_are_kept() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", (1, 2, 3), max_tokens=4, n=2), keep_blocks=True)
    lab.run()
    assert lab.scheduler.pool.num_used == 3
    kept = lab.scheduler.holds.find(A)
    assert kept is not None
    tokens = [1, 2, 3, *lab.said[A, 0]]
    state = root(request("a"))
    states = [state := digest(state, token) for token in tokens[:-1]]
    assert [lab.memory[kept[0][at // 2], at % 2] for at in range(len(states))] == states


def test_a_kept_request_is_still_here() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", max_tokens=1), keep_blocks=True)
    lab.run()
    with pytest.raises(InvalidRequest, match="already"):
        lab.scheduler.add_request(request("a"))
    lab.scheduler.release_kept(A)
    lab.scheduler.add_request(request("a"))


def test_of_an_aborted_request_nothing_is_kept() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", max_tokens=4), keep_blocks=True)
    lab.step()
    lab.scheduler.abort(A)
    assert lab.scheduler.holds.find(A) is None
    assert lab.scheduler.pool.num_used == 0


def test_kv_moves_from_one_scheduler_to_another() -> None:
    prompt = (1, 2, 3, 4, 5, 6, 7)
    here, there = Lab(scheduler()), Lab(scheduler())
    here.scheduler.add_request(request("a", prompt, max_tokens=1), keep_blocks=True)
    here.run()
    kept = here.scheduler.holds.find(A)
    assert kept is not None
    blocks, names = kept
    adopted = there.scheduler.holds.allocate_incoming(names)
    assert [position for position, _ in adopted] == [0, 1, 2]
    assert len(there.scheduler.pool._by_key) == 0
    there.scheduler.check_integrity()
    for position, block in adopted:
        there.fill(block, [here.memory[blocks[position], offset] for offset in range(2)])
    there.scheduler.incoming.commit(adopted)
    there.scheduler.check_integrity()
    assert (there.scheduler.pool.num_used, len(there.scheduler.pool._by_key)) == (0, 3)
    assert there.scheduler.holds.allocate_incoming(names) == []
    assert there.scheduler.pool.num_used == 0
    moved = request("a", prompt, max_tokens=4, prior_tokens=tuple(here.said[A, 0]))
    there.scheduler.add_request(moved)
    there.run()
    there.check_answer(moved)
    assert there.cached[A, 0] == 6


def test_what_is_here_is_not_adopted_but_held_for_what_is() -> None:
    pool = BlockPool(4)
    holds = BlockHolds(pool)
    pool.release(reversed(put(pool, (1, 2))))
    adopted = holds.allocate_incoming(names_of((1, 2, 3)))
    assert [position for position, _ in adopted] == [2]
    assert pool.allocate(2) is None  # the first two must not be evicted before
    holds.commit_incoming(adopted)
    assert pool.match(keys_of((1, 2, 3))) == 3
    assert pool.num_used == 0
    check_pool(pool)


def test_adoption_ends_where_the_pool_is_full() -> None:
    pool = BlockPool(3)
    holds = BlockHolds(pool)
    pool.allocate(1)
    adopted = holds.allocate_incoming(names_of((1, 2, 3, 4)))
    assert [position for position, _ in adopted] == [0, 1]
    assert holds.allocate_incoming(names_of((7,))) == []
    holds.commit_incoming(adopted)
    holds.commit_incoming([])
    assert pool.match(keys_of((1, 2, 3))) == 2


def test_what_did_not_come_is_freed() -> None:
    pool = BlockPool(4)
    holds = BlockHolds(pool)
    adopted = holds.allocate_incoming(names_of((1, 2, 3)))
    holds.commit_incoming(adopted, num_filled=1)
    assert (len(pool._by_key), pool.num_used) == (1, 0)
    adopted = holds.allocate_incoming(names_of((1, 2, 3)))
    assert [position for position, _ in adopted] == [1, 2]
    holds.commit_incoming(adopted, num_filled=1)
    assert (len(pool._by_key), pool.num_used) == (2, 0)
    adopted = holds.allocate_incoming(names_of((1, 2, 3)))
    holds.commit_incoming(adopted, num_filled=0)
    assert (len(pool._by_key), pool.num_used) == (2, 0)
    check_pool(pool)


def test_what_was_computed_here_meanwhile_is_not_there_twice() -> None:
    lab = Lab(scheduler(bounds=limits(block_size=2)))
    one = request("a", (1, 2, 3), max_tokens=1)
    other = Lab(scheduler())
    other.scheduler.add_request(one, keep_blocks=True)
    other.run()
    kept = other.scheduler.holds.find(A)
    assert kept is not None
    adopted = lab.scheduler.holds.allocate_incoming(kept[1])
    lab.scheduler.add_request(one)
    lab.run()
    state = digest(root(one), 1)
    lab.fill(adopted[0][1], [state, digest(state, 2)])
    lab.scheduler.incoming.commit(adopted)
    lab.scheduler.check_integrity()
    assert (len(lab.scheduler.pool._by_key), lab.scheduler.pool.num_used) == (1, 0)
