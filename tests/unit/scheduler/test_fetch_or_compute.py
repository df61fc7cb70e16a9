"""Decision whether to fetch blocks or to compute them, by predictions of both."""

from __future__ import annotations

import math

import pytest

from kvolt.core.kv_events import Tier
from kvolt.core.latency import LatencyModel
from kvolt.scheduler.fetch_or_compute import FetchDecision, FetchOrCompute

BLOCK = 16
MODEL = LatencyModel(prefill_token_s=1e-3)
"""16 ms for each block."""


def choice(
    block_s: dict[Tier, float], model: LatencyModel | None = MODEL, step_blocks: int = 4
) -> FetchOrCompute:
    return FetchOrCompute(lambda: model, BLOCK, step_blocks * BLOCK, block_s.get)


def judged(block_s: float, num_blocks: int = 64, **more: int) -> FetchDecision:
    """Once the tier was tried."""
    made, prompt = choice({Tier.HOST: block_s}, **more), (num_blocks * BLOCK + 1, 0, [Tier.HOST] * num_blocks)
    made.decide(*prompt)
    return made.decide(*prompt)


def test_what_is_quick_is_waited_for() -> None:
    assert judged(0.001) == FetchDecision(64)


def test_what_is_about_as_fast_as_to_compute_comes_meanwhile() -> None:
    assert judged(0.008) == judged(0.016) == judged(0.03) == FetchDecision(64, is_concurrent=True)


def test_slow_blocks_are_not_fetched() -> None:
    slow = choice({Tier.HOST: 10.0})
    told = [slow.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 64) for _ in range(3)]
    assert told == [FetchDecision(64, is_concurrent=True), FetchDecision(0), FetchDecision(0)], (
        "it is tried, beside the engine"
    )
    assert slow.num_declined == 128


def test_an_engine_that_computes_it_all_in_a_step_does_not_share_the_work() -> None:
    assert judged(0.008, step_blocks=64) == FetchDecision(64)
    assert judged(0.03, step_blocks=64) == FetchDecision(0)


def test_after_a_large_step_small_ones_leave_room_for_what_comes() -> None:
    assert judged(0.016, step_blocks=26) == FetchDecision(64, is_concurrent=True)
    assert judged(0.016, step_blocks=32) == FetchDecision(64, is_concurrent=True)
    assert judged(0.016, step_blocks=60) == FetchDecision(0), "there is little left to share"


def test_a_few_blocks_are_fetched_or_computed() -> None:
    assert judged(0.012, num_blocks=7) == FetchDecision(7)
    assert judged(0.016, num_blocks=7) == FetchDecision(0)


def test_a_slow_tier_below_a_quick_one() -> None:
    both = choice({Tier.HOST: 0.0001, Tier.DISK: 1.0})
    assert both.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 60 + [Tier.DISK] * 4) == FetchDecision(60)


def test_what_the_engine_has_already_is_not_counted() -> None:
    assert choice({Tier.HOST: 0.03}).decide(68 * BLOCK + 1, 4, [Tier.HOST] * 64) == FetchDecision(
        64, is_concurrent=True
    )


def test_without_a_model_everything_is_fetched() -> None:
    blind = choice({Tier.HOST: 10.0}, model=None)
    assert blind.decide(100, 0, [Tier.HOST] * 5) == FetchDecision(5)
    assert blind.lookup_budget_s(100, 0, 5) == math.inf


def test_what_was_refused_is_tried_now_and_then() -> None:
    slow = choice({Tier.HOST: 10.0})
    told = [slow.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 64) for _ in range(32)]
    assert [told.count(FetchDecision(64, is_concurrent)) for is_concurrent in (True, False)] == [3, 0]


def test_what_is_computed_in_a_step_is_waited_for_now_and_then() -> None:
    """Nothing would have come by then, and nothing would be known."""
    slow = choice({Tier.HOST: 10.0}, step_blocks=64)
    told = [slow.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 64) for _ in range(16)]
    assert told == [FetchDecision(0)] * 15 + [FetchDecision(64)]


def test_what_would_be_waited_for_is_tried_more_seldom() -> None:
    """Blocks of a quick tier lie before those of the slow one: they are not to come late for that."""
    both = choice({Tier.HOST: 0.0001, Tier.DISK: 1.0})
    told = [both.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 60 + [Tier.DISK] * 4) for _ in range(16)]
    assert told == [FetchDecision(60)] * 15 + [FetchDecision(64)]


def test_looking_is_worth_a_part_of_what_it_may_save() -> None:
    assert choice({}).lookup_budget_s(64 * BLOCK + 1, 4, 64) == pytest.approx(0.25 * 60 * 0.016)


def test_a_tier_of_which_nothing_is_known_is_tried() -> None:
    assert choice({}).decide(64 * BLOCK + 1, 0, [Tier.DISK] * 64) == FetchDecision(64)


def test_an_engine_that_cannot_share_brings_or_computes() -> None:
    alone = FetchOrCompute(lambda: MODEL, BLOCK, 4 * BLOCK, lambda tier: 0.012, can_share=False)
    assert alone.decide(64 * BLOCK + 1, 0, [Tier.HOST] * 64) == FetchDecision(64)
