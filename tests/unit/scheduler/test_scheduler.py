"""The scheduler: what a step does, who goes first, who yields."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.kv.names import Mirror, seen
from tests.unit.scheduler.scheduler_lab import EOS, Lab, alone, limits, request, scheduler

from kvolt.core.errors import InvalidRequest, KvoltError, Overloaded
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Handoff
from kvolt.scheduler.scheduler import StepPlan, Work
from kvolt.scheduler.sequence import HEAD_START
from kvolt.scheduler.step_plan import PlainBatch, Scheduling
from kvolt.scheduler.step_planner import PROMOTED_ONE_IN


def outline(plan: StepPlan | None) -> tuple[list[tuple[str, int, int]], list[tuple[str, int, int]]]:
    """Who decodes and who prefills: request, start, number of tokens."""
    assert plan is not None

    def lines(works: list[Work]) -> list[tuple[str, int, int]]:
        return [(work.sequence.request.request_id, work.start, work.num_tokens) for work in works]

    return lines(plan.decodes), lines(plan.prefills)


def steps(lab: Lab, count: int) -> None:
    for _ in range(count):
        lab.step()


def test_a_request_prefills_then_decodes_and_leaves_nothing() -> None:
    lab = Lab(scheduler())
    one = request("a", (1, 2, 3), max_tokens=3)
    lab.scheduler.add_request(one)
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting, lab.scheduler.has_work) == (0, 1, True)
    outlines = []
    while lab.scheduler.has_work:
        outlines.append(outline(lab.begin()))
        lab.finish()
    assert outlines == [([], [("a", 0, 3)]), ([("a", 3, 1)], []), ([("a", 4, 1)], [])]
    lab.check_answer(one)
    assert lab.scheduler.plan() is None
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting, lab.scheduler.pool.num_used) == (0, 0, 0)
    lab.scheduler.check_integrity()


def test_a_long_prompt_is_cut_to_the_budget_and_samples_once() -> None:
    lab = Lab(scheduler(bounds=limits(max_batch_tokens=4)))
    one = request("a", tuple(range(1, 11)), max_tokens=1)
    lab.scheduler.add_request(one)
    found = []
    while lab.scheduler.has_work:
        found.append((outline(lab.begin())[1], len(lab.finish())))
    assert found == [([("a", 0, 4)], 0), ([("a", 4, 4)], 0), ([("a", 8, 2)], 1)]
    lab.check_answer(one)


def test_decodes_run_first_and_prefills_share_what_is_left() -> None:
    lab = Lab(scheduler(bounds=limits(max_batch_tokens=6)))
    lab.scheduler.add_request(request("a", (1, 2), max_tokens=9))
    lab.step()
    lab.scheduler.add_request(request("b", (3, 3, 3), max_tokens=2))
    lab.scheduler.add_request(request("c", (4, 4, 4, 4), max_tokens=2))
    assert outline(lab.begin()) == ([("a", 2, 1)], [("b", 0, 3), ("c", 0, 2)])
    lab.finish()
    assert outline(lab.begin()) == ([("a", 3, 1), ("b", 3, 1)], [("c", 2, 2)])


def test_prompts_first_lets_answers_wait_until_no_prompt_can_be_computed() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=3, max_batch_tokens=6), scheduling=Scheduling.SGLANG))
    asked = [request("a", (1, 2), max_tokens=3)]
    asked += [request(name, (token,) * 7, max_tokens=2) for name, token in (("b", 3), ("c", 4), ("d", 5))]
    lab.scheduler.add_request(asked[0])
    outlines = [outline(lab.begin())]
    lab.finish()
    for one in asked[1:]:
        lab.scheduler.add_request(one)
    while lab.scheduler.has_work:
        outlines.append(outline(lab.begin()))
        lab.finish()
    assert outlines == [
        ([], [("a", 0, 2)]),
        ([], [("b", 0, 6)]),
        ([], [("b", 6, 1), ("c", 0, 5)]),
        ([], [("c", 5, 2)]),
        ([("a", 2, 1), ("b", 7, 1), ("c", 7, 1)], []),  # there is no place for d before some of them end
        ([], [("d", 0, 6)]),
        ([], [("d", 6, 1)]),
        ([("a", 3, 1), ("d", 7, 1)], []),
    ]
    for one in asked:
        lab.check_answer(one)


def test_prompts_first_does_not_let_in_with_answers_what_their_victims_made_room_for() -> None:
    lab = Lab(scheduler(num_blocks=6, bounds=limits(block_size=1), scheduling=Scheduling.SGLANG))
    asked = [request("a", (1, 2), max_tokens=5), request("b", (3,), max_tokens=3)]
    for one in asked:
        lab.scheduler.add_request(one)
    while lab.scheduler.has_work:
        plan = lab.begin()
        assert plan is not None
        assert not (plan.decodes and plan.prefills)
        lab.finish()
        lab.scheduler.check_integrity()
    assert lab.scheduler.planner.num_preemptions > 0
    for one in asked:
        lab.check_answer(one)


def test_the_figures_of_a_step_are_those_of_the_step_model() -> None:
    lab = Lab(scheduler(bounds=limits(max_batch_tokens=6)))
    lab.scheduler.add_request(request("a", (1, 2), max_tokens=9))
    steps(lab, 2)
    lab.scheduler.add_request(request("b", (3,) * 7, max_tokens=2))
    plan = lab.begin()
    assert plan is not None
    assert plan.stats == StepStats(batch=1, prefill_tokens=5, prefill_context=25, context_tokens=4)
    lab.finish()
    plan = lab.begin()
    assert plan is not None
    assert plan.stats == StepStats(batch=1, prefill_tokens=2, prefill_context=14, context_tokens=5)


def test_a_cached_prompt_computes_its_last_block_only() -> None:
    lab = Lab(scheduler())
    first, second = (request(name, (1, 2, 3, 4, 5, 6), max_tokens=2) for name in "ab")
    lab.scheduler.add_request(first)
    lab.run()
    lab.scheduler.add_request(second)
    assert outline(lab.begin()) == ([], [("b", 4, 2)])
    lab.finish()
    lab.run()
    lab.check_answer(second)
    assert lab.cached == {("a", 0): 0, ("b", 0): 4}


def test_another_tenant_finds_nothing() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", (1, 2, 3, 4, 5), max_tokens=1))
    lab.run()
    lab.scheduler.add_request(request("b", (1, 2, 3, 4, 5), max_tokens=1, salt="other"))
    assert outline(lab.begin()) == ([], [("b", 0, 5)])


def test_an_answer_is_cached_like_a_prompt() -> None:
    lab = Lab(scheduler())
    first = request("a", (1, 2, 3), max_tokens=6)
    lab.scheduler.add_request(first)
    lab.run()
    said, _ = alone(first)
    lab.scheduler.add_request(request("b", (*first.token_ids, *said, 1, 1), max_tokens=1))
    assert outline(lab.begin()) == ([], [("b", 8, 3)])  # of 9 tokens the last was not computed


def test_tokens_of_before_are_prefilled_and_cached_counts_the_prompt_only() -> None:
    lab = Lab(scheduler())
    first = request("a", (1, 2, 3, 4), max_tokens=8)
    lab.scheduler.add_request(first)
    lab.run()
    said, _ = alone(first)
    moved = request("b", (1, 2, 3, 4), max_tokens=8, prior_tokens=tuple(said[:5]))
    lab.scheduler.add_request(moved)
    assert outline(lab.begin()) == ([], [("b", 8, 1)])
    lab.finish()
    lab.run()
    assert lab.said["b", 0] == said
    assert lab.cached["b", 0] == 4


def test_prompt_logprobs_take_nothing_from_the_cache_for_the_first_choice() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", (1, 2, 3, 4, 5), max_tokens=1))
    lab.run()
    asking = request("b", (1, 2, 3, 4, 5), max_tokens=2, n=2, prompt_logprobs=1)
    lab.scheduler.add_request(asking)
    assert outline(lab.begin()) == ([], [("b", 0, 5)])
    lab.finish()
    assert outline(lab.begin()) == ([("b", 5, 1)], [("b", 4, 1)])
    lab.finish()
    lab.run()
    lab.check_answer(asking)


def test_choices_wait_for_the_first_ones_prompt_and_share_its_blocks() -> None:
    lab = Lab(scheduler(bounds=limits(max_batch_tokens=4)))
    one = request("a", (1, 2, 3, 4, 5), max_tokens=3, n=3)
    lab.scheduler.add_request(one)
    assert lab.scheduler.num_waiting == 3
    assert outline(lab.begin()) == ([], [("a", 0, 4)])
    lab.finish()
    assert outline(lab.begin()) == ([], [("a", 4, 1)])
    lab.finish()
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting) == (1, 2)
    assert outline(lab.begin()) == ([("a", 5, 1)], [("a", 4, 1), ("a", 4, 1)])
    lab.scheduler.check_integrity()
    assert lab.scheduler.pool.num_used == 2 + 3
    lab.finish()
    lab.run()
    lab.check_answer(one)
    assert [lab.cached["a", index] for index in range(3)] == [0, 4, 4]


def test_the_batch_has_so_many_places() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=2)))
    for name in "abc":
        lab.scheduler.add_request(request(name, (1,), max_tokens=2))
    assert outline(lab.begin())[1] == [("a", 0, 1), ("b", 0, 1)]
    lab.finish()
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting) == (2, 1)
    steps(lab, 1)
    assert outline(lab.begin()) == ([], [("c", 0, 1)])


def test_waiting_requests_go_by_priority_then_by_arrival() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=1)))
    for name, priority in (("a", 0), ("b", 5), ("c", 0), ("d", 5), ("e", -1)):
        lab.scheduler.add_request(request(name, (1,), max_tokens=1, priority=priority))
    order = []
    while lab.scheduler.has_work:
        order += [one.sequence.request.request_id for one in lab.step()]
    assert order == ["b", "d", "a", "c", "e"]


def admitted_under_a_flood(lab: Lab, awaited: set[str], new: tuple[int, ...] = (9,)) -> list[str]:
    """Names in the order of their first tokens, until those awaited have theirs. Two of priority 1 always wait."""
    names: list[str] = []
    for number in range(500):
        while sum(each.request.routing.priority == 1 for each in lab.scheduler.planner.waiting) < 2:
            count = len(names) + lab.scheduler.num_waiting
            lab.scheduler.add_request(request(f"high {number} {count}", new, max_tokens=4, priority=1))
        names += [each.sequence.request.request_id for each in lab.step() if each.is_first]
        lab.scheduler.check_integrity()
        if awaited <= set(names):
            return names
    raise AssertionError(f"{awaited - set(names)} wait for ever")


@pytest.mark.parametrize("scheduling", list(Scheduling))
def test_one_of_eight_admissions_is_the_oldest_of_a_lower_priority(scheduling: Scheduling) -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=1), scheduling=scheduling))
    for name, priority in (("lowest", -100), ("low", 0), ("newest", 0)):
        lab.scheduler.add_request(request(name, (1,), priority=priority))
    names = admitted_under_a_flood(lab, {"lowest", "low", "newest"})
    assert [names.index(name) + 1 for name in ("lowest", "low", "newest")] == [
        PROMOTED_ONE_IN,
        2 * PROMOTED_ONE_IN,
        3 * PROMOTED_ONE_IN,
    ]


def test_a_large_request_of_low_priority_gets_its_blocks() -> None:
    """Once it is promoted, later ones of higher priority do not take the blocks that are released for it."""
    lab = Lab(scheduler(num_blocks=8))
    lab.scheduler.add_request(request("large", (2,) * 12, max_tokens=4))
    names = admitted_under_a_flood(lab, {"large"}, new=(9, 9, 9))
    assert len(names) <= PROMOTED_ONE_IN


def test_a_promoted_request_does_not_yield_its_blocks_to_later_ones() -> None:
    lab = Lab(scheduler(num_blocks=12, bounds=limits(max_num_seqs=2)))
    low = request("low", (2, 2, 2), max_tokens=16)
    lab.scheduler.add_request(low)
    admitted_under_a_flood(lab, {"low"})
    [sequence] = [one for one in lab.scheduler.planner.running if one.request is low]
    for number in range(40):
        if not lab.scheduler.num_waiting:
            lab.scheduler.add_request(request(f"late {number}", (3,) * 5, max_tokens=12, priority=1))
        lab.step()
    assert (RequestId("low"), 0) in lab.ends
    assert lab.scheduler.planner.num_preemptions > sequence.num_preemptions == 0
    lab.check_answer(low)


def test_answers_that_have_begun_go_before_prompts() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=1)))
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=(5,))
    for each in (
        request("prompt", (1,)),
        request("resumed", (2,), prior_tokens=(3,)),
        replace(request("handed over", (4,)), handoff=handoff),
        replace(request("to be told", (4,)), handoff=replace(handoff, first_tokens=None)),
        request("urgent prompt", (1,), priority=1),
    ):
        lab.scheduler.add_request(each)
    waiting = [sequence.request.request_id for sequence in lab.scheduler.planner.waiting]
    assert waiting == ["urgent prompt", "resumed", "handed over", "prompt", "to be told"]


@pytest.mark.parametrize("first_tokens", [None, (7,)])
def test_an_answer_ends_however_many_requests_come_after_it(first_tokens: tuple[int, ...] | None) -> None:
    """Also one whose prompt was computed here, among handoffs: it is neither preempted for them nor behind them."""
    lab = Lab(scheduler(num_blocks=16, bounds=limits(max_num_seqs=4)))
    lab.scheduler.add_request(request("a", (1, 2, 3), max_tokens=24))
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=first_tokens)
    for number in range(200):
        if number >= 3 and lab.scheduler.num_waiting < 3:
            other = request(f"r{number}", (number, 2, 3), max_tokens=24)
            lab.scheduler.add_request(replace(other, handoff=handoff))
        lab.step()
        if (RequestId("a"), 0) in lab.ends:
            return
    raise AssertionError("the answer did not end")


def test_handoffs_do_not_starve_a_prompt() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=1, max_waiting=1000)))
    handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"), first_tokens=(7,))
    for number in range(3 * HEAD_START):
        if number == 1:
            lab.scheduler.add_request(request("a", (1,)))
        lab.scheduler.add_request(replace(request(f"r{number}", (2,)), handoff=handoff))
    waiting = [sequence.request.request_id for sequence in lab.scheduler.planner.waiting]
    assert waiting.index(RequestId("a")) == HEAD_START


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    lab = Lab(scheduler(num_blocks=6))
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=4))
    lab.step()
    lab.scheduler.add_request(request("large", (2,) * 10, max_tokens=1))
    lab.scheduler.add_request(request("small", (3,), max_tokens=1))
    while lab.scheduler.num_waiting == 2:
        prefills = outline(lab.begin())[1]
        assert "small" not in [name for name, *_ in prefills]
        lab.finish()
    assert ("a", 0) in lab.ends


def test_an_admission_leaves_a_block_for_each_that_runs() -> None:
    lab = Lab(scheduler(num_blocks=5))
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=6))  # 2 blocks now, 4 in the end
    lab.step()
    lab.scheduler.add_request(
        request("b", (2, 2, 2, 2, 2), max_tokens=1)
    )  # 3 blocks: they fit, but without the one more
    assert outline(lab.begin()) == ([("a", 3, 1)], [])
    lab.finish()
    lab.run()
    assert lab.scheduler.planner.num_preemptions == 0


def test_what_it_finds_in_the_cache_is_no_longer_free() -> None:
    lab = Lab(scheduler(num_blocks=6))
    lab.scheduler.add_request(request("cached", (9, 9, 9, 9, 9), max_tokens=1))
    lab.run()
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=6))
    lab.step()
    asking = request("b", (9, 9, 9, 9, 5, 5, 5, 5), max_tokens=1)
    lab.scheduler.add_request(
        asking
    )  # 4 blocks, 2 of them cached: the other 2 would leave none for the first
    assert outline(lab.begin()) == ([("a", 3, 1)], [])
    lab.scheduler.check_integrity()
    lab.finish()
    lab.run()
    lab.check_answer(asking)
    assert lab.scheduler.planner.num_preemptions == 0


def test_the_last_to_come_yields_its_blocks_and_says_the_same() -> None:
    lab = Lab(scheduler(num_blocks=7))
    first = request("a", (1, 1, 1), max_tokens=10)
    second = request("b", (2, 2, 2), max_tokens=10)
    lab.scheduler.add_request(first)
    lab.scheduler.add_request(second)
    while not lab.scheduler.planner.num_preemptions:
        lab.step()
        lab.scheduler.check_integrity()
    assert (lab.scheduler.num_running, lab.scheduler.num_waiting) == (1, 1)
    assert ("a", 0) not in lab.ends
    lab.run()
    for one in (first, second):
        lab.check_answer(one)
    assert list(lab.ends) == [("a", 0), ("b", 0)]
    assert lab.scheduler.pool.num_used == 0


def test_who_has_priority_does_not_yield() -> None:
    lab = Lab(scheduler(num_blocks=7))
    lab.scheduler.add_request(request("low", (1, 1, 1), max_tokens=10))
    lab.step()
    lab.scheduler.add_request(request("high", (2, 2, 2), max_tokens=10, priority=1))
    lab.run()
    assert lab.scheduler.planner.num_preemptions
    assert list(lab.ends) == [("high", 0), ("low", 0)]


def test_a_preempted_sequence_goes_on_behind_what_is_still_cached() -> None:
    lab = Lab(scheduler(num_blocks=7, bounds=limits(max_batch_tokens=64)))
    second = request("b", (2, 2, 2), max_tokens=10)
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=10))
    lab.scheduler.add_request(second)
    while not lab.scheduler.planner.num_preemptions:
        lab.step()
    num_said = len(lab.said["b", 0])
    lab.scheduler.abort(RequestId("a"))
    _, prefills = outline(lab.begin())
    assert prefills[0][0] == "b"
    assert prefills[0][1] > 0
    assert prefills[0][1] + prefills[0][2] == 3 + num_said
    lab.finish()
    lab.run()
    lab.check_answer(second)
    assert lab.cached["b", 0] == 0


def test_an_abort_during_a_step_keeps_its_blocks_until_the_step_is_done() -> None:
    lab = Lab(scheduler(num_blocks=4))
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=4))
    lab.begin()
    assert lab.scheduler.abort(RequestId("a"))
    assert not lab.scheduler.has_work
    assert lab.scheduler.pool.num_used == 2
    lab.scheduler.check_integrity()
    assert lab.finish() == []
    assert lab.scheduler.pool.num_used == 0
    assert lab.scheduler.take_changes() == ()  # blocks of an aborted request are not cached
    lab.scheduler.check_integrity()


def test_an_abort_between_steps_frees_at_once() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", (1, 1, 1), max_tokens=4, n=3))
    steps(lab, 2)
    assert lab.scheduler.abort(RequestId("a"))
    assert (lab.scheduler.pool.num_used, lab.scheduler.has_work) == (0, False)
    assert not lab.scheduler.abort(RequestId("a"))
    lab.scheduler.check_integrity()


def test_others_get_their_own_tokens_when_one_is_aborted_in_their_midst() -> None:
    lab = Lab(scheduler())
    kept = [request(name, (1, 2, int(name)), max_tokens=5) for name in "135"]
    for one in (
        kept[0],
        request("2", (2,), max_tokens=5),
        kept[1],
        request("4", (4,) * 9, max_tokens=5),
        kept[2],
    ):
        lab.scheduler.add_request(one)
    lab.step()
    lab.begin()
    lab.scheduler.abort(RequestId("2"))
    lab.scheduler.abort(RequestId("4"))
    lab.finish()
    lab.run()
    for one in kept:
        lab.check_answer(one)


def test_only_what_has_not_started_is_withdrawn() -> None:
    lab = Lab(scheduler(bounds=limits(max_num_seqs=1)))
    lab.scheduler.add_request(request("a", (1,), max_tokens=3, n=2))
    lab.scheduler.add_request(request("b", (1,), max_tokens=3, n=2))
    lab.begin()
    assert not lab.scheduler.withdraw(RequestId("a"))
    assert lab.scheduler.withdraw(RequestId("b"))
    assert not lab.scheduler.withdraw(RequestId("b"))
    lab.finish()
    lab.run()
    assert set(lab.ends) == {("a", 0), ("a", 1)}


def test_a_preempted_request_has_started() -> None:
    lab = Lab(scheduler(num_blocks=7))
    for name in "ab":
        lab.scheduler.add_request(request(name, (1, 1, ord(name)), max_tokens=10))
    while not lab.scheduler.planner.num_preemptions:
        lab.step()
    assert not lab.scheduler.withdraw(RequestId("b"))


def test_a_discarded_step_is_planned_again() -> None:
    lab = Lab(scheduler())
    one = request("a", (1, 2, 3), max_tokens=3)
    lab.scheduler.add_request(one)
    plan = lab.begin()
    assert plan is not None
    before = outline(plan)
    lab.scheduler.discard(plan)
    assert outline(lab.begin()) == before
    lab.finish()
    lab.run()
    lab.check_answer(one)


def test_clearing_drops_the_cache_but_no_running_request() -> None:
    lab = Lab(scheduler())
    one = request("a", (1, 2, 3, 4), max_tokens=6)
    mirror = Mirror()
    lab.scheduler.add_request(one)
    steps(lab, 2)
    assert lab.scheduler.clear() == 2
    mirror.apply(lab.scheduler.take_changes())
    lab.run()
    lab.check_answer(one)
    mirror.apply(lab.scheduler.take_changes())
    assert mirror.positions == seen(lab.scheduler.pool) == {}
    lab.scheduler.add_request(request("b", (1, 2, 3, 4), max_tokens=1))
    assert outline(lab.begin()) == ([], [("b", 0, 4)])


def test_events_tell_a_prompt_as_one_run() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a", (1, 2, 3, 4, 5), max_tokens=1))
    lab.run()
    changes = lab.scheduler.take_changes()
    assert changes == tuple(lab.scheduler.pool.contents())
    assert [len(change.sequence_hashes) for change in lab.scheduler.pool.contents()] == [2]


def test_eos_of_the_card_ends_a_request_unless_it_is_ignored() -> None:
    ends = {}
    for ignore_eos in (False, True):
        lab = Lab(scheduler())
        one = request("a", (1, 5), max_tokens=60, ignore_eos=ignore_eos)
        lab.scheduler.add_request(one)
        lab.run()
        lab.check_answer(one)
        ends[ignore_eos] = (lab.said["a", 0][-1] == EOS, len(lab.said["a", 0]))
    assert ends[False][0]
    assert ends[False][1] < ends[True][1] == 60


def test_what_cannot_run_is_refused_and_leaves_nothing() -> None:
    bounds = limits(max_waiting=2)
    one = scheduler(num_blocks=4, bounds=bounds)
    one.add_request(request("a"))
    with pytest.raises(InvalidRequest, match="already"):
        one.add_request(request("a"))
    with pytest.raises(InvalidRequest, match="blocks"):
        one.add_request(request("b", (1,) * 6, max_tokens=4))
    with pytest.raises(InvalidRequest):
        one.add_request(request("b", (1, -2)))
    with pytest.raises(InvalidRequest):
        one.add_request(request("b", salt="\ud800"))
    one.add_request(request("b", n=5))
    with pytest.raises(Overloaded) as caught:
        one.add_request(request("c"))
    assert caught.value.fields["limit"] == 2
    assert one.num_waiting == 6
    one.check_integrity()


def test_steps_follow_one_another() -> None:
    one = scheduler()
    one.add_request(request("a"))
    plan = one.plan()
    assert plan is not None
    with pytest.raises(KvoltError, match="a step is in flight"):
        one.plan()
    with pytest.raises(KvoltError, match="2 tokens"):
        one.commit(plan, [1, 2])
    one.commit(plan, [1])
    with pytest.raises(KvoltError, match="not in flight"):
        one.discard(plan)


def test_integrity_sees_a_lost_block() -> None:
    lab = Lab(scheduler())
    lab.scheduler.add_request(request("a"))
    lab.step()
    lab.scheduler.pool.allocate(1)
    with pytest.raises(AssertionError, match="in the pool"):
        lab.scheduler.check_integrity()


def test_plain_tokens_are_separated_from_other_outputs() -> None:
    one = scheduler()
    for name, choices, logprobs in (("plain", 1, None), ("two", 2, None), ("figures", 1, 0)):
        asked = request(name, (1, 2, 3), max_tokens=3, n=choices)
        one.add_request(replace(asked, sampling=replace(asked.sampling, logprobs=logprobs)))
    batch = PlainBatch()
    told: list[tuple[list[str], tuple[str, ...]]] = []
    while (plan := one.plan()) is not None:
        num_samples = len(plan.decodes) + sum(work.samples for work in plan.prefills)
        advanced = one.commit(plan, [7] * num_samples, batch)
        told.append(([each.sequence.request.request_id for each in advanced], batch.drain()[0]))
    assert told == [
        (["plain", "two", "figures"], ()),
        (["two", "figures", "two"], ("plain",)),
        (["plain", "two", "two", "figures"], ()),
        (["two"], ()),
    ]
