"""Blocks that come from the end of a prompt while its beginning is computed: passed over, and never wrong."""

from __future__ import annotations

import random

import pytest
from tests.unit.scheduler.scheduler_lab import Lab, limits, names_of, request, scheduler, states_of

from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.kv import BlockId

A = RequestId("a")
PROMPT = tuple(index % 5 + 1 for index in range(21))  # ten full blocks, and a token
LONG = request("a", PROMPT, max_tokens=3)


class Room:
    """Of a prompt's blocks, as whoever brings them sees it."""

    def __init__(self, lab: Lab, one: Request, num_blocks: int) -> None:
        self.lab = lab
        self.request = one
        block_size = lab.scheduler.limits.block_size
        names = names_of(one, list(one.token_ids), block_size)
        self.adopted = lab.scheduler.holds.allocate_incoming(names.slice(0, num_blocks))
        states = states_of(one, list(one.token_ids))
        self.states = [states[at : at + block_size] for at in range(0, len(states), block_size)]
        self.num_last = 0

    def bring(self, count: int = 1) -> tuple[int, int] | None:
        """That many more, from the end."""
        for _ in range(count):
            place, block = self.adopted[-1 - self.num_last]
            self.lab.fill(block, self.states[place])
            self.num_last += 1
        taken = self.lab.scheduler.incoming.attach(self.adopted, self.num_last, self.request.request_id)
        self.lab.scheduler.check_integrity()
        return taken

    def settle(self, num_filled: int = 0) -> None:
        self.lab.scheduler.incoming.commit(self.adopted, num_filled)
        self.lab.scheduler.check_integrity()


def lab_of(num_blocks: int = 32, max_batch_tokens: int = 4) -> Lab:
    return Lab(scheduler(num_blocks, limits(max_batch_tokens=max_batch_tokens)))


def test_what_came_is_not_computed() -> None:
    lab = lab_of()
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    assert room.bring() == (0, 0), "it waits, and may take them later"
    lab.step()  # blocks 0 and 1
    assert room.bring(2) == (3, 2)
    lab.begin()  # 2 and 3
    assert room.bring(5) == (3, 4), "2 to 9 are here, and 2 and 3 are being computed"
    room.settle()
    lab.finish()
    plan = lab.begin()
    assert plan is not None
    assert [work.start for work in plan.prefills] == [20], "behind all of them"
    lab.finish()
    lab.run()
    lab.check_answer(LONG)
    assert lab.cached[A, 0] == 12
    assert lab.scheduler.pool.num_used == 0
    assert len(lab.scheduler.pool._by_key) >= 10, "others find them"


def test_steps_are_small_while_blocks_come_and_others_have_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.scheduler.step_plan._MIN_SHARED_TOKENS", 4)
    lab = lab_of(max_batch_tokens=8)
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    plan = lab.begin()
    assert plan is not None
    assert [work.num_tokens for work in plan.prefills] == [8], "nothing has come yet"
    lab.finish()
    other = request("b", (9, 9, 9, 9), max_tokens=2)
    lab.scheduler.add_request(other)
    assert room.bring(3) == (3, 4)
    plan = lab.begin()
    assert plan is not None
    assert [work.num_tokens for work in plan.prefills] == [4, 4], "though 6 tokens are left"
    lab.finish()
    room.settle()
    lab.run()
    lab.check_answer(LONG)
    lab.check_answer(other)


def test_a_chunk_ends_where_blocks_are_ahead() -> None:
    lab = lab_of(max_batch_tokens=16)
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    short = request("b", (9, 9, 9), max_tokens=9)
    lab.scheduler.add_request(short)
    plan = lab.begin()
    assert plan is not None
    assert plan.prefills[0].num_tokens == 16
    assert room.bring(9) == (2, 8)
    lab.finish()
    room.settle()
    lab.run()
    lab.check_answer(LONG)
    lab.check_answer(short)
    assert lab.cached[A, 0] == 4


def test_computing_continues_behind_them_between_steps() -> None:
    lab = lab_of()
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    lab.step()
    assert room.bring(9) == (8, 2)
    room.settle()
    plan = lab.begin()
    assert plan is not None
    assert [(work.start, work.num_tokens) for work in plan.prefills] == [(20, 1)]
    lab.finish()
    lab.run()
    lab.check_answer(LONG)
    assert lab.cached[A, 0] == 16


def test_first_block_of_a_room_is_unused() -> None:
    """The room goes by it: it may be another's before the room is settled."""
    lab = Lab(scheduler(32, limits(max_batch_tokens=1, max_num_seqs=1)))
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    lab.begin()
    assert room.bring(10) == (9, 1)
    lab.finish()
    other = request("b", (7, 7, 7, 7, 7), max_tokens=1)
    lab.scheduler.abort(A)
    again = Room(lab, other, 2)
    room.settle()
    again.settle()
    assert lab.scheduler.pool.num_used == 0


