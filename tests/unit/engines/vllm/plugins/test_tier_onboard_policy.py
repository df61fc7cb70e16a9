"""Brought or computed: by how long vLLM's steps take and blocks take to come; without knowledge, brought."""

from __future__ import annotations

import random

import pytest

from kvolt.core.kv_events import Tier
from kvolt.core.load import StepStats
from kvolt.engines.vllm.plugins.tier_onboard_policy import StepTimes, TierOnboardPolicy

HOST, DISK = Tier.HOST, Tier.DISK
TOKEN_S, CONTEXT_S, BASE_S = 1e-3, 1e-6, 5e-3


def step(tokens: int, before: int = 0, noise: float = 1.0) -> StepStats:
    context = tokens * (before + tokens)
    time_s = (BASE_S + tokens * TOKEN_S + context * CONTEXT_S) * noise
    return StepStats(prefill_tokens=tokens, prefill_context=context, time_s=time_s)


def worth(*, block_s: dict[Tier, float] | None = None, num_steps: int = 20) -> TierOnboardPolicy:
    made = TierOnboardPolicy(16, 256)
    for number in range(num_steps):
        made.times.add(step(16 + 24 * (number % 8), 100 * (number % 3)))
    made.block_s = {HOST: 1e-4, DISK: 1e-3} if block_s is None else block_s
    return made


def test_the_price_of_a_token_is_found_among_slow_steps() -> None:
    times, chance = StepTimes(), random.Random(1)
    for number in range(64):
        slow = 40.0 if number < 2 else 1.0  # the first of an engine
        times.add(step(chance.randint(10, 256), chance.randint(0, 2000), slow * chance.uniform(0.95, 1.05)))
    model = times.model
    assert model is not None
    assert model.prefill_s(1000) == pytest.approx(BASE_S + 1000 * TOKEN_S + 1e6 * CONTEXT_S, rel=0.1)


def test_steps_that_are_all_alike_are_the_price_of_their_tokens() -> None:
    """What any step costs cannot be told from what its tokens cost: to bring saves tokens."""
    times = StepTimes()
    for _ in range(10):
        times.add(step(256))
    assert times.model is not None
    assert times.model.base_s == 0
    assert times.model.prefill_s(256) == pytest.approx(step(256).time_s, rel=0.01)


def test_steps_that_are_nearly_alike_say_nothing_of_what_any_step_costs() -> None:
    times = StepTimes()
    for number in range(20):
        tokens = 250 + number % 7
        times.add(StepStats(prefill_tokens=tokens, prefill_context=tokens**2, time_s=0.25))
    assert times.model is not None
    assert times.model.base_s == 0
    assert times.model.prefill_s(253) == pytest.approx(0.25, rel=0.05)


def test_the_model_follows_the_engine() -> None:
    times = StepTimes()
    for _ in range(64):
        times.add(step(100))
    before = times.model
    for _ in range(64):
        times.add(step(100, noise=3.0))
    assert before is not None
    assert times.model is not None
    assert times.model.prefill_s(100) == pytest.approx(3 * before.prefill_s(100), rel=0.01)


@pytest.mark.parametrize("what", ["steps", "tiers"])
def test_everything_is_loaded_without_measurements(what: str) -> None:
    made = worth(num_steps=7, block_s={HOST: 9.0}) if what == "steps" else worth(block_s={HOST: 9.0})
    tiers = [HOST] * 4 if what == "steps" else [HOST, DISK]
    assert made.num_to_onboard(100, 0, tiers) == len(tiers)
    assert made.num_declined == 0


def test_fast_blocks_are_loaded_and_slow_ones_computed() -> None:
    assert worth().num_to_onboard(200, 0, [HOST] * 12) == 12
    made = worth(block_s={HOST: 1e-4, DISK: 1.0})
    assert made.num_to_onboard(200, 0, [DISK] * 12) == 0
    assert made.num_declined == 12
    assert made.num_to_onboard(200, 0, [HOST] * 5 + [DISK] * 7) == 5
    assert made.num_declined == 19
    assert made.num_to_onboard(200, 0, [DISK] * 5 + [HOST] * 7) == 0


def test_a_tier_that_is_slow_is_tried_now_and_then() -> None:
    made = worth(block_s={HOST: 1.0})
    brought = [made.num_to_onboard(200, 0, [HOST] * 12) for _ in range(48)]
    assert [number for number, count in enumerate(brought, 1) if count] == [16, 32, 48]
    assert made.num_declined == 45 * 12


def test_nothing_to_onboard() -> None:
    made = worth()
    assert made.num_to_onboard(200, 3, []) == 0
    assert made.num_declined == 0
