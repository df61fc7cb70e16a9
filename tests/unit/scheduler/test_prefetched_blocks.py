"""Blocks that came for requests which are not admitted yet: they stay, unless somebody is in need of them."""

from __future__ import annotations

import pytest
from tests.unit.kv.names import keys_of, put
from tests.unit.scheduler.scheduler_lab import Lab, limits, names_of, request, scheduler, states_of

from kvolt.core.errors import InvalidRequest, Overloaded
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.kv import BlockPool
from kvolt.scheduler.prefetched_blocks import PrefetchedBlocks
from kvolt.scheduler.step_planner import PROMOTED_ONE_IN

A, B = RequestId("a"), RequestId("b")
PROMPT = (1, 2, 3, 4, 5, 6, 7)
OTHER = (5, 5, 5, 5, 5, 5, 5)
ANOTHER = (6, 6, 6, 6, 6, 6, 6)


def settle(lab: Lab, asked: Request, num_filled: int | None = None, expires_at: float = 9.0) -> None:
    """The prompt of a request comes, ahead of it."""
    block_size = lab.scheduler.limits.block_size
    tokens = list(asked.token_ids)
    adopted = lab.scheduler.holds.allocate_incoming(names_of(asked, tokens, block_size))
    assert adopted
    states = states_of(asked, tokens)
    for position, block in adopted:
        lab.fill(block, states[position * block_size :][:block_size])
    lab.scheduler.incoming.commit(adopted, num_filled, asked.request_id, expires_at)
    lab.scheduler.check_integrity()


def fill(lab: Lab, num_requests: int = 6) -> None:
    """Others come and go, more than the pool has room for."""
    for index in range(num_requests):
        lab.scheduler.add_request(request(f"other{index}", (9, index, 9, 9, 9), max_tokens=2))
        lab.run()


# --- the chains


def test_a_chain_is_held_until_it_is_let_go() -> None:
    pool = BlockPool(4)
    prefetched = PrefetchedBlocks(pool)
    pool.release(reversed(put(pool, (1, 2, 3))))
    prefetched.hold_expected(A, keys_of((1, 2, 3)), 5.0)
    assert (pool.num_used, prefetched.num_blocks) == (3, 3)
    assert pool.allocate(2) is None
    prefetched.release(A)
    prefetched.release(A)
    assert (pool.num_used, prefetched.num_blocks) == (0, 0)
    assert pool.match(keys_of((1, 2, 3))) == 3


def test_only_what_is_here_is_held_and_once_for_a_request() -> None:
    pool = BlockPool(4)
    prefetched = PrefetchedBlocks(pool)
    pool.release(reversed(put(pool, (1, 2))))
    prefetched.hold_expected(A, keys_of((7, 8)), 5.0)
    assert not prefetched.is_expected(A)
    prefetched.hold_expected(A, keys_of((1, 2, 3)), 5.0)
    prefetched.hold_expected(A, keys_of((1,)), 7.0)
    assert (pool.num_used, prefetched.num_blocks, prefetched.next_expiry) == (1, 1, 7.0)
    prefetched.release_expected(A)
    assert (pool.num_used, prefetched.next_expiry) == (0, None)


def test_the_last_in_the_queue_loses_what_is_kept_for_it_first() -> None:
    pool = BlockPool(8)
    prefetched = PrefetchedBlocks(pool)
    for number in range(1, 6):
        pool.release(put(pool, (number,)))
        prefetched.hold_expected(RequestId(f"r{number}"), keys_of((number,)), 5.0)
    for number, order in ((1, (0, True, 1)), (2, (-1, True, 2)), (3, (0, True, 3))):
        prefetched.hold_queued(RequestId(f"r{number}"), keys_of((number,)), order)
    lost = []
    while prefetched.evict_last(spare=RequestId("r2")):
        lost.append(next(n for n in range(1, 6) if n not in lost and not held(pool, n)))
    assert lost == [5, 4, 3, 1], "those that have not come, the latest first; then the queue from its end"
    assert not prefetched.can_free(1, spare=RequestId("r2"))
    assert prefetched.can_free(1)
    assert prefetched.evict_last()
    assert not prefetched.evict_last()
    assert pool.num_used == 0


