"""vLLM's names at a worker with the sim engine: there, right, and only there."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, STEP_S, Lab, ScriptedEngine, make_request, sim, start_stream
from tests.unit.worker.test_metrics import samples

from kvolt.core.card import EngineInfo
from kvolt.core.latency import LatencyModel
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.engines.sim.engine import SimArguments
from kvolt.testing import run_virtual
from kvolt.worker.metrics import WorkerMetrics, vllm_names

ENGINE = "{engine=0,model_name=sim-tiny}"


def test_sim_worker_exports_vllm_metric_names() -> None:
    async def scenario() -> dict[str, float]:
        async with Lab() as lab:
            running = await lab.worker("w0", sim(ARGUMENTS))
            client = await lab.client(running)
            for name in ("first", "again"):
                async with await start_stream(client, make_request(name, tokens=5, prompt=20)) as stream:
                    async for _ in stream:
                        pass
            return samples(running.worker.metrics)

    now = run_virtual(scenario)
    assert now[f"vllm:num_requests_running{ENGINE}"] == now[f"vllm:num_requests_waiting{ENGINE}"] == 0
    assert now[f"vllm:kv_cache_usage_perc{ENGINE}"] == now[f"vllm:gpu_cache_usage_perc{ENGINE}"] == 0
    assert now["vllm:cache_config_info{block_size=16,engine=0,num_gpu_blocks=16384}"] == 1
    assert now[f"vllm:prompt_tokens_total{ENGINE}"] == 40
    assert now[f"vllm:generation_tokens_total{ENGINE}"] == 10
    assert now[f"vllm:prefix_cache_queries_total{ENGINE}"] == 40
    assert now[f"vllm:prefix_cache_hits_total{ENGINE}"] == 16
    assert now["vllm:request_success_total{engine=0,finished_reason=length,model_name=sim-tiny}"] == 2
    expected = {"time_to_first_token": (2, 1), "inter_token_latency": (8, 1), "e2e_request_latency": (2, 5)}
    for name, (count, num_steps) in expected.items():
        assert now[f"vllm:{name}_seconds_count{ENGINE}"] == count
        assert now[f"vllm:{name}_seconds_sum{ENGINE}"] == pytest.approx(count * num_steps * STEP_S, rel=0.1)


def test_busy_worker_reports_load() -> None:
    async def scenario() -> dict[str, float]:
        async with Lab() as lab:
            arguments = SimArguments(max_num_seqs=2, kv_blocks=10, latency=LatencyModel(base_s=1.0))
            running = await lab.worker("w0", sim(arguments))
            client = await lab.client(running)
            streams = [await start_stream(client, make_request(name, tokens=20, prompt=30)) for name in "abc"]
            await asyncio.sleep(3.5)
            now = samples(running.worker.metrics)
            for stream in streams:
                await stream.aclose()
            return now

    now = run_virtual(scenario)
    assert now[f"vllm:num_requests_running{ENGINE}"] == 2
    assert now[f"vllm:num_requests_waiting{ENGINE}"] == 1
    assert 0 < now[f"vllm:kv_cache_usage_perc{ENGINE}"] <= 1


def test_other_engines_have_no_such_names() -> None:
    class Other(ScriptedEngine):
        async def start(self) -> EngineInfo:
            return replace(await super().start(), engine="other")

    async def scenario() -> dict[str, float]:
        async with Lab() as lab:
            return samples((await lab.worker("w0", Other())).worker.metrics)

    assert not [name for name in run_virtual(scenario) if name.startswith("vllm:")]


def between(*told: tuple[int, int, int, float]) -> tuple[float, float]:
    """Count and sum of times between tokens after steps of: running, batch, prompt tokens, time."""
    metrics = WorkerMetrics()
    metrics.alias_families = vllm_names
    for running, batch, prompt, time_s in told:
        metrics.on_load(WorkerLoad(running=running, step=StepStats(batch, prompt, time_s=time_s)))
    now = samples(metrics)
    name = "vllm:inter_token_latency_seconds"
    labels = "{engine=0,model_name=}"
    return now[f"{name}_count{labels}"], now[f"{name}_sum{labels}"]


def test_the_time_between_tokens_is_that_of_the_steps_between_them() -> None:
    assert between((1, 0, 9, 5.0), (1, 1, 0, 1.0), (0, 1, 0, 2.0)) == (2, 3.0)
    assert between((2, 2, 5, 1.0), (2, 2, 0, 2.0)) == (4, 6.0)


def test_answers_that_waited_for_prompts_waited_that_long() -> None:
    assert between((2, 2, 0, 1.0), (3, 0, 9, 10.0), (3, 3, 0, 1.0)) == (5, 2 * 1.0 + 2 * 11.0 + 1 * 1.0)


def test_what_had_ended_before_did_not_wait() -> None:
    assert between((0, 2, 0, 1.0), (1, 0, 9, 10.0), (1, 1, 0, 1.0)) == (3, 3.0)
