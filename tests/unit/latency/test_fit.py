"""The fit: it finds what made a log, in spite of noise and strays, and says what a log cannot tell."""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvolt.core.errors import InvalidRequest
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats
from kvolt.latency import fit as latency_fit
from kvolt.latency.fit import MIN_STEPS, NUM_WORST, Fit, errors_of, fit_latency

TRUE = LatencyModel(
    base_s=5e-3,
    prefill_token_s=2e-5,
    prefill_context_s=1e-9,
    batch_s=3e-5,
    context_token_s=4e-8,
    prefill_step_s=6e-3,
)


def make_step(rng: random.Random) -> StepStats:
    """One of many decodes or few steps with prompts, as in a log of a real run."""
    batch = 0 if rng.random() < 0.1 else rng.randint(1, 64)
    context = sum(rng.randint(100, 4000) for _ in range(batch))
    if batch and rng.random() < 0.8:
        return StepStats(batch=batch, context_tokens=context)
    new = rng.randint(16, 4096)
    return StepStats(batch, new, new * rng.randint(new, 2 * new), context)


def make_log(
    num_steps: int = 2000,
    noise: float = 0.05,
    model: LatencyModel = TRUE,
    make: Callable[[random.Random], StepStats] = make_step,
) -> list[StepStats]:
    rng = random.Random(7)
    steps = [make(rng) for _ in range(num_steps)]
    return [replace(step, time_s=model.step_s(step) * rng.lognormvariate(0, noise)) for step in steps]


def values(model: LatencyModel) -> dict[str, float]:
    return msgspec.structs.asdict(model)


def undetermined(fit: Fit) -> dict[str, str]:
    return {doubt.coefficient: doubt.reason for doubt in fit.undetermined}


def test_without_noise_the_model_is_found_to_its_last_digit() -> None:
    fit = fit_latency(make_log(noise=0.0))
    assert values(fit.latency) == pytest.approx(values(TRUE), rel=1e-4)
    assert all(row.fitted.p90 is not None and row.fitted.p90 < 1e-4 for row in fit.errors)
    assert fit.undetermined == ()


def test_with_noise_the_model_is_found_and_the_error_is_the_noise() -> None:
    fit = fit_latency(make_log(noise=0.05))
    assert values(fit.latency) == pytest.approx(values(TRUE), rel=0.15)
    assert fit.num_steps == 2000
    for row in fit.errors:
        for errors in (row.fitted, row.held_out):
            assert errors.num_steps > 10
            assert errors.median == pytest.approx(0.674 * 0.05, rel=0.5)
            assert errors.p90 == pytest.approx(1.645 * 0.05, rel=0.5)
    total, *kinds = fit.errors
    assert [row.kind for row in fit.errors] == ["all", "prefill only", "decode only", "mixed"]
    assert total.fitted.num_steps == sum(row.fitted.num_steps for row in kinds) == 1600
    assert total.held_out.num_steps == sum(row.held_out.num_steps for row in kinds) == 400


