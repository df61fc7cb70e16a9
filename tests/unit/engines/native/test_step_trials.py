"""Steps that an engine measures before its first request: which, for how long, and the model that they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from kvolt.core.latency import LatencyModel, scale_speed
from kvolt.engines.native.step_trials import BUDGET_S, Trial, TrialLimits, Trials, measure_steps
from kvolt.scheduler.step_plan import Limits

GPU = LatencyModel(
    base_s=5e-3,
    prefill_token_s=2e-5,
    prefill_context_s=1e-9,
    batch_s=3e-5,
    context_token_s=4e-8,
    prefill_step_s=6e-3,
)
CORE = LatencyModel(
    base_s=0.045,
    prefill_token_s=1.6e-3,
    prefill_context_s=2e-7,
    batch_s=2e-3,
    context_token_s=8e-6,
    prefill_step_s=0.004,
)
"""One slow core."""

LIMITS = Limits(max_num_seqs=64, max_batch_tokens=2048, max_waiting=8, context_length=8192, block_size=16)
HOST = TrialLimits(limits=LIMITS, num_blocks=4000, long_batch=4, long_tokens=4096)
DEVICE = TrialLimits(
    limits=msgspec.structs.replace(LIMITS, max_num_seqs=256, max_batch_tokens=8192, context_length=131_072),
    num_blocks=50_000,
    long_batch=32,
    long_tokens=65_536,
)


@dataclass
class Engine:
    """Whose steps take what a model says, times what is wrong with a run."""

    model: LatencyModel
    slower: Callable[[Trial, int], float] = lambda trial, run: 1.0
    time_s: float = 100.0
    prepared: list[Trial] = field(default_factory=list)
    runs: list[Trial] = field(default_factory=list)
    begun_at: list[float] = field(default_factory=list)

    def now(self) -> float:
        return self.time_s

    def prepare(self, trial: Trial) -> Callable[[], None]:
        self.prepared.append(trial)
        self.time_s += 1e-6

        def run() -> None:
            self.begun_at.append(self.time_s)
            factor = self.slower(trial, self.runs.count(trial))
            self.runs.append(trial)
            self.time_s += factor * self.model.step_s(trial.stats())

        return run

    def measure(self, bounds: TrialLimits, budget_s: float = BUDGET_S) -> Trials:
        return measure_steps(self.prepare, bounds, self.now, budget_s)


def values(model: LatencyModel | None) -> dict[str, float]:
    assert model is not None
    return msgspec.structs.asdict(model)


@pytest.mark.parametrize(("bounds", "model"), [(DEVICE, GPU), (HOST, CORE)], ids=["gpu", "slow core"])
def test_the_model_is_found_within_the_budget(bounds: TrialLimits, model: LatencyModel) -> None:
    engine = Engine(model)
    trials = engine.measure(bounds)
    assert values(trials.latency) == pytest.approx(values(model), rel=1e-3)
    assert engine.time_s - 100.0 == pytest.approx(trials.elapsed_s)
    assert trials.elapsed_s <= BUDGET_S
    assert trials.num_runs == len(engine.runs)
    for errors in (trials.decodes, trials.prompts):
        assert errors.num_steps > 2
        assert errors.p90 is not None
        assert errors.p90 < 1e-3


def test_first_runs_and_pauses_are_not_believed() -> None:
    def slower(trial: Trial, run: int) -> float:
        return (2.5, 1.0, 1.7, 1.0, 1.0, 1.3)[run]

    assert values(Engine(GPU, slower).measure(DEVICE).latency) == pytest.approx(values(GPU), rel=1e-3)


def test_a_first_run_that_is_very_slow_does_not_end_the_climb() -> None:
    """As where a kernel has to be compiled for it."""

    def slower(trial: Trial, run: int) -> float:
        return 30.0 if trial.prompt_tokens == 16 and not run else 1.0

    engine = Engine(GPU, slower)
    engine.measure(DEVICE)
    assert 4096 in {trial.prompt_tokens for trial in engine.runs}


def test_what_is_there_is_measured_up_to_its_limits_and_not_beyond() -> None:
    engine = Engine(LatencyModel(base_s=1e-4, batch_s=1e-6, prefill_token_s=1e-7))
    engine.measure(HOST)
    assert max(trial.batch for trial in engine.runs) == 64
    assert max(trial.prompt_tokens for trial in engine.runs) == 2048
    assert max(trial.before for trial in engine.runs) == 4096
    assert max(trial.batch * trial.context for trial in engine.runs) == 4096
    assert all(HOST.allows(trial) for trial in engine.runs)
    assert len(engine.prepared) == len(set(engine.runs))


@pytest.mark.parametrize("num_blocks", [1, 2, 7, 33])
@pytest.mark.parametrize("context_length", [4, 40, 8192])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_a_small_pool_is_never_left(num_blocks: int, context_length: int, max_num_seqs: int) -> None:
    limits = msgspec.structs.replace(LIMITS, context_length=context_length, max_num_seqs=max_num_seqs)
    bounds = TrialLimits(
        limits=limits, num_blocks=num_blocks, long_batch=min(4, max_num_seqs), long_tokens=4096
    )
    engine = Engine(GPU)
    engine.measure(bounds)
    assert engine.runs
    for trial in engine.runs:
        assert trial.num_blocks(limits.block_size) <= num_blocks
        assert max(trial.context, trial.before + trial.chunk) <= context_length
        assert trial.batch <= max_num_seqs


def test_no_step_is_begun_after_the_budget() -> None:
    for seconds in (0.02, 0.1, 0.3, 1.0):
        engine = Engine(msgspec.structs.replace(CORE, base_s=seconds))
        engine.measure(HOST)
        assert max(engine.begun_at) < 100.0 + BUDGET_S
        # Nor is one that is known to end after it; of the first nothing is known.
        assert engine.time_s < 100.0 + max(BUDGET_S, 2 * seconds) + 0.1


def test_of_too_little_a_rough_model_is_left_for_real_steps_to_correct() -> None:
    busy = Engine(scale_speed(CORE, 0.05))
    trials = measure_steps(busy.prepare, HOST, busy.now)
    assert trials.latency is None
    assert trials.rough_latency is not None
    assert 0 < trials.rough_latency.prefill_s(64) < 4 * busy.model.prefill_s(64)
    assert trials.rough_latency.base_s > CORE.base_s
    quiet = Engine(CORE)
    trials = measure_steps(quiet.prepare, HOST, quiet.now)
    assert trials.rough_latency is trials.latency
    assert trials.most_prompt_tokens >= 64
    nothing = Trials(steps=(), num_runs=0, elapsed_s=0.0, latency=None)
    assert (nothing.rough_latency, nothing.most_prompt_tokens) == (None, 0)


@pytest.mark.parametrize("speed", [0.02, 0.05, 50.0])
def test_a_rough_model_has_the_speed_of_the_timed_steps(speed: float) -> None:
    busy = scale_speed(CORE, speed)
    step = Trial(batch=1, context=16).stats(busy.decode_s(1, 16))
    rough = Trials(steps=(step,), num_runs=1, elapsed_s=1.0, latency=None).rough_latency
    assert rough is not None
    assert rough.decode_s(1, 16) == pytest.approx(busy.decode_s(1, 16))
    assert busy.prefill_s(512) / 4 < rough.prefill_s(512) < 4 * busy.prefill_s(512)


def test_a_rough_model_keeps_the_time_of_a_prompt() -> None:
    """A CPU's prompts are slower than its decodes, compared with a GPU: cuts of prompts depend on it."""
    steps = (
        Trial(batch=1, context=16).stats(0.05),
        Trial(prompts=1, chunk=64).stats(0.69),
    )
    rough = Trials(steps=steps, num_runs=2, elapsed_s=1.0, latency=None).rough_latency
    assert rough is not None
    assert rough.decode_s(1, 16) == pytest.approx(0.05)
    assert rough.prefill_s(640) == pytest.approx(6.45)


