"""Presets: where they come from, what an engine makes of them, and how to name one wrongly."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tests.unit.engines.lab import make_request, sim

from kvolt.core.errors import ConfigError
from kvolt.core.latency import LatencyModel, OccupancyModel
from kvolt.core.load import StepStats, decode_step_log
from kvolt.engines.registry import check_arguments
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.latency.fit import fit_latency
from kvolt.latency.presets import DEFAULT, PRESETS, PresetFile
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual

LOGS = Path(__file__).parents[3] / "benchmarks" / "engine" / "results"


@pytest.mark.parametrize(
    ("name", "log", "median"),
    [
        ("h200-llama-8b", "gpu_steps.jsonl", 0.03),
        ("h200-vllm-llama-8b-fp8", "h200_published_steps.jsonl", 0.04),
        ("cpu-smollm2-135m", "cpu_steps.jsonl", 0.1),
    ],
)
def test_a_fitted_preset_is_what_the_fit_gives_today(name: str, log: str, median: float) -> None:
    with (LOGS / log).open("rb") as lines:
        _, steps = decode_step_log(lines)
    fit = fit_latency(steps)
    model = PRESETS[name].model
    assert isinstance(model, LatencyModel)
    # Not to the last digit: Python versions add floats differently.
    model = msgspec.structs.replace(model, shared_kv_read=fit.latency.shared_kv_read)  # measured apart
    assert msgspec.structs.asdict(model) == pytest.approx(msgspec.structs.asdict(fit.latency), rel=1e-4)
    assert log in PRESETS[name].source
    held_out = fit.errors[0].held_out
    assert held_out.median is not None
    assert held_out.median < median, "else the comment above the preset is no longer true"


def test_the_published_points_are_those_that_were_published() -> None:
    """Spot checks against the profile itself, in its units: milliseconds, share of the cache, tokens per second."""
    with (LOGS / "h200_published_steps.jsonl").open("rb") as lines:
        header, steps = decode_step_log(lines)
    assert header.model == "nvidia/Llama-3.1-8B-Instruct-FP8"
    assert len(steps) == 17 + 41
    assert steps[0] == StepStats(prefill_tokens=100, prefill_context=10_000, time_s=0.019525209)
    assert steps[16] == StepStats(prefill_tokens=16_372, prefill_context=16_372**2, time_s=0.375482618)
    at_350 = steps[18]  # 9.7% of a cache of 945,029 tokens, 19.11 ms between tokens, 13,424 tokens a second
    assert at_350.time_s == pytest.approx(0.0191112, rel=1e-4)
    assert at_350.batch == round(13_423.7485 * 0.01911118)
    assert at_350.context_tokens == at_350.batch * 350 == pytest.approx(0.0974044 * 945_029, rel=0.03)


def step_times(arguments: SimArguments, prompt: int, tokens: int) -> list[tuple[StepStats, float]]:
    """The steps of one request alone, each with the time that passed."""

    async def main() -> list[tuple[StepStats, float]]:
        engine = sim(arguments)
        found: list[tuple[StepStats, float]] = []
        loop = asyncio.get_running_loop()

        async def read() -> None:
            before = loop.time()
            async for step in engine.steps():
                if step.load is not None and step.load.step is not None:
                    found.append((step.load.step, loop.time() - before))
                    before = loop.time()

        async with Scope("engine") as scope:
            scope.start(read(), "read")
            engine.submit(make_request(prompt=prompt, tokens=tokens))
            await asyncio.sleep(60)
            await engine.close()
        return found

    return run_virtual(main)


def test_the_mocker_takes_the_times_that_dynamo_publishes() -> None:
    """By its formulas, in milliseconds, written out again here."""
    arguments = SimArguments(preset="dynamo-mocker", block_size=64, kv_blocks=100)
    (prompt, prompt_s), *decodes = step_times(arguments, prompt=2000, tokens=4)
    assert prompt == StepStats(0, 2000, 2000 * 2000, 0, prompt.time_s)
    assert prompt_s * 1e3 == pytest.approx(4.209989e-7 * 2000**2 + 1.518344e-2 * 2000 + 16.50142)
    assert len(decodes) == 3
    for number, (step, took_s) in enumerate(decodes):
        share = (2001 + number) / 6400
        assert step.context_tokens == 2001 + number
        assert took_s * 1e3 == pytest.approx(-25.74 * share**2 + 54.01 * share + 5.74)


@pytest.mark.parametrize("name", PRESETS)
def test_steps_take_what_the_preset_says(name: str) -> None:
    arguments = SimArguments(preset=name, speed=2.0)
    model = PRESETS[name].model
    if isinstance(model, OccupancyModel):
        model = msgspec.structs.replace(model, kv_tokens=arguments.kv_blocks * arguments.block_size)
    steps = step_times(arguments, prompt=500, tokens=5)
    assert len(steps) == 5
    for step, took_s in steps:
        assert took_s == pytest.approx(model.step_s(step) / 2)
        assert step.time_s == pytest.approx(took_s)


def info_of(arguments: SimArguments) -> tuple[LatencyModel | None, OccupancyModel | None]:
    async def main() -> tuple[LatencyModel | None, OccupancyModel | None]:
        info = await sim(arguments).start()
        return info.latency, info.occupancy_latency

    return run_virtual(main)


def test_an_engine_tells_its_step_model() -> None:
    assert info_of(SimArguments()) == (PRESETS[DEFAULT].model, None)
    latency, occupancy = info_of(SimArguments(preset="dynamo-mocker", block_size=64, kv_blocks=16_384))
    assert latency is None
    assert occupancy is not None
    assert occupancy.kv_tokens == 64 * 16_384


def test_an_explicit_model_wins() -> None:
    model = LatencyModel(base_s=1.0)
    assert info_of(SimArguments(preset="dynamo-mocker", latency=model)) == (model, None)


def test_a_preset_may_be_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    model = LatencyModel(base_s=0.25)
    path.write_bytes(msgspec.json.encode(PresetFile(name="mine", latency=model)))
    assert info_of(SimArguments(preset=str(path))) == (model, None)


def refused(preset: str) -> str:
    with pytest.raises(ConfigError) as caught:
        check_arguments("sim", {"preset": preset})
    return caught.value.message


def test_an_unknown_preset_names_the_nearest(tmp_path: Path) -> None:
    assert "unknown preset 'h200-lama-8b'; did you mean 'h200-llama-8b'?" in refused("h200-lama-8b")
    assert f"known: {', '.join(PRESETS)}, or a file" in refused("zzz")
    assert "cannot be read: No such file" in refused(str(tmp_path / "none.json"))
    broken = tmp_path / "broken.json"
    for content in (b"{", b'{"name": "x"}', b"\xff"):
        broken.write_bytes(content)
        assert "is not a file written by `kvolt fit --out`" in refused(str(broken))


def test_an_unused_wrong_preset_is_ignored() -> None:
    checked = check_arguments("sim", {"preset": "gone.json", "latency": {"base_s": 1}})
    assert isinstance(checked, SimArguments)
    assert isinstance(sim(checked), SimEngine)


@pytest.mark.parametrize("name", PRESETS)
def test_the_registered_model_includes_the_speed(name: str) -> None:
    """A router that was told another one would plan by it."""
    step = StepStats(batch=3, prefill_tokens=100, prefill_context=10_000, context_tokens=5_000)
    usual, quick = (
        next(model for model in info_of(SimArguments(preset=name, speed=speed)) if model is not None)
        for speed in (1.0, 4.0)
    )
    assert quick.step_s(step) == pytest.approx(usual.step_s(step) / 4)
