"""Several processes' metrics as one set: what is summed, told once, kept apart."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kvolt.frontend.metrics.edge_metrics import FrontendMetrics
from kvolt.frontend.metrics.merged_metrics import (
    GAUGES,
    Exposition,
    Family,
    MergeRule,
    merge,
    render,
    rule_of,
    snapshot,
)
from kvolt.frontend.metrics.models_metrics import ModelsCollector
from kvolt.router.metrics import queue_families
from kvolt.router.queue.queue_router import QueueRouter
from kvolt.router.service.link import LinkStats
from kvolt.router.service.metrics import LinkCollector
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import SocketNetwork
from kvolt.runtime.plane.metrics import PlaneCollector
from kvolt.runtime.plane.tcp_plane import tcp_plane


def process(name: str, seed: int) -> Exposition:
    """A frontend that has done a little work."""
    rng = random.Random(seed)
    registry = CollectorRegistry()
    Metrics(registry).http_observer("frontend")("GET", 200, rng.random())
    metrics = FrontendMetrics()
    series = metrics.model("m")
    series.active = rng.randrange(1, 9)
    series.output_tokens_total = rng.randrange(100)
    for _ in range(20):
        series.time_to_first_token.observe(rng.random())
    metrics.requests["m", "chat", "stream", "success", ""] += rng.randrange(1, 100)
    metrics.requests[name, "chat", "stream", "error", "internal"] += 1
    registry.register(metrics)
    return snapshot(registry, name)


def values(metrics: list[Metric], **labels: str) -> dict[str, float]:
    """The samples with these labels among theirs, by name and remaining labels."""
    found = {}
    for metric in metrics:
        for sample in metric.samples:
            if labels.items() <= sample.labels.items():
                rest = sorted((key, value) for key, value in sample.labels.items() if key not in labels)
                found[sample.name + "".join(f",{key}={value}" for key, value in rest)] = sample.value
    return found


def test_counters_histograms_and_running_requests_are_summed() -> None:
    expositions = [process(f"p{i}", i) for i in range(3)]
    merged = values(merge(expositions), model="m")
    alone = [values(merge([one]), model="m") for one in expositions]
    for name, value in merged.items():
        assert value == pytest.approx(sum(each[name] for each in alone)), name
    assert merged["kvolt_frontend_time_to_first_token_seconds_count"] == 60
    assert merged["kvolt_frontend_time_to_first_token_seconds_bucket,le=+Inf"] == 60
    assert merged["kvolt_frontend_active_requests"] > max(
        each["kvolt_frontend_active_requests"] for each in alone
    )
    for number in range(3):  # a series that only one process has
        assert values(merge(expositions), model=f"p{number}")


def test_every_process_renders_the_same_valid_text() -> None:
    expositions = [process(f"p{i}", i) for i in range(3)]
    text = render(merge(expositions), "none")
    assert text == render(merge(reversed(expositions)), "none")
    crossed = msgspec.msgpack.decode(msgspec.msgpack.encode(expositions), type=list[Exposition])
    assert text == render(merge(crossed), "none")
    families = list(text_string_to_metric_families(text.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    for family in families:
        series = [(sample.name, tuple(sorted(sample.labels.items()))) for sample in family.samples]
        assert len(series) == len(set(series)), family.name
        if family.type == "histogram":  # cumulative, as Prometheus wants them
            by_labels: dict[Any, list[float]] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    rest = tuple(sorted(item for item in sample.labels.items() if item[0] != "le"))
                    by_labels.setdefault(rest, []).append(sample.value)
            assert all(counts == sorted(counts) for counts in by_labels.values())


def test_what_is_a_process_own_is_kept_apart() -> None:
    merged = merge([process("a", 1), process("b", 2)])
    for name in ("a", "b"):
        own = values(merged, process=name)
        assert own["process_resident_memory_bytes"] > 0
        assert "process_cpu_seconds_total" in own


def one_gauge(name: str, *numbers: float) -> dict[str, float]:
    expositions = [
        Exposition(f"p{i}", [Family(name, "", "gauge", [(name, {"model": "m"}, number)])])
        for i, number in enumerate(numbers)
    ]
    return values(merge(expositions), model="m")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kvolt_frontend_active_requests", {"": 5}),
        ("kvolt_frontend_model_workers", {"": 3}),
        ("kvolt_frontend_model_context_length", {"": 3}),
        ("kvolt_router_present", {"": 2}),
        ("kvolt_never_heard_of", {",process=p0": 2, ",process=p1": 3}),
    ],
)
def test_gauges_by_the_table(name: str, expected: dict[str, float]) -> None:
    assert one_gauge(name, 2, 3) == {f"{name}{labels}": value for labels, value in expected.items()}


def test_the_first_of_several_creations_counts() -> None:
    families = [
        Family("x", "", "counter", [("x_total", {}, 1.0), ("x_created", {}, at)]) for at in (9.0, 7.0)
    ]
    expositions = [Exposition(f"p{i}", [family]) for i, family in enumerate(families)]
    assert values(merge(expositions)) == {"x_total": 2.0, "x_created": 7.0}


class _Idle(Collector):
    """Every collector that a frontend process registers, with nothing behind it."""

    def collect(self) -> Iterator[Metric]:
        no_models: Any = SimpleNamespace(all=lambda: [])
        link: Any = SimpleNamespace(stats=LinkStats(), present=True)
        yield from FrontendMetrics().collect()
        yield from ModelsCollector(no_models).collect()
        yield from LinkCollector(link).collect()
        inner: Any = SimpleNamespace()
        yield from queue_families([("e", QueueRouter(inner, lambda: 0.0))])
        yield from PlaneCollector(tcp_plane(SocketNetwork())("p", lambda stream: None)).collect()


async def test_every_gauge_of_a_frontend_has_its_place_in_the_table() -> None:
    registry = CollectorRegistry()
    Metrics(registry).count_tasks(asyncio.get_running_loop())
    registry.register(_Idle())
    gauges = {family.name for family in snapshot(registry, "p").families if family.kind == "gauge"}
    undecided = [
        name
        for name in gauges
        if not name.startswith("process_") and rule_of(name, "gauge") is MergeRule.EACH
    ]
    assert undecided == []
    assert gauges >= set(GAUGES), "the table names a gauge that is not exported"