def test_what_others_hold_as_well_would_not_be_free() -> None:
    """The beginning that two prompts share, which somebody has who runs; of each the rest is its own."""
    pool = BlockPool(8)
    prefetched = PrefetchedBlocks(pool)
    running = put(pool, (1, 2))
    for request_id, own in ((A, 5), (B, 6)):
        pool.release(reversed(put(pool, (1, 2, own))))
        prefetched.hold_expected(request_id, keys_of((1, 2, own)), 5.0)
    assert prefetched.num_blocks == 6
    assert prefetched.can_free(2)
    assert not prefetched.can_free(3)
    pool.release(reversed(running))
    assert prefetched.can_free(4)
    assert not prefetched.can_free(5)


def held(pool: BlockPool, number: int) -> bool:
    block = pool.block_of(keys_of((number,))[0])
    return block is not None and pool.num_holders(block) > 0


def test_who_does_not_come_in_time_is_not_expected() -> None:
    pool = BlockPool(4)
    prefetched = PrefetchedBlocks(pool)
    for request_id, number, expires_at in ((A, 1, 5.0), (B, 2, 6.0)):
        pool.release(put(pool, (number,)))
        prefetched.hold_expected(request_id, keys_of((number,)), expires_at)
    prefetched.hold_queued(B, keys_of((2,)), (0, True, 1))
    prefetched.expire(4.9)
    assert pool.num_used == 2
    prefetched.expire(9.0)
    assert pool.num_used == 1, "one that waits has come"


# --- with a scheduler


def test_what_came_is_found_however_much_was_computed_before() -> None:
    lab = Lab(scheduler(num_blocks=8))
    asked = request("a", PROMPT)
    settle(lab, asked)
    assert lab.scheduler.pool.num_used == 3
    fill(lab)
    assert lab.scheduler.pool.num_used == 3
    lab.scheduler.add_request(asked)
    lab.scheduler.check_integrity()
    lab.run()
    lab.check_answer(asked)
    assert lab.cached[A, 0] == 6
    assert lab.scheduler.pool.num_used == 0


def test_it_stays_while_its_request_waits_behind_others() -> None:
    """Two may run at a time, and those before it need all the room that nobody holds."""
    lab = Lab(scheduler(num_blocks=12, bounds=limits(max_num_seqs=2)))
    asked = request("a", PROMPT)
    settle(lab, asked)
    before = [request(f"other{index}", (9, index, 9, 9, 9), max_tokens=3) for index in range(8)]
    for one in before:
        lab.scheduler.add_request(one)
    lab.scheduler.add_request(asked)
    lab.run()
    for one in (*before, asked):
        lab.check_answer(one)
    assert lab.cached[A, 0] == 6


def test_what_came_in_part_is_kept_in_part() -> None:
    lab = Lab(scheduler(num_blocks=8))
    asked = request("a", PROMPT)
    settle(lab, asked, num_filled=2)
    assert lab.scheduler.pool.num_used == 2
    fill(lab)
    lab.scheduler.add_request(asked)
    lab.run()
    lab.check_answer(asked)
    assert lab.cached[A, 0] == 4


def test_what_nothing_came_of_keeps_nothing() -> None:
    lab = Lab(scheduler())
    settle(lab, request("a", PROMPT), num_filled=0)
    assert (lab.scheduler.pool.num_used, lab.scheduler.prefetched.next_expiry) == (0, None)


