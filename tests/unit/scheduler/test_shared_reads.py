"""Shared reads: how much of a decode step's context is read for more than one sequence."""

from __future__ import annotations

from tests.unit.scheduler.scheduler_lab import Lab, limits, request, scheduler

from kvolt.core.ids import RequestId
from kvolt.scheduler.step_plan import Scheduling

PREFIX = (1, 2, 3, 4, 5, 6)


def shared_tokens(lab: Lab) -> tuple[int, int]:
    """Batch and shared tokens of the next step."""
    plan = lab.begin()
    assert plan is not None
    lab.finish()
    return plan.stats.batch, plan.stats.shared_tokens


def run(lab: Lab, count: int) -> None:
    for _ in range(count):
        lab.step()


def test_a_prefix_counts_once_for_each_reader_after_the_first() -> None:
    for scheduling in Scheduling:
        lab = Lab(scheduler(bounds=limits(block_size=2), scheduling=scheduling))
        lab.scheduler.add_request(request("a", (*PREFIX, 7), max_tokens=9))
        run(lab, 1)
        assert shared_tokens(lab) == (1, 0)
        lab.scheduler.add_request(request("b", (*PREFIX, 8), max_tokens=3))
        lab.scheduler.add_request(request("c", (*PREFIX, 9), max_tokens=9))
        run(lab, 1)
        assert shared_tokens(lab) == (3, 2 * len(PREFIX))
        run(lab, 1)  # b ends
        assert shared_tokens(lab) == (2, len(PREFIX))
        lab.scheduler.check_integrity()


def test_the_first_reader_may_leave_first() -> None:
    lab = Lab(scheduler(bounds=limits(block_size=2)))
    lab.scheduler.add_request(request("a", (*PREFIX, 7), max_tokens=9))
    run(lab, 2)
    lab.scheduler.add_request(request("b", (*PREFIX, 8), max_tokens=9))
    run(lab, 1)
    assert shared_tokens(lab) == (2, len(PREFIX))
    lab.scheduler.abort(RequestId("a"))
    assert shared_tokens(lab) == (1, 0)
    lab.scheduler.check_integrity()


def test_choices_of_one_request_share_its_prompt() -> None:
    lab = Lab(scheduler(bounds=limits(block_size=2)))
    lab.scheduler.add_request(request("a", (*PREFIX, 7), max_tokens=6, n=3))
    run(lab, 2)
    assert shared_tokens(lab) == (3, 2 * len(PREFIX))


def test_prompts_without_anything_in_common_share_nothing() -> None:
    lab = Lab(scheduler(bounds=limits(block_size=2)))
    lab.scheduler.add_request(request("a", PREFIX, max_tokens=6))
    lab.scheduler.add_request(request("b", PREFIX[::-1], max_tokens=6))
    run(lab, 1)
    assert shared_tokens(lab) == (2, 0)


def test_a_preempted_sequence_is_not_counted_until_it_decodes_again() -> None:
    lab = Lab(scheduler(num_blocks=8, bounds=limits(block_size=2)))
    first, second = request("a", PREFIX, max_tokens=8), request("b", PREFIX, max_tokens=8)
    lab.scheduler.add_request(first)
    run(lab, 2)
    lab.scheduler.add_request(second)
    while lab.scheduler.has_work:
        plan = lab.begin()
        assert plan is not None
        assert plan.stats.shared_tokens in ((0, 4, 6) if plan.stats.batch == 2 else (0,))
        lab.finish()
        lab.scheduler.check_integrity()
    assert lab.scheduler.planner.num_preemptions
    lab.check_answer(first)
    lab.check_answer(second)
