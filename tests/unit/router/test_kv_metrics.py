"""What routers with an index tell Prometheus, under Dynamo's names and ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tests.unit.engines.lab import Lab, sim, until
from tests.unit.router.test_event_fed_router import BLOCK, PRICED, Scene, prompt

from kvolt.journey.journey import Road
from kvolt.router.kv_metrics import KvCollector
from kvolt.router.port import RoundRobinRouter, Router, RouterContext
from kvolt.router.queue.queue_router import who_decides
from kvolt.router.registry import find_router
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import Crew
from kvolt.testing import run_virtual


def told(routers: list[Router]) -> dict[str, list[tuple[dict[str, str], float]]]:
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


def test_a_router_without_kv_tells_nothing() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            client = await lab.client(await lab.worker("w0", sim()))
            assert told([RoundRobinRouter(client)]) == {}

    run_virtual(scenario)


def test_decisions_workers_and_index_are_told() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(PRICED)) for number in range(2)]
            runtime = await lab.runtime("edge")
            client = await runtime.client(workers[0].endpoint)
            await until(lambda: len(client.candidates()) == 2)
            settings = RouterSettings(shadow="classic")
            router = find_router("latency")(RouterContext(client, runtime, BLOCK, settings))
            crew = Crew("journeys")
            scene = Scene(lab, who_decides(router), Road(router, client, crew))  # type: ignore[arg-type]
            text = tuple(range(1, 6 * BLOCK + 4))
            await scene.ask(prompt("a", text))
            await scene.ask(prompt("b", text))
            found = told([router])
            where = {
                "dynamo_namespace": client.endpoint.namespace,
                "dynamo_component": client.endpoint.component,
                "dynamo_endpoint": client.endpoint.endpoint,
            }
            dynamo = "dynamo_component_router_"
            assert one(found, dynamo + "requests_started_total", **where) == 2
            assert one(found, dynamo + "requests_total", **where) == 2
            assert one(found, dynamo + "kv_hit_rate_count", **where) == 2
            assert one(found, dynamo + "kv_hit_rate_sum", **where) == pytest.approx(6 / 7)
            assert one(found, dynamo + "time_to_first_token_seconds_count", **where) == 2
            assert one(found, dynamo + "input_sequence_tokens_sum", **where) == 2 * len(text)
            assert one(found, dynamo + "output_sequence_tokens_sum", **where) == 2 * 8
            assert one(found, dynamo + "non_max_overlap_selections_total", worker_type="aggregated") == 0
            assert one(found, dynamo + "kv_event_source_mismatch_workers") == 0
            assert one(found, "dynamo_router_overhead_total_ms_count", **where) == 2
            assert one(found, "kvolt_router_predicted_time_to_first_token_seconds_count") == 2
            assert one(found, "kvolt_router_time_to_first_token_ratio_count") == 2
            assert one(found, "kvolt_router_reported_hit_rate_count") == 2
            assert one(found, "kvolt_router_policy_decisions_total", policy="latency") == 2
            assert one(found, "kvolt_router_workers", state="exact") == 2
            assert one(found, "kvolt_router_index_pairs") == router.inner.index.num_pairs > 0  # type: ignore[attr-defined]
            assert one(found, "kvolt_router_index_bytes") > 0
            assert one(found, "kvolt_router_ingest_total", what="events") > 0
            assert one(found, "kvolt_router_flagged_workers") == 0
            assert one(found, "kvolt_router_cached_token_reports_total") == 1
            assert one(found, "kvolt_router_bookings") == 0
            assert len(found["dynamo_frontend_worker_active_prefill_tokens"]) == 2
            shadow = found["kvolt_router_shadow_decisions_total"]
            assert sum(value for _, value in shadow) == 2
            await crew.close()
            await router.close()

    run_virtual(scenario)


def test_approximate_workers_are_told() -> None:
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
            router.begun(decision, 0)
            found = told([router])
            assert one(found, "kvolt_router_approximate_workers") == 1
            assert one(found, "kvolt_router_approximate_entries") == 6
            assert one(found, "kvolt_router_bookings") == 1
            router.free(decision, None)
            await router.close()

    run_virtual(scenario)


def test_ones_own_policy_is_told_of(tmp_path: Path) -> None:
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
                router.free(decision, None)
            path.write_text("def cost(")
            await asyncio.sleep(2.0)
            found = told([router])
            assert one(found, "kvolt_router_policy_failures_total", policy=name, reason="malformed") == 0
            assert one(found, "kvolt_router_policy_failures_total", policy=name, reason="raised") == 2
            assert one(found, "kvolt_router_policy_edits_total", policy=name, result="broken") == 1
            assert one(found, "kvolt_router_policy_edits_total", policy=name, result="used") == 0
            await router.close()

    run_virtual(scenario)