@pytest.mark.parametrize("how", ["cancel", "abort", "expire", "refused", "clear"])
def test_a_request_that_does_not_come_keeps_nothing(how: str) -> None:
    lab = Lab(scheduler(bounds=limits(max_waiting=1, max_num_seqs=1)))
    asked = request("a", PROMPT)
    settle(lab, asked, expires_at=5.0)
    if how == "cancel":
        lab.scheduler.prefetched.release_expected(A)
    elif how == "abort":
        assert not lab.scheduler.abort(A)
    elif how == "expire":
        lab.scheduler.prefetched.expire(4.0)
        assert (lab.scheduler.pool.num_used, lab.scheduler.prefetched.next_expiry) == (3, 5.0)
        lab.scheduler.prefetched.expire(5.0)
    elif how == "clear":
        lab.scheduler.clear()
    else:
        lab.scheduler.add_request(request("b"))
        with pytest.raises(Overloaded):
            lab.scheduler.add_request(asked)
        lab.scheduler.abort(B)
    lab.scheduler.check_integrity()
    assert (lab.scheduler.pool.num_used, lab.scheduler.prefetched.next_expiry) == (0, None)


@pytest.mark.parametrize("how", ["abort", "withdraw", "clear"])
def test_a_request_that_waits_and_goes_keeps_nothing(how: str) -> None:
    lab = Lab(scheduler())
    settle(lab, request("a", PROMPT), expires_at=5.0)
    lab.scheduler.add_request(request("a", PROMPT))
    lab.scheduler.prefetched.release_expected(A)
    lab.scheduler.prefetched.expire(100.0)
    assert lab.scheduler.pool.num_used == 3, "it has come"
    if how == "clear":
        lab.scheduler.clear()
    else:
        assert getattr(lab.scheduler, how)(A)
    assert lab.scheduler.pool.num_used == 0


def test_a_refused_namesake_takes_nothing_from_who_is_here() -> None:
    lab = Lab(scheduler())
    settle(lab, request("a", PROMPT))
    lab.scheduler.add_request(request("a", PROMPT))
    with pytest.raises(InvalidRequest, match="already"):
        lab.scheduler.add_request(request("a", PROMPT))
    assert lab.scheduler.pool.num_used == 3


def test_blocks_may_come_after_their_request() -> None:
    """One that waits finds them; one that runs has no use for them."""
    lab = Lab(scheduler(num_blocks=12, bounds=limits(max_num_seqs=1)))
    lab.scheduler.add_request(request("first", OTHER, max_tokens=3))
    lab.scheduler.add_request(request("a", PROMPT))
    lab.step()
    settle(lab, request("a", PROMPT))
    settle(lab, request("first", ANOTHER))
    assert lab.scheduler.prefetched.next_expiry is None
    lab.run()
    assert lab.cached[A, 0] == 6
    assert lab.scheduler.pool.num_used == 0


def test_what_a_request_cannot_use_is_not_kept_for_it() -> None:
    """Its last token is always computed, its logits may be asked for, and it may be another than was expected."""
    for asked, num_kept in (
        (request("a", PROMPT), 3),
        (request("a", PROMPT[:6]), 2),
        (request("a", PROMPT, prompt_logprobs=1), 0),
        (request("a", OTHER), 0),
        (request("a", PROMPT, salt="other"), 0),
    ):
        lab = Lab(scheduler())
        settle(lab, request("a", PROMPT))
        lab.scheduler.add_request(asked)
        assert lab.scheduler.pool.num_used == num_kept
        lab.run()
        lab.check_answer(asked)


def test_the_first_in_the_queue_takes_what_is_kept_for_the_last() -> None:
    """And no more than it needs."""
    lab = Lab(scheduler(num_blocks=11))
    for name, prompt in (("a", PROMPT), ("b", OTHER), ("c", ANOTHER)):
        settle(lab, request(name, prompt))
    for name, prompt in (("b", OTHER), ("c", ANOTHER)):
        lab.scheduler.add_request(request(name, prompt, max_tokens=1))
    first = request("a", PROMPT, max_tokens=1, priority=1)
    lab.scheduler.add_request(first)
    lab.scheduler.add_request(request("d", (4, 4, 4, 4, 4), max_tokens=1, priority=2))
    assert lab.begin() is not None
    assert [sequence.request.request_id for sequence in lab.scheduler.planner.running] == ["d", "a"]
    assert lab.scheduler.pool.num_used == 3 + 4 + 3
    lab.finish()
    lab.run()
    assert lab.cached[A, 0] == lab.cached[B, 0] == 6
    assert lab.cached[RequestId("c"), 0] < 6, "what it lost was written over"