def test_noise_does_not_make_it_too_fast() -> None:
    """Errors relative to what was measured would favour the fast steps: by 9% with noise of 30%."""
    fit = fit_latency(make_log(noise=0.3))
    steps = make_log(noise=0.0)
    biases = sorted(fit.latency.step_s(step) / step.time_s for step in steps)
    assert biases[len(biases) // 2] == pytest.approx(1.0, abs=0.045)


def test_strays_do_not_pull() -> None:
    clean = make_log(noise=0.02)
    rng = random.Random(3)
    strays = [replace(step, time_s=step.time_s * 50) for step in clean[:20]]
    strays += [
        replace(step, time_s=step.time_s * rng.choice((0.2, 6))) if rng.random() < 0.05 else step
        for step in clean[20:]
    ]
    fit = fit_latency(strays)
    assert values(fit.latency) == pytest.approx(values(TRUE), rel=0.15)
    assert {bad.number for bad in fit.worst} <= {
        at for at, (step, before) in enumerate(zip(strays, clean, strict=True), 1) if step is not before
    }


def test_few_prompts_among_many_answers_are_no_strays() -> None:
    """By the measure of decodes, which are regular, noisy prefills would all count as outliers."""
    rng = random.Random(4)
    steps = [
        replace(step, time_s=step.time_s * (rng.lognormvariate(0, 0.25) if step.prefill_tokens else 1.0))
        for step in make_log(3000, noise=0.005)
        if not step.prefill_tokens or rng.random() < 0.2
    ]
    model = fit_latency(steps).latency
    prompts = [step for step in make_log(noise=0.0) if step.prefill_tokens]
    errors = errors_of(model, prompts)
    assert errors.median is not None
    assert errors.median < 0.08


def test_the_worst_steps_are_reported_with_their_position() -> None:
    log = make_log(noise=0.0)
    log[99] = replace(log[99], time_s=log[99].time_s * 4)
    log.insert(10, StepStats(time_s=1.0))
    fit = fit_latency(log)
    assert len(fit.worst) == NUM_WORST
    assert fit.worst[0].number == 101
    assert fit.worst[0].error == pytest.approx(-0.75, abs=0.01)
    assert (fit.num_steps, fit.num_left_out) == (2000, 1)


# --- what a log cannot tell


def test_a_log_without_prompts_says_so() -> None:
    fit = fit_latency([step for step in make_log() if not step.prefill_tokens])
    named = ("prefill_token_s", "prefill_context_s", "prefill_step_s")
    assert undetermined(fit) == dict.fromkeys(named, "no step prefills")
    assert all(getattr(fit.latency, name) == 0 for name in named)
    assert fit.latency.base_s == pytest.approx(TRUE.base_s, rel=0.1)
    assert [row.fitted.num_steps > 0 for row in fit.errors] == [True, False, True, False]
    assert fit.errors[1].held_out.median is None


def test_a_log_without_answers_says_so() -> None:
    fit = fit_latency(
        [replace(step, batch=0, context_tokens=0) for step in make_log() if step.prefill_tokens]
    )
    assert undetermined(fit)["batch_s"] == undetermined(fit)["context_token_s"] == "no step decodes"
    assert undetermined(fit)["prefill_step_s"].startswith("it cannot be separated from base_s")


@pytest.mark.parametrize("with_prompts", [False, True])
def test_a_constant_batch_says_so(with_prompts: bool) -> None:
    def make(rng: random.Random) -> StepStats:
        if with_prompts and rng.random() < 0.1:
            new = rng.randint(16, 4096)
            return StepStats(0, new, new * new)
        return StepStats(batch=8, context_tokens=rng.randint(1000, 30_000))

    fit = fit_latency(make_log(make=make))
    assert undetermined(fit)["batch_s"] == "every step that decodes has a batch of 8"
    assert fit.latency.batch_s == 0
    errors = fit.errors[0].held_out
    assert errors.median is not None
    assert errors.median < 0.05, "it still predicts what is like the log"


def test_steps_that_are_all_alike_leave_only_the_base() -> None:
    fit = fit_latency([StepStats(batch=4, context_tokens=400, time_s=0.01)] * 100)
    assert fit.latency == LatencyModel(base_s=0.01)
    assert set(undetermined(fit)) == set(values(TRUE)) - {"base_s", "shared_kv_read"}
    assert undetermined(fit)["context_token_s"] == "it cannot be separated from base_s"


@pytest.mark.parametrize("num_steps", [0, 1, MIN_STEPS - 1])
def test_a_log_that_is_too_short_is_refused(num_steps: int) -> None:
    useless = [StepStats(batch=1, context_tokens=1), StepStats(time_s=0.1)] * 50
    with pytest.raises(InvalidRequest, match=f"has {num_steps} steps .* {MIN_STEPS} are needed"):
        fit_latency([*make_log(num_steps), *useless])


def test_a_log_that_is_just_long_enough_is_fitted_and_judged() -> None:
    fit = fit_latency(make_log(MIN_STEPS))
    assert fit.errors[0].held_out.num_steps == MIN_STEPS // 5


def test_of_a_very_long_log_a_part_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_fit, "MAX_STEPS", 400)
    fit = fit_latency([*make_log(1001, noise=0.0), StepStats()])
    assert (fit.num_steps, fit.num_left_out) == (334, 1)
    assert fit.latency.base_s == pytest.approx(TRUE.base_s, rel=1e-3)
    assert {bad.number % 3 for bad in fit.worst} == {1}


steps = st.builds(
    StepStats,
    st.integers(0, 4),
    st.integers(0, 50),
    st.integers(0, 2000),
    st.integers(0, 1000),
    st.sampled_from((1e-9, 0.001, 0.002, 0.5, 1e4)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(steps, min_size=MIN_STEPS, max_size=60))
def test_whatever_the_log_no_coefficient_is_negative_and_all_are_numbers(log: list[StepStats]) -> None:
    try:
        fit = fit_latency(log)
    except InvalidRequest:
        return
    for name, value in values(fit.latency).items():
        assert 0 <= value < float("inf"), name
    assert fit == fit_latency(log)


def make_shared_step(rng: random.Random) -> StepStats:
    """As `make_step`, with a prefix that all or some of the answers share."""
    step = make_step(rng)
    if step.batch < 2:
        return step
    prefix = rng.randint(500, 4000)
    shared = prefix * rng.randint(0, step.batch - 1)
    return replace(step, context_tokens=step.context_tokens + prefix + shared, shared_tokens=shared)


@pytest.mark.parametrize("shared_kv_read", [0.0, 0.35, 1.0])
def test_the_cost_of_a_repeated_read_is_found(shared_kv_read: float) -> None:
    model = replace(TRUE, shared_kv_read=shared_kv_read)
    assert fit_latency(make_log(noise=0.0, model=model, make=make_shared_step)).latency == model


def test_without_shared_blocks_each_answer_is_taken_to_read_its_own() -> None:
    fit = fit_latency(make_log())
    assert fit.latency.shared_kv_read == 1.0
    assert not fit.undetermined


def test_a_log_with_large_errors_has_a_warning_with_the_remedy() -> None:
    assert fit_latency(make_log(noise=0.05)).warnings == ()
    [warning] = fit_latency(make_log(noise=1.0)).warnings
    assert warning.startswith("large held-out errors (p90: all ")
    assert "record more steps" in warning


def test_prompt_tokens_without_a_cost_are_a_warning() -> None:
    free = replace(TRUE, prefill_token_s=0.0)
    [warning] = fit_latency(make_log(noise=0.0, model=free)).warnings
    assert warning.startswith("prefill_token_s is 0")
    decodes = fit_latency([step for step in make_log() if not step.prefill_tokens])
    assert decodes.warnings == (), "it is listed as undetermined"
