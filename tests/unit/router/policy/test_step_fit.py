"""PaceEstimator: observed over modelled prefill time."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvolt.router.policy.step_fit import PaceEstimator, PaceOptions

TOLD_S = 0.1


def factor(fit: PaceEstimator, row: int, now: float) -> float:
    return float(fit.factors(np.array([row], dtype=np.intp), now)[0])


def serve(
    fit: PaceEstimator, row: int, number: int, slowness: float, start: float = 0.0, gap_s: float = 0.0
) -> float:
    """Prompts one after the other, sent long before their turn unless there is a gap."""
    now = start
    for _ in range(number):
        sent_at = now if gap_s else start
        now += gap_s + TOLD_S * slowness
        fit.on_first_token(row, sent_at + gap_s, TOLD_S, now)
    return now


@pytest.mark.parametrize("slowness", [0.2, 0.5, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("gap_s", [0.0, 1.0], ids=["busy", "idle"])
def test_the_factor_is_found_after_some_tens_whatever_waits(slowness: float, gap_s: float) -> None:
    fit = PaceEstimator()
    now = serve(fit, 0, 50, slowness, gap_s=gap_s)
    assert factor(fit, 0, now) == pytest.approx(slowness, rel=0.35)
    now = serve(fit, 0, 100, slowness, now, gap_s)
    assert factor(fit, 0, now) == pytest.approx(slowness, rel=0.35)
    assert factor(fit, 1, now) == 1.0


def test_a_few_prompts_are_not_believed_at_once() -> None:
    fit = PaceEstimator()
    now = serve(fit, 0, 1, 3.0)
    assert factor(fit, 0, now) < 1.5


@pytest.mark.parametrize("together", [4, 24])
def test_prompts_that_are_computed_together_count_as_one(together: int) -> None:
    fit, now = PaceEstimator(), 0.0
    for _ in range(20):
        sent_at, now = now, now + together * TOLD_S
        for _ in range(together):
            fit.on_first_token(0, sent_at, TOLD_S, now)
    assert factor(fit, 0, now) == pytest.approx(1.0, rel=0.05)


def test_sizes_may_differ() -> None:
    fit, rng, now = PaceEstimator(), random.Random(1), 0.0
    for _ in range(200):
        model_s = rng.choice((0.001, 0.01, 1.0))
        sent_at, now = now, now + 3.0 * model_s
        fit.on_first_token(0, sent_at, model_s, now)
    assert factor(fit, 0, now) == pytest.approx(3.0, rel=0.25)


def test_one_stall_does_not_change_it_for_long() -> None:
    fit = PaceEstimator()
    now = serve(fit, 0, 60, 1.0)
    fit.on_first_token(0, now, TOLD_S, now + 600.0)
    assert factor(fit, 0, now + 600.0) < 1.7
    now = serve(fit, 0, 60, 1.0, now + 600.0)
    assert factor(fit, 0, now) == pytest.approx(1.0, rel=0.1)


def test_it_is_bounded() -> None:
    fit = PaceEstimator(PaceOptions(max_factor=10.0))
    now = serve(fit, 0, 500, 1000.0)
    serve(fit, 1, 500, 0.0)
    assert factor(fit, 0, now) == pytest.approx(10.0)
    assert factor(fit, 1, 0.0) >= 0.1


def test_without_observations_the_factor_decays() -> None:
    fit = PaceEstimator()
    now = serve(fit, 0, 100, 8.0)
    assert factor(fit, 0, now + 29.0) > 5.0
    assert factor(fit, 0, now + 90.0) == pytest.approx(8.0**0.5, rel=0.2)
    assert factor(fit, 0, now + 3600.0) == pytest.approx(1.0)
    later = serve(fit, 0, 10, 1.0, now + 3600.0)
    assert factor(fit, 0, later) == pytest.approx(1.0, rel=0.05), "what was seen long ago counts no more"


def test_a_reused_row_starts_at_one_and_rows_are_unbounded() -> None:
    fit = PaceEstimator()
    for row in (3, 40, 1000):
        fit.add_row(row)
    now = serve(fit, 3, 50, 3.0)
    serve(fit, 40, 50, 3.0)
    assert factor(fit, 40, now) > 2.0
    fit.drop_row(3)
    fit.add_row(3)
    assert factor(fit, 3, now) == 1.0
    assert factor(fit, 1000, now) == 1.0
    assert fit.factors(np.array([], dtype=np.intp), now).tolist() == []


def test_a_modelled_time_of_zero_is_ignored() -> None:
    fit = PaceEstimator()
    fit.on_first_token(0, 0.0, 0.0, 5.0)
    assert factor(fit, 0, 5.0) == 1.0