def test_the_speed_of_a_rough_model_is_bounded() -> None:
    step = Trial(batch=1, context=16).stats(600.0)
    rough = Trials(steps=(step,), num_runs=1, elapsed_s=600.0, latency=None).rough_latency
    assert rough is not None
    assert rough.decode_s(1, 16) < 10.0


def test_of_too_little_nothing_is_made() -> None:
    slow = Engine(LatencyModel(base_s=2.0))
    trials = slow.measure(HOST)
    assert (len(slow.runs), trials.latency, trials.decodes.num_steps) == (1, None, 0)


def test_a_clock_that_stands_still_ends_and_says_nothing() -> None:
    engine = Engine(LatencyModel())
    trials = measure_steps(engine.prepare, HOST, lambda: 5.0)
    assert (trials.steps, trials.latency) == ((), None)
    assert max(engine.runs.count(trial) for trial in engine.runs) <= 6


def test_a_step_in_the_terms_of_the_model() -> None:
    decode, chunk = Trial(batch=3, context=20).stats(0.5), Trial(prompts=2, chunk=8, before=32).stats()
    assert (decode.batch, decode.context_tokens, decode.prefill_tokens, decode.time_s) == (3, 60, 0, 0.5)
    assert (chunk.batch, chunk.prefill_tokens, chunk.prefill_context) == (0, 16, 16 * 40)


def test_tokens_that_cost_nothing_until_there_are_many_are_not_mistaken_for_context() -> None:
    """Launching a small step on a GPU takes longer than computing it. The figures are those of an H200 with an 8B
    model: a step of many prompts is told about right, as is one of a single long one."""

    def takes_s(trial: Trial) -> float:
        stats = trial.stats()
        if not trial.prompts:
            return GPU.step_s(stats)
        return max(0.012, 18e-6 * stats.prefill_tokens) + 0.9e-9 * stats.prefill_context

    engine = Engine(GPU, lambda trial, run: takes_s(trial) / GPU.step_s(trial.stats()))
    latency = engine.measure(DEVICE).latency
    assert latency is not None
    for prompts, chunk in ((8, 1024), (1, 8192), (1, 2048), (1, 128)):
        trial = Trial(prompts=prompts, chunk=chunk)
        assert latency.step_s(trial.stats()) == pytest.approx(takes_s(trial), rel=0.25)


def test_on_a_slow_core_more_than_the_smallest_prompt_is_measured() -> None:
    """SmolLM2-135M in float32 on one core of a server: a token among 16 costs twice what it does among hundreds."""

    def takes_s(trial: Trial) -> float:
        if trial.prompts:
            return max(0.13, 0.05 + 2.6e-3 * trial.prompt_tokens)
        return 0.047 + 0.017 * trial.batch + 7e-6 * trial.batch * trial.context

    def slower(trial: Trial, run: int) -> float:
        return takes_s(trial) / CORE.step_s(trial.stats()) * (1.0 if run else 1.3)

    trials = Engine(CORE, slower).measure(HOST)
    assert trials.latency is not None
    assert trials.elapsed_s <= BUDGET_S
    for num_tokens in (200, 1000):
        assert trials.latency.prefill_s(num_tokens) == pytest.approx(0.05 + 2.6e-3 * num_tokens, rel=0.35)
    assert trials.latency.decode_s(4, 2000) == pytest.approx(0.047 + 4 * 0.017 + 7e-6 * 2000, rel=0.2)
