"""Prompts computed for others: what a handoff says, and how long its blocks stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.scheduler.scheduler_lab import EOS, Lab, alone, limits, names_of, request, scheduler

from kvolt.core.errors import Cancelled, ErrorInfo, InvalidRequest, NotFound, to_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import HeldKv
from kvolt.engines.prefills import Prefills

A = RequestId("a")
STOPPED = to_info(Cancelled("stopped"))


@dataclass
class Source:
    """A scheduler that computes prompts for others, and its clock."""

    lab: Lab = field(default_factory=lambda: Lab(scheduler()))
    now: float = 0.0
    found: list[Handoff | ErrorInfo] = field(default_factory=list)
    told: list[HeldKv | ErrorInfo] = field(default_factory=list)
    num_aborts: int = 0

    def __post_init__(self) -> None:
        self.prefills = Prefills(self.lab.scheduler, self._abort, lambda: self.now, hold_s=10.0)

    def _abort(self, request_id: RequestId) -> None:
        self.num_aborts += 1
        self.lab.scheduler.abort(request_id)

    def start(self, asked: Request) -> None:
        self.prefills.start(
            asked, lambda short: self.lab.scheduler.add_request(short, keep_blocks=True), self.found.append
        )

    def run(self) -> None:
        while self.lab.scheduler.has_work:
            assert all(self.prefills.consume_token(one) for one in self.lab.step())

    def step(self) -> None:
        """As an engine makes it."""
        assert self.lab.begin() is not None
        self.prefills.notify_watchers()
        for one in self.lab.finish():
            self.prefills.consume_token(one)
        self.prefills.notify_watchers()
        self.lab.scheduler.check_integrity()

    def watch(self, after: int, request_id: RequestId = A) -> None:
        self.prefills.watch(request_id, after, self.told.append)
        self.prefills.notify_watchers()

    @property
    def block_counts(self) -> list[int]:
        return [len(each.blocks) for each in self.told if isinstance(each, HeldKv)]

    @property
    def errors(self) -> list[str]:
        return [each.code for each in self.told if isinstance(each, ErrorInfo)]

    def handoff(self, asked: Request) -> Handoff:
        self.start(asked)
        self.run()
        (found,) = self.found
        assert isinstance(found, Handoff)
        return found

    @property
    def num_held(self) -> int:
        return self.lab.scheduler.pool.num_used


def test_a_handoff_has_the_first_token_of_each_choice_and_the_blocks_of_the_prompt() -> None:
    source = Source()
    asked = request("a", (1, 2, 3, 4, 5), max_tokens=9, n=3)
    handoff = source.handoff(asked)
    assert handoff.first_tokens == tuple(alone(asked, index)[0][0] for index in range(3))
    assert (len(handoff.block_hashes), handoff.token_ids, handoff.expires_in_s) == (2, asked.token_ids, 10.0)
    assert source.num_held == 3
    source.prefills.release(A)
    source.prefills.release(A)
    assert (source.num_held, source.num_aborts) == (0, 0)


def ends_at_once() -> tuple[int, ...]:
    """A prompt whose answer is EOS."""
    found = ((first, second) for first in range(50) for second in range(50))
    return next(ids for ids in found if alone(request("a", ids, ignore_eos=False), 0)[0][0] == EOS)


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 1},
        {"max_tokens": 9, "prompt_logprobs": 0},
        {"prompt": ends_at_once(), "max_tokens": 9, "ignore_eos": False},
    ],
    ids=["an only token", "figures are wanted", "an end"],
)
def test_first_tokens_that_decode_must_emit_are_withheld(given: dict[str, Any]) -> None:
    prompt = given.pop("prompt", (1, 2, 3))
    assert Source().handoff(request("a", prompt, **given)).first_tokens is None


def test_blocks_are_let_go_when_their_time_is_over() -> None:
    source = Source()
    source.handoff(request("a", (1, 2, 3), max_tokens=9))
    source.now = 4.0
    source.found.clear()
    source.handoff(request("b", (4, 5, 6, 7, 8), max_tokens=9))
    assert source.prefills.next_expiry == 10.0
    source.now = 9.9
    source.prefills.expire()
    assert source.num_held == 5
    source.now = 10.0
    source.prefills.expire()
    assert (source.num_held, source.prefills.next_expiry) == (3, 14.0)
    source.prefills.close(STOPPED)
    assert (source.num_held, source.prefills.next_expiry) == (0, None)


def test_a_released_prompt_is_not_computed() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9))
    source.prefills.release(A)
    assert (source.num_aborts, source.lab.scheduler.has_work) == (1, False)
    (told,) = source.found
    assert isinstance(told, ErrorInfo)
    assert told.code == Cancelled.code


def test_a_failure_is_reported_and_leaves_nothing_of_the_choices_before() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9, n=2))
    assert all(source.prefills.consume_token(one) for one in source.lab.step())
    assert source.num_held, "the first choice has ended, and its blocks are kept"
    source.lab.scheduler.abort(A)
    assert source.prefills.fail(A, STOPPED)
    assert not source.prefills.fail(A, STOPPED)
    assert (source.found, source.num_held) == ([STOPPED], 0)


def test_a_prompt_must_be_one_that_could_be_answered_here() -> None:
    source = Source()
    with pytest.raises(InvalidRequest):
        source.start(request("a", (1, 2, 3), max_tokens=10_000))
    assert not source.prefills.num_in_progress


def test_tokens_of_others_are_left_alone() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9))
    source.lab.scheduler.add_request(request("b", (4, 5, 6), max_tokens=1))
    assert [source.prefills.consume_token(one) for one in source.lab.step()] == [True, False]


# --- blocks as they come

LONG = tuple(range(1, 12))
"""Five full blocks and a token."""


def in_chunks(num_blocks: int = 32) -> Source:
    """Two blocks of a prompt in a step."""
    return Source(Lab(scheduler(num_blocks, limits(max_batch_tokens=4, max_num_seqs=3))))


def test_blocks_are_reported_step_by_step_and_once_more_at_the_end() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9))
    source.watch(0)
    assert not source.told, "nothing is computed yet"
    for _ in range(3):
        source.step()
        if source.block_counts:
            source.watch(source.block_counts[-1])
    assert source.block_counts == [2, 4, 5, 5]
    kept = source.lab.scheduler.holds.find(A)
    assert kept is not None
    last = source.told[-1]
    assert isinstance(last, HeldKv)
    assert (list(last.blocks), list(last.keys)) == (kept[0][:5], kept[1].keys)
    assert all(
        each.blocks == last.blocks[: len(each.blocks)] for each in source.told if isinstance(each, HeldKv)
    )
    assert not source.prefills.has_watchers


def test_only_more_than_is_known_is_reported() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9))
    source.watch(3)
    source.step()
    assert not source.told
    source.step()
    assert source.block_counts == [4]


def test_what_was_found_in_the_cache_is_reported_before_the_step_is_computed() -> None:
    source = in_chunks()
    source.lab.scheduler.add_request(request("before", LONG[:6], max_tokens=1))
    source.lab.run()
    source.start(request("a", LONG, max_tokens=9))
    source.watch(0)
    assert source.lab.begin() is not None
    source.prefills.notify_watchers()
    assert source.block_counts == [3]
    source.watch(3)
    assert source.block_counts == [3], "the step that computes the next ones is still under way"
    source.lab.finish()
    source.prefills.notify_watchers()
    assert source.block_counts == [3, 5]


def test_all_is_reported_at_once_when_the_first_choice_has_it() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9, n=2))
    for _ in range(3):
        source.step()
    assert not source.found, "the other choice has no token yet"
    source.watch(5)
    assert source.block_counts == [5]


def test_who_waits_for_a_prompt_that_is_let_go_hears_of_it() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9))
    source.watch(100)
    source.step()
    source.prefills.release(A)
    assert (source.errors, source.num_held) == ([NotFound.code], 0)
    for unknown in (A, RequestId("unknown")):
        with pytest.raises(NotFound):
            source.watch(0, unknown)
    assert not source.prefills.has_watchers


def test_one_waits_at_a_time() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9))
    for _ in range(3):
        source.watch(0)
    assert source.errors == [Cancelled.code] * 2
    source.step()
    assert source.block_counts == [2]


@pytest.mark.parametrize("num_steps", [1, 3], ids=["in the middle", "after the first choice"])
def test_what_others_read_of_a_prompt_that_fails_stays_until_it_is_released(num_steps: int) -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9, n=2))
    for _ in range(num_steps):
        source.step()
    source.watch(0)
    (told,) = source.told
    assert isinstance(told, HeldKv)
    source.watch(100 if num_steps == 1 else 0)
    source.lab.scheduler.abort(A)
    assert source.prefills.fail(A, STOPPED)
    source.lab.scheduler.check_integrity()
    pool = source.lab.scheduler.pool
    assert all(pool.num_holders(block) == 1 for block in told.blocks), "another request may write there"
    assert source.errors == [NotFound.code] * (num_steps == 1)
    with pytest.raises(NotFound):
        source.watch(0)
    with pytest.raises(InvalidRequest, match="already"):
        source.start(request("a", LONG, max_tokens=9))
    assert source.prefills.next_expiry == 10.0
    source.prefills.release(A)
    assert (source.num_held, source.prefills.next_expiry) == (0, None)


def test_unreleased_blocks_of_a_failed_prompt_expire() -> None:
    source = in_chunks()
    source.start(request("a", LONG, max_tokens=9))
    source.step()
    source.watch(0)
    source.lab.scheduler.abort(A)
    source.prefills.fail(A, STOPPED)
    assert source.num_held == 2
    source.now = 10.0
    source.prefills.expire()
    assert source.num_held == 0


@pytest.mark.parametrize("is_reported", [True, False])
@pytest.mark.parametrize(("num_others", "num_blocks"), [(1, 10), (2, 14)])
def test_a_prompt_that_others_read_is_not_preempted(
    num_others: int, num_blocks: int, is_reported: bool
) -> None:
    """Though those before it are in need of blocks: they yield, and it goes on."""
    source = in_chunks(num_blocks)
    others = [request(f"x{number}", (20 + number, 21, 22), max_tokens=16) for number in range(num_others)]
    for other in others:
        source.lab.scheduler.add_request(other)
    source.step()
    source.start(request("a", tuple(range(1, 14)), max_tokens=2))
    prompt = source.lab.scheduler._groups[A].first
    for _ in range(40):
        if source.found:
            break
        source.step()
        if is_reported:
            source.watch(max(source.block_counts, default=0))
    assert source.found
    assert source.lab.scheduler.planner.num_preemptions, "no sequence was preempted"
    assert bool(prompt.num_preemptions) != is_reported
    last = source.lab.scheduler.holds.find(A)
    assert last is not None
    for each in source.told:
        assert not isinstance(each, HeldKv) or list(each.blocks) == last[0][: len(each.blocks)]
    source.prefills.release(A)
    source.lab.run()
    for other in others:
        source.lab.check_answer(other)


@pytest.mark.parametrize("how", ["released", "expired", "closed", "submitted"])
def test_blocks_that_came_wait_for_their_request_as_long_as_those_for_others(how: str) -> None:
    source = Source()
    scheduler_ = source.lab.scheduler
    asked = request("b", (6,) * 5)
    source.handoff(request("a", max_tokens=4))
    source.now = 3.0
    adopted = scheduler_.holds.allocate_incoming(names_of(asked, list(asked.token_ids), 2))
    scheduler_.incoming.commit(adopted, None, asked.request_id, source.prefills.expires_at)
    assert (source.num_held, source.prefills.next_expiry) == (4, 10.0)
    source.prefills.release(A)
    assert (source.num_held, source.prefills.next_expiry) == (2, 13.0)
    if how == "released":
        source.prefills.release(asked.request_id)
    elif how == "closed":
        source.prefills.close(STOPPED)
    elif how == "expired":
        source.now = 12.9
        source.prefills.expire()
        assert source.num_held == 2
        source.now = 13.0
        source.prefills.expire()
    else:
        scheduler_.add_request(asked)
        source.now = 100.0
        source.prefills.expire()
        source.prefills.release(asked.request_id)
        assert source.num_held == 2, "it has come"
        scheduler_.abort(asked.request_id)
    assert (source.num_held, source.prefills.next_expiry) == (0, None)
