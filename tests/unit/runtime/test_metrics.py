"""Names, labels and the loop lag sampler."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import REGISTRY, CollectorRegistry

from kvolt.runtime.metrics import LoopLag, Metrics


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_counts_land_under_their_names() -> None:
    metrics = Metrics(CollectorRegistry())
    metrics.discovery_connected["file"].set(1)
    metrics.discovery_losses.inc()
    metrics.events_missed["kv"].inc(7)
    assert value(metrics, "kvolt_discovery_connected", backend="file") == 1
    assert value(metrics, "kvolt_discovery_losses_total") == 1
    assert value(metrics, "kvolt_events_missed_total", topic="kv") == 7


def test_a_label_is_resolved_once() -> None:
    metrics = Metrics(CollectorRegistry())
    assert metrics.events_missed["kv"] is metrics.events_missed["kv"]
    assert metrics.events_missed["kv"] is not metrics.events_received["kv"]


def test_two_runtimes_share_nothing_and_the_global_registry_stays_out() -> None:
    first, second = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    first.discovery_losses.inc()
    assert value(second, "kvolt_discovery_losses_total") == 0
    assert REGISTRY.get_sample_value("kvolt_discovery_losses_total") is None


def test_http_responses_are_counted_and_timed() -> None:
    metrics = Metrics(CollectorRegistry())
    observe = metrics.http_observer("admin")
    observe("GET", 200, 0.002)
    observe("GET", 200, 0.2)
    observe("GET", 404, 0.2)
    assert value(metrics, "kvolt_http_requests_total", server="admin", method="GET", status="200") == 2
    assert value(metrics, "kvolt_http_request_duration_seconds_count", server="admin") == 3


def test_render_is_what_prometheus_reads() -> None:
    body, content_type = Metrics(CollectorRegistry()).render()
    assert content_type.startswith("text/plain")
    assert b"process_resident_memory_bytes " in body
    assert b'kvolt_event_loop_lag_seconds_bucket{le="0.0001"}' in body


async def test_loop_lag_is_the_lateness_beyond_the_interval() -> None:
    class LateClock:
        """Reads 0 before each sleep of 10 ms and 60 ms after it."""

        def __init__(self) -> None:
            self.num_reads = 0

        def monotonic(self) -> float:
            self.num_reads += 1
            return 0.0 if self.num_reads % 2 else 0.06

        def wall(self) -> float:
            return 0.0

    metrics = Metrics(CollectorRegistry())
    clock = LateClock()
    sampler = asyncio.ensure_future(LoopLag(clock, metrics.loop_lag, interval_s=0.01).run())
    async with asyncio.timeout(5):
        while clock.num_reads < 4:
            await asyncio.sleep(0.005)
    sampler.cancel()
    count = value(metrics, "kvolt_event_loop_lag_seconds_count")
    assert count is not None
    assert count >= 2
    assert value(metrics, "kvolt_event_loop_lag_seconds_sum") == pytest.approx(count * 0.05)
