"""Prompts computed for others: what a handoff says, and how long its blocks stay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.unit.engines.scheduler_lab import EOS, Lab, alone, request, scheduler

from kvolt.core.errors import Cancelled, ErrorInfo, InvalidRequest, to_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Handoff, Request
from kvolt.engines.prefills import Prefills

A = RequestId("a")
STOPPED = to_info(Cancelled("stopped"))


@dataclass
class Source:
    """A scheduler that computes prompts for others, and its clock."""

    lab: Lab = field(default_factory=lambda: Lab(scheduler()))
    now: float = 0.0
    found: list[Handoff | ErrorInfo] = field(default_factory=list)
    num_aborts: int = 0

    def __post_init__(self) -> None:
        self.prefills = Prefills(self.lab.scheduler, self._abort, lambda: self.now, hold_s=10.0)

    def _abort(self, request_id: RequestId) -> None:
        self.num_aborts += 1
        self.lab.scheduler.abort(request_id)

    def start(self, asked: Request) -> None:
        self.prefills.start(
            asked, lambda short: self.lab.scheduler.add(short, keep_blocks=True), self.found.append
        )

    def run(self) -> None:
        while self.lab.scheduler.has_work:
            assert all(self.prefills.take(one) for one in self.lab.step())

    def handoff(self, asked: Request) -> Handoff:
        self.start(asked)
        self.run()
        (found,) = self.found
        assert isinstance(found, Handoff)
        return found

    @property
    def num_held(self) -> int:
        return self.lab.scheduler.num_used_blocks


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
def test_what_decode_must_tell_is_not_told_before(given: dict[str, Any]) -> None:
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


def test_a_prompt_that_nobody_wants_any_more_is_not_computed() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9))
    source.prefills.release(A)
    assert (source.num_aborts, source.found, source.lab.scheduler.has_work) == (1, [], False)


def test_a_failure_is_told_and_leaves_nothing_of_the_choices_before() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9, n=2))
    assert all(source.prefills.take(one) for one in source.lab.step())
    assert source.num_held, "the first choice has ended, and its blocks are kept"
    source.lab.scheduler.abort(A)
    assert source.prefills.fail(A, STOPPED)
    assert not source.prefills.fail(A, STOPPED)
    assert (source.found, source.num_held) == ([STOPPED], 0)


def test_a_prompt_must_be_one_that_could_be_answered_here() -> None:
    source = Source()
    with pytest.raises(InvalidRequest):
        source.start(request("a", (1, 2, 3), max_tokens=10_000))
    assert not source.prefills.num_open


def test_tokens_of_others_are_left_alone() -> None:
    source = Source()
    source.start(request("a", (1, 2, 3), max_tokens=9))
    source.lab.scheduler.add(request("b", (4, 5, 6), max_tokens=1))
    assert [source.prefills.take(one) for one in source.lab.step()] == [True, False]