def test_blocks_kept_for_a_promoted_request_are_not_the_first_to_be_evicted() -> None:
    lab = Lab(scheduler(num_blocks=12, bounds=limits(max_num_seqs=1)))
    settle(lab, request("a", PROMPT))
    settle(lab, request("b", OTHER))
    lab.scheduler.add_request(request("a", PROMPT, max_tokens=1))
    for number in range(PROMOTED_ONE_IN - 1):
        lab.scheduler.add_request(request(f"high {number}", (4,), max_tokens=1, priority=1))
    lab.scheduler.add_request(request("b", OTHER, max_tokens=1, priority=1))
    while lab.scheduler.num_waiting > 2:
        lab.step()
    assert [one.request.request_id for one in lab.scheduler.planner.waiting] == [A, B]
    assert lab.scheduler.prefetched.evict_last(spare=A), "the chain of b"
    lab.run()
    assert lab.cached[A, 0] == 6


def test_an_answer_that_grows_takes_what_is_kept_before_it_preempts() -> None:
    lab = Lab(scheduler(num_blocks=8))
    running = [request("r", (3, 3, 3), max_tokens=6), request("s", (4, 4, 4), max_tokens=6)]
    for one in running:
        lab.scheduler.add_request(one)
    lab.step()
    settle(lab, request("a", PROMPT))
    assert lab.scheduler.pool.num_free == 1
    lab.run()
    assert lab.scheduler.planner.num_preemptions == 0
    assert lab.scheduler.pool.num_used == 0, "it was given up as a whole"
    for one in running:
        lab.check_answer(one)


def test_nobody_who_cannot_be_helped_takes_anything() -> None:
    """The first in the queue would need more than is kept for the others: it waits, and they lose nothing."""
    lab = Lab(scheduler(num_blocks=12))
    lab.scheduler.add_request(request("runs", (3,) * 11, max_tokens=4))
    lab.step()
    settle(lab, request("a", PROMPT))
    lab.scheduler.add_request(request("large", (4,) * 15, max_tokens=1))
    lab.scheduler.add_request(request("a", PROMPT))
    lab.step()
    assert lab.scheduler.pool.num_used == 6 + 3
    lab.run()
    assert lab.scheduler.pool.num_used == 0


def test_what_two_wait_for_is_kept_for_both_and_given_up_for_a_third() -> None:
    """Neither of them alone makes room: that is no reason to wait for ever."""
    lab = Lab(scheduler(num_blocks=5))
    settle(lab, request("a", PROMPT))
    lab.scheduler.prefetched.hold_expected(B, names_of(request("b", PROMPT), list(PROMPT), 2).keys, 9.0)
    assert lab.scheduler.pool.num_used == 3
    third = request("c", OTHER, max_tokens=1)
    lab.scheduler.add_request(third)
    lab.run()
    lab.check_answer(third)
    assert lab.scheduler.pool.num_used == 0


def test_blocks_for_something_else_are_those_kept_too() -> None:
    lab = Lab(scheduler(num_blocks=4))
    settle(lab, request("a", PROMPT))
    assert lab.scheduler.allocate(5) is None
    assert lab.scheduler.pool.num_used == 3, "nothing goes for what cannot be had"
    blocks = lab.scheduler.allocate(2)
    assert blocks is not None
    lab.scheduler.pool.release(reversed(blocks))
    assert lab.scheduler.pool.num_used == 0
