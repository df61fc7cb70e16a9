"""A worker's metrics: one set for every engine, at a cost per step and not per token."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.engines.lab import Lab, ScriptedEngine, make_request, start_stream, until

from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.errors import EngineFailed, KvoltError, to_info
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import Stored
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.testing import run_virtual
from kvolt.worker.metrics import WorkerMetrics


def samples(metrics: WorkerMetrics) -> dict[str, float]:
    """By name and, in braces, the labels besides the model and the worker's own."""
    registry = CollectorRegistry()
    registry.register(metrics)
    generate_latest(registry)  # what Prometheus reads must be well-formed
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            extra = {
                key: value
                for key, value in sample.labels.items()
                if key not in ("namespace", "component", "endpoint", "worker_id", "model")
            }
            inside = ",".join(f"{key}={value}" for key, value in sorted(extra.items()))
            found[sample.name + (f"{{{inside}}}" if inside else "")] = sample.value
    return found


def test_steps_are_added_up() -> None:
    metrics = WorkerMetrics()
    for batch, prefill, time_s in ((0, 100, 0.04), (2, 0, 0.004), (2, 7, 0.006)):
        stats = StepStats(batch=batch, prefill_tokens=prefill, time_s=time_s)
        metrics.on_load(WorkerLoad(running=2, waiting=1, kv_used_blocks=9, kv_total_blocks=36, step=stats))
    metrics.on_load(WorkerLoad(running=1, kv_used_blocks=5, kv_total_blocks=36))
    now = samples(metrics)
    assert now["kvolt_worker_running{dp_rank=0}"] == 1
    assert now["kvolt_worker_waiting{dp_rank=0}"] == 0
    assert now["kvolt_worker_kv_used_blocks{dp_rank=0}"] == 5
    assert now["kvolt_worker_kv_total_blocks{dp_rank=0}"] == 36
    assert now["kvolt_worker_steps_total"] == 3
    assert now["kvolt_worker_prefill_tokens_total"] == 107
    assert now["kvolt_worker_decode_tokens_total"] == 4
    assert now["kvolt_worker_step_seconds_count"] == 3
    assert now["kvolt_worker_step_seconds_sum"] == pytest.approx(0.05)
    assert now["kvolt_worker_step_seconds_bucket{le=0.005}"] == 1
    assert now["kvolt_worker_step_seconds_bucket{le=0.0075}"] == 2
    assert now["kvolt_worker_step_seconds_bucket{le=+Inf}"] == 3
    assert now["kvolt_worker_kv_usage_ratio{dp_rank=0}"] == pytest.approx(5 / 36)


def test_ranks_are_distinguished() -> None:
    metrics = WorkerMetrics()
    metrics.on_load(WorkerLoad(running=3, kv_total_blocks=10))
    metrics.on_load(WorkerLoad(running=5, kv_total_blocks=10, dp_rank=1))
    now = samples(metrics)
    assert (now["kvolt_worker_running{dp_rank=0}"], now["kvolt_worker_running{dp_rank=1}"]) == (3, 5)
    assert now["kvolt_worker_kv_total_blocks{dp_rank=1}"] == 10


def test_the_hit_rate_is_that_of_recent_prompts_by_tokens() -> None:
    metrics = WorkerMetrics()
    assert metrics.hit_rate == 0
    metrics.on_prompt(100, 0)
    metrics.on_prompt(300, 300)
    assert metrics.hit_rate == pytest.approx(0.75, abs=0.01)
    for _ in range(1000):
        metrics.on_prompt(10, 5)
    assert metrics.hit_rate == pytest.approx(0.5, abs=0.01)
    now = samples(metrics)
    assert now["kvolt_worker_kv_hit_rate"] == metrics.hit_rate
    assert now["kvolt_worker_prompt_tokens_total"] == 10_400
    assert now["kvolt_worker_cached_tokens_total"] == 5_300


def test_every_way_a_request_can_end_is_counted_once() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client = await lab.client(running)
            end = FinishReason.STOP

            async def start(name: str, **fields: Any) -> Any:
                stream = await start_stream(client, make_request(name), **fields)
                await until(lambda: name in [request.request_id for request in engine.submitted])
                return stream

            ends, fails, leaves = await start("ends"), await start("fails"), await start("leaves")
            late = await start("late", deadlines=Deadlines(total_s=2.0))
            assert samples(running.worker.metrics)["kvolt_worker_open_requests"] == 4
            engine.put(StepOutput(((RequestId("ends"), Delta((1,), cached_tokens=8)),)))
            engine.put(StepOutput(((RequestId("ends"), Delta((1,), finish=end)),)))
            failure = to_info(EngineFailed("no"))
            engine.put(StepOutput(failed=((RequestId("fails"), failure),)))
            await ends.aclose()
            for stream in (fails, late):
                with pytest.raises(KvoltError):
                    await anext(stream)
            await leaves.aclose()
            with pytest.raises(KvoltError):
                async with await start_stream(client, make_request("other", model="another")) as other:
                    await anext(other)
            await until(lambda: not running.worker._open)
            now = samples(running.worker.metrics)
            outcomes = {
                name.partition("outcome=")[2].rstrip("}"): count
                for name, count in now.items()
                if name.startswith("kvolt_worker_requests_total")
            }
            assert outcomes == {
                "finished": 1,
                "failed": 1,
                "cancelled": 1,
                "deadline": 1,
                "refused": 1,
                "withdrawn": 0,
            }
            assert now["kvolt_worker_requests_started_total"] == 4
            assert now["kvolt_worker_open_requests"] == 0
            assert now["kvolt_worker_request_seconds_count"] == 4
            assert (now["kvolt_worker_prompt_tokens_total"], now["kvolt_worker_cached_tokens_total"]) == (
                20,
                8,
            )

    run_virtual(scenario)


def test_worker_exports_identity_and_load_time() -> None:
    class Slow(ScriptedEngine):
        async def start(self) -> Any:
            await asyncio.sleep(5)
            return await super().start()

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Slow())
            stored = Stored.from_hashes([1])
            engine.put(StepOutput(kv_changes=(stored,)))
            await asyncio.sleep(3)
            now = samples(running.worker.metrics)
            assert now["kvolt_worker_load_seconds"] == pytest.approx(5, abs=0.1)
            assert now["kvolt_worker_uptime_seconds"] == pytest.approx(3, abs=0.1)
            assert now["kvolt_worker_kv_events_total{kind=stored}"] == 1
            assert now["kvolt_worker_kv_history_bytes"] > 0
            assert now["kvolt_worker_step_age_seconds"] == 0
            labels = running.worker.metrics.labels
            assert (labels.model, labels.namespace, labels.instance) == (
                "sim-tiny",
                "test",
                running.worker._instance,
            )

    run_virtual(scenario)
