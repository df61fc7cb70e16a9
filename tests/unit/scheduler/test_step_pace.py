"""Step times: what a plan may take, and how real steps correct the prediction."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.scheduler.scheduler_lab import Lab, limits, request, scheduler

from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.scheduler.step_pace import LONGEST_STEP_S, SHARED_PROMPTS_S, SHARED_STEP_S, StepPace
from kvolt.scheduler.step_plan import Scheduling, StepPlan

SLOW = LatencyModel(base_s=0.02, prefill_token_s=0.005, prefill_context_s=1e-6, batch_s=0.01)
"""About a small model on one core: 1,000 prompt tokens take six seconds."""
BOUNDS = limits(max_num_seqs=16, max_batch_tokens=2048, context_length=2048, block_size=16)


def slow_lab(model: LatencyModel = SLOW, scheduling: Scheduling = Scheduling.VLLM) -> Lab:
    lab = Lab(scheduler(512, BOUNDS, scheduling))
    lab.scheduler.planner.pace = StepPace(model)
    return lab


def planned(lab: Lab) -> StepPlan:
    plan = lab.begin()
    assert plan is not None
    lab.finish()
    return plan


def test_a_prompt_alone_is_cut_into_steps_of_a_second() -> None:
    lab = slow_lab()
    asked = request("long", (1,) * 1464, max_tokens=1)
    lab.scheduler.add_request(asked)
    plans = []
    while lab.scheduler.has_work:
        plans.append(planned(lab))
    times = [SLOW.step_s(plan.stats) for plan in plans]
    assert max(times) <= LONGEST_STEP_S
    assert min(times[:-1]) > 0.8 * LONGEST_STEP_S, "no more cuts than needed"
    assert all(not work.num_tokens % 16 for plan in plans[:-1] for work in plan.prefills)
    lab.check_answer(asked)


def test_no_step_with_a_prompt_is_above_the_limit_while_others_decode() -> None:
    lab = slow_lab()
    short = [request(f"short-{number}", (2, 3), max_tokens=400) for number in range(4)]
    for each in short:
        lab.scheduler.add_request(each)
    planned(lab)
    asked = [request(f"long-{number}", (number,) * 700, max_tokens=2) for number in range(3)]
    for each in asked:
        lab.scheduler.add_request(each)
    times = []
    while True:
        plan = planned(lab)
        if not plan.prefills:
            break
        assert len(plan.decodes) >= 4
        times.append(SLOW.step_s(plan.stats))
    assert len(times) > 50
    assert max(times) <= 0.2
    assert min(times[:-3]) > 0.5 * SHARED_STEP_S, "prompts get their share"
    lab.run()
    for each in (*short, *asked):
        lab.check_answer(each)


def test_a_prompt_at_most_doubles_a_step_but_adds_no_more_than_its_limit() -> None:
    decodes = LatencyModel(base_s=0.15, prefill_token_s=0.002)
    lab = slow_lab(decodes)
    lab.scheduler.add_request(request("short", (2, 3), max_tokens=50))
    planned(lab)
    lab.scheduler.add_request(request("long", (1,) * 500, max_tokens=2))
    plan = planned(lab)
    assert 0.25 < decodes.step_s(plan.stats) <= 0.3
    slower = LatencyModel(base_s=2.0, prefill_token_s=0.01)
    lab.scheduler.planner.pace = StepPace(slower)
    assert 0.15 < slower.step_s(planned(lab).stats) - slower.base_s <= SHARED_PROMPTS_S


@pytest.mark.parametrize("scheduling", Scheduling)
def test_every_prompt_ends_where_one_token_is_predicted_above_every_limit(scheduling: Scheduling) -> None:
    lab = slow_lab(LatencyModel(base_s=5.0, prefill_token_s=5.0), scheduling)
    asked = [request(f"long-{number}", (number,) * 40, max_tokens=3) for number in range(3)]
    for each in asked:
        lab.scheduler.add_request(each)
    plan = planned(lab)
    assert [(work.start, work.num_tokens) for work in plan.prefills] == [(0, 16)]
    lab.run()
    for each in asked:
        lab.check_answer(each)


def test_prompts_alone_in_a_step_are_cut_while_answers_wait() -> None:
    model = LatencyModel(base_s=0.02, prefill_token_s=0.001)
    lab = slow_lab(model, Scheduling.SGLANG)
    lab.scheduler.add_request(request("short", (2, 3), max_tokens=50))
    planned(lab)
    lab.scheduler.add_request(request("long", (1,) * 300, max_tokens=2))
    plan = planned(lab)
    assert plan.prefills
    assert not plan.decodes
    assert 0.5 * SHARED_STEP_S < model.step_s(plan.stats) <= SHARED_STEP_S


def steps_until_answered(lab: Lab, name: str, most: int = 200) -> int:
    for number in range(1, most + 1):
        planned(lab)
        if (RequestId(name), 0) in lab.said:
            return number
    raise AssertionError(f"no answer after {most} steps")


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    lab = slow_lab()
    long, short = request("long", (1,) * 1464, max_tokens=1), request("short", (2,) * 40, max_tokens=3)
    lab.scheduler.add_request(long)
    planned(lab)
    lab.scheduler.add_request(short)
    assert steps_until_answered(lab, "short") == 1
    assert lab.scheduler.num_running == 2
    lab.run()
    lab.check_answer(long)
    lab.check_answer(short)


def test_the_rest_of_a_prompt_whose_kv_is_here_does_not_wait_for_a_long_one() -> None:
    lab = slow_lab()
    known = request("known", (3,) * 700, max_tokens=1)
    lab.scheduler.add_request(known)
    lab.run()
    for number in range(3):
        lab.scheduler.add_request(request(f"long-{number}", (4 + number,) * 1000, max_tokens=1))
    planned(lab)
    lab.scheduler.add_request(request("again", (3,) * 700 + (1, 2), max_tokens=2))
    assert steps_until_answered(lab, "again") == 1
    lab.run()


def test_a_long_prompt_gets_half_of_each_step_however_many_short_ones_come() -> None:
    lab = slow_lab()
    lab.scheduler.add_request(request("long", (1,) * 1000, max_tokens=1))
    shares = []
    for number in range(1000):
        lab.scheduler.add_request(request(f"short-{number}", (number,) * 30, max_tokens=1))
        plan = planned(lab)
        own = sum(work.num_tokens for work in plan.prefills if work.sequence.request.request_id == "long")
        shares.append(own / plan.stats.prefill_tokens)
        assert SLOW.step_s(plan.stats) <= LONGEST_STEP_S
        if (RequestId("long"), 0) in lab.said:
            break
    assert min(shares[:-1]) >= 0.4
    assert len(shares) < 20


def test_no_block_that_the_first_waiting_prompt_needs_goes_to_a_later_one() -> None:
    lab = Lab(scheduler(20, BOUNDS))
    lab.scheduler.planner.pace = StepPace(LatencyModel(base_s=0.01, prefill_token_s=0.02))
    lab.scheduler.add_request(request("running", (1,) * 160, max_tokens=1))  # ten of the blocks
    planned(lab)
    lab.scheduler.add_request(
        request("first", (2,) * 150, max_tokens=1)
    )  # the ten others, and one for who runs
    lab.scheduler.add_request(request("short", (3,) * 4, max_tokens=30))
    while (RequestId("running"), 0) not in lab.said:
        assert [work.sequence.request.request_id for work in planned(lab).prefills] == ["running"]
    names = {work.sequence.request.request_id for work in planned(lab).prefills}
    assert names == {"first", "short"}, "now there is room for both"
    lab.run()


def test_a_prompt_that_is_aborted_between_two_cuts_is_computed_no_further() -> None:
    lab = slow_lab()
    asked = request("long", (1,) * 1464, max_tokens=1)
    lab.scheduler.add_request(asked)
    first = planned(lab)
    assert first.stats.prefill_tokens < 200
    assert lab.scheduler.abort(asked.request_id)
    assert lab.begin() is None
    assert lab.scheduler.pool.num_used == 0


def test_steps_that_take_longer_than_predicted_make_smaller_cuts() -> None:
    pace = StepPace(SLOW)
    lab = Lab(scheduler(512, BOUNDS))
    lab.scheduler.planner.pace = pace
    for number in range(12):
        lab.scheduler.add_request(request(str(number), (number,) * 1000, max_tokens=1))
    sizes = []
    for _ in range(40):
        plan = planned(lab)
        sizes.append(plan.stats.prefill_tokens)
        real_s = 10 * SLOW.step_s(plan.stats)
        pace.observe(StepStats(0, plan.stats.prefill_tokens, plan.stats.prefill_context, 0, real_s))
    assert sizes[0] > 5 * sizes[-1]
    assert pace.model.prefill_s(512) == pytest.approx(10 * SLOW.prefill_s(512), rel=0.25)


def test_a_model_measured_on_a_machine_too_busy_to_measure_makes_no_long_steps() -> None:
    """As registered at a load of 14 on two cores: prompt tokens that cost nothing, of at most 64 timed."""
    measured = LatencyModel(base_s=0.18, prefill_token_s=3.3e-5)
    real = LatencyModel(base_s=0.1, prefill_token_s=0.005, prefill_context_s=2e-6)
    lab = Lab(scheduler(512, BOUNDS))
    lab.scheduler.planner.pace = pace = StepPace(measured, most_timed=64)
    for number in range(3):
        lab.scheduler.add_request(request(str(number), (number,) * 1464, max_tokens=1))
    times = []
    while lab.scheduler.has_work:
        stats = planned(lab).stats
        times.append(real.step_s(stats))
        pace.observe(replace(stats, time_s=times[-1]))
    assert max(times) < 4.0, "all at once would take 11 s and more"
    late = times[len(times) // 2 : -1]
    assert max(late) < 1.3
    assert min(late) > 0.5


def test_no_step_has_more_than_twice_the_prompt_tokens_of_one_that_was_timed() -> None:
    lab = Lab(scheduler(512, BOUNDS))
    lab.scheduler.planner.pace = pace = StepPace(LatencyModel(base_s=1e-6), most_timed=40)
    lab.scheduler.add_request(request("long", (1,) * 1000, max_tokens=1))
    sizes = []
    while lab.scheduler.has_work:
        stats = planned(lab).stats
        sizes.append(stats.prefill_tokens)
        pace.observe(replace(stats, time_s=1e-5))
    assert sizes == [80, 160, 320, 440]


def test_steps_that_take_less_than_their_decodes_alone_correct_the_decodes() -> None:
    pace, step = StepPace(LatencyModel(base_s=0.2, prefill_token_s=0.001)), StepStats(0, 100, 10_000, 0, 0.1)
    for _ in range(40):
        pace.observe(step)
    assert pace.model.step_s(step) == pytest.approx(0.1, rel=0.3)


def test_prompts_and_decodes_are_corrected_apart() -> None:
    pace = StepPace(LatencyModel(base_s=0.02, prefill_token_s=0.005))
    for _ in range(50):
        pace.observe(StepStats(batch=4, context_tokens=100, time_s=0.06))
    assert pace.model.decode_s(4, 100) == pytest.approx(0.06, rel=0.01)
    assert pace.model.prefill_token_s == 0.005


@pytest.mark.parametrize("usual", [StepStats(batch=1), StepStats(2, 64, 64 * 64)], ids=["decode", "prompt"])
def test_one_stall_is_undone_by_the_next_steps_and_no_time_changes_nothing(usual: StepStats) -> None:
    pace, usual_s = StepPace(SLOW), SLOW.step_s(usual)
    pace.observe(replace(usual, time_s=600.0))
    assert pace.model.step_s(usual) > 2 * usual_s
    for _ in range(6):
        pace.observe(replace(usual, time_s=usual_s))
    assert pace.model.step_s(usual) < 1.3 * usual_s
    before = pace.model
    pace.observe(StepStats(batch=1, time_s=0.0))
    assert pace.model == before


def test_a_correction_is_bounded() -> None:
    pace = StepPace(SLOW)
    for _ in range(200):
        pace.observe(StepStats(batch=1, time_s=1e6))
    assert pace.model.base_s == pytest.approx(1024 * SLOW.base_s)
    for _ in range(200):
        pace.observe(StepStats(batch=1, time_s=1e-9))
    assert pace.model.base_s == pytest.approx(SLOW.base_s / 1024)
