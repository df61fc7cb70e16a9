"""Prometheus metrics of KV-aware routers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.engines.lab import Lab, sim, until
from tests.unit.router.test_event_fed_router import BLOCK, PRICED, Scene, prompt

from kvolt.journey.journey import JourneyContext
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.metrics import KvCollector
from kvolt.router.port import Router, RouterContext
from kvolt.router.queue.queue_router import deciding_router
from kvolt.router.registry import find_router
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


def collected(routers: list[Router]) -> dict[str, list[tuple[dict[str, str], float]]]:
    registry = CollectorRegistry()
    registry.register(KvCollector(lambda: routers))
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def one(found: dict[str, list[tuple[dict[str, str], float]]], name: str, **labels: str) -> float:
    (value,) = [value for own, value in found[name] if labels.items() <= own.items()]
    return value


def test_a_router_without_kv_has_no_kv_metrics() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            client = await lab.client(await lab.worker("w0", sim()))
            assert collected([RoundRobinRouter(client)]) == {}

    run_virtual(scenario)


def test_metrics_of_decisions_workers_and_index() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(2)]
            runtime = await lab.runtime("edge")
            client = await runtime.client(workers[0].endpoint)
            await until(lambda: len(client.candidates()) == 2)
            settings = RouterSettings(shadow="classic")
            router = find_router("latency")(RouterContext(client, runtime, BLOCK, settings))
            task_group = TaskGroup("journeys")
            scene = Scene(lab, deciding_router(router), JourneyContext(router, client, task_group))  # type: ignore[arg-type]
            text = tuple(range(1, 6 * BLOCK + 4))
            await scene.ask(prompt("a", text))
            await scene.ask(prompt("b", text))
            found = collected([router])
            where = {
                "namespace": client.endpoint.namespace,
                "component": client.endpoint.component,
                "endpoint": client.endpoint.endpoint,
            }
            dynamo = "kvolt_router_"
            assert one(found, dynamo + "requests_started_total", **where) == 2
            assert one(found, dynamo + "requests_total", **where) == 2
            assert one(found, dynamo + "kv_hit_rate_count", **where) == 2
            assert one(found, dynamo + "kv_hit_rate_sum", **where) == pytest.approx(6 / 7)
            assert one(found, dynamo + "time_to_first_token_seconds_count", **where) == 2
            assert one(found, dynamo + "input_sequence_tokens_sum", **where) == 2 * len(text)
            assert one(found, dynamo + "output_sequence_tokens_sum", **where) == 2 * 8
            assert one(found, dynamo + "non_max_overlap_selections_total", worker_type="aggregated") == 0
            assert one(found, dynamo + "kv_event_source_mismatch_workers") == 0
            assert one(found, "kvolt_router_overhead_total_ms_count", **where) == 2
            assert one(found, "kvolt_router_predicted_time_to_first_token_seconds_count") == 2
            assert one(found, "kvolt_router_time_to_first_token_ratio_count") == 2
            assert one(found, "kvolt_router_reported_hit_rate_count") == 2
            assert one(found, "kvolt_router_policy_decisions_total", policy="latency") == 2
            assert one(found, "kvolt_router_workers", state="exact") == 2
            assert one(found, "kvolt_router_index_pairs") == router.inner.block_index.num_pairs > 0  # type: ignore[attr-defined]
            assert one(found, "kvolt_router_index_bytes") > 0
            assert one(found, "kvolt_router_ingest_total", outcome="events") > 0
            assert one(found, "kvolt_router_flagged_workers") == 0
            assert one(found, "kvolt_router_cached_token_reports_total") == 1
            assert one(found, "kvolt_router_reservations") == 0
            assert len(found["kvolt_router_worker_active_prefill_tokens"]) == 2
            shadow = found["kvolt_router_shadow_decisions_total"]
            assert sum(value for _, value in shadow) == 2
            await task_group.close()
            await router.close()

    run_virtual(scenario)


def test_metrics_of_approximate_workers() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            worker = await lab.worker("w0", sim(PRICED))
            runtime = await lab.runtime("edge")
            client = await runtime.client(worker.endpoint)
            await until(lambda: len(client.candidates()) == 1)
            settings = RouterSettings(events=False, queue=False)
            router = find_router("classic")(RouterContext(client, runtime, BLOCK, settings))
            request = prompt("a", tuple(range(1, 6 * BLOCK + 4)))
            decision = await router.route(request)
            router.mark_first_token(decision, 0)
            found = collected([router])
            assert one(found, "kvolt_router_approximate_workers") == 1
            assert one(found, "kvolt_router_approximate_entries") == 6
            assert one(found, "kvolt_router_reservations") == 1
            router.release(decision, None)
            await router.close()

    run_virtual(scenario)


def test_metrics_of_a_custom_policy(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "def cost(request, workers):\n    return workers.queue_s * (1 // (request.prompt_tokens - 20))\n"
    )

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", sim(PRICED))
            runtime = await lab.runtime("edge")
            client = await runtime.client(running.endpoint)
            await until(lambda: len(client.candidates()) == 1)
            name = f"{path}:cost"
            router = find_router(name)(RouterContext(client, runtime, BLOCK))
            for length in (20, 21, 20):
                decision = await router.route(prompt("a", tuple(range(length))))
                router.release(decision, None)
            path.write_text("def cost(")
            await asyncio.sleep(2.0)
            found = collected([router])
            assert one(found, "kvolt_router_policy_failures_total", policy=name, reason="malformed") == 0
            assert one(found, "kvolt_router_policy_failures_total", policy=name, reason="raised") == 2
            assert one(found, "kvolt_router_policy_reloads_total", policy=name, result="broken") == 1
            assert one(found, "kvolt_router_policy_reloads_total", policy=name, result="used") == 0
            await router.close()

    run_virtual(scenario)