def test_who_loses_its_blocks_loses_what_came() -> None:
    """And takes what comes after that."""
    lab = Lab(scheduler(24, limits(max_batch_tokens=6, max_num_seqs=2)))
    first = request("b", (1, 2, 3), max_tokens=28, priority=1)
    lab.scheduler.add_request(first)
    lab.step()
    room = Room(lab, LONG, 8)
    lab.scheduler.add_request(LONG)
    lab.begin()
    lab.finish()
    assert room.bring(2)[0] == 2  # type: ignore[index]
    while lab.scheduler.num_running == 2 and lab.scheduler.planner.num_preemptions == 0:
        lab.step()
        lab.scheduler.check_integrity()
        if room.num_last < 7:
            room.bring()
    room.settle()
    lab.run()
    lab.check_answer(LONG)
    lab.check_answer(first)


def test_who_wants_logprobs_of_its_prompt_computes_it() -> None:
    lab = lab_of()
    one = request("a", PROMPT, prompt_logprobs=1)
    room = Room(lab, one, 10)
    lab.scheduler.add_request(one)
    lab.step()
    assert room.bring(9) == (0, 10)
    room.settle()
    lab.run()
    lab.check_answer(one)


def test_who_waits_for_blocks_does_not_wait_for_those_that_come_for_itself() -> None:
    lab = lab_of(num_blocks=16)
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    assert lab.begin() is None, "there are six left"
    assert room.bring() == (0, 10)
    room.settle()
    lab.run()
    lab.check_answer(LONG)


def test_who_waits_behind_others_may_take_them_later() -> None:
    lab = lab_of(num_blocks=16)
    lab.scheduler.add_request(request("b", (1, 2, 3), max_tokens=3))
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    assert room.bring() == (0, 0)
    room.settle()
    lab.run()


def test_what_is_cleared_does_not_come_back() -> None:
    lab = lab_of()
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    lab.begin()
    lab.scheduler.clear()
    assert room.bring(10) == (0, 2)
    lab.finish()
    room.settle(10)
    assert len(lab.scheduler.pool._by_key) == 2, "what it computed itself"
    lab.run()
    lab.check_answer(LONG)


def test_blocks_of_another_prompt_are_not_taken() -> None:
    lab = lab_of()
    other = request("a", (*PROMPT[:-3], 6, 6, 6))
    room = Room(lab, other, 10)
    lab.scheduler.add_request(LONG)
    lab.step()
    assert room.bring(9) == (0, 2)
    room.settle()
    lab.run()
    lab.check_answer(LONG)


def test_cancelled_caller_keeps_nothing() -> None:
    lab = lab_of()
    room = Room(lab, LONG, 10)
    assert room.bring() is None, "it has not come"
    lab.scheduler.add_request(LONG)
    lab.begin()
    assert room.bring(2) == (3, 2)
    lab.scheduler.abort(A)
    assert room.bring() is None
    lab.finish()
    room.settle()
    assert lab.scheduler.pool.num_used == 0


def test_all_that_came_for_one_that_waits_is_found() -> None:
    lab = lab_of()
    room = Room(lab, LONG, 10)
    lab.scheduler.add_request(LONG)
    assert room.bring(10) == (0, 0)
    room.settle(10)
    lab.run()
    lab.check_answer(LONG)
    assert lab.cached[A, 0] == 20


@pytest.mark.parametrize("seed", range(40))
def test_whatever_comes_when_answers_are_the_same(seed: int) -> None:
    rng = random.Random(seed)
    lab = Lab(scheduler(rng.randint(30, 60), limits(max_batch_tokens=rng.randint(4, 12))))
    rooms: list[Room] = []
    asked: list[Request] = []
    for number in range(30):
        start = tuple(rng.randrange(1, 6) for _ in range(rng.choice((6, 6, 12))))
        one = request(
            f"r{number}",
            start + PROMPT[: rng.randint(4, 20)],
            max_tokens=rng.randint(1, 6),
            n=rng.choice((1, 1, 2)),
            priority=rng.randint(0, 1),
        )
        asked.append(one)
        if rng.random() < 0.7:
            room = Room(lab, one, rng.randint(2, (len(one.token_ids) - 1) // 2))
            if room.adopted:
                rooms.append(room)
        lab.scheduler.add_request(one)
        for _ in range(rng.randint(0, 4)):
            is_running = lab.begin() is not None
            for room in list(rooms):
                if rng.random() < 0.5 and room.num_last < len(room.adopted):
                    room.bring(rng.randint(1, len(room.adopted) - room.num_last))
                elif rng.random() < 0.2:
                    was_taken = BlockId(room.adopted[-1][1]) not in set(lab.scheduler.holds)
                    whole = room.num_last == len(room.adopted) and not was_taken
                    room.settle(room.num_last if whole else 0)
                    rooms.remove(room)
            if rng.random() < 0.05:
                gone = asked.pop(rng.randrange(len(asked)))
                lab.scheduler.abort(gone.request_id)
            if is_running:
                lab.finish()
            lab.scheduler.check_integrity()
    for room in rooms:
        room.settle()
    lab.run()
    for one in asked:
        lab.check_answer(one)
    assert lab.scheduler.pool.num_used == 0
