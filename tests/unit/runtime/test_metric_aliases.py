"""Metric aliases: the same figures under Dynamo's names, and nothing changed under ours."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvolt.runtime.metric_aliases import AliasScheme, WithAliases, aliases_of

Series = tuple[str, frozenset[tuple[str, str]]]

OURS = {"namespace": "n", "component": "c", "endpoint": "e"}
THEIRS = {f"dynamo_{name}": value for name, value in OURS.items()}


def counter(name: str, labels: dict[str, str], value: float) -> CounterMetricFamily:
    family = CounterMetricFamily(name, "help", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def gauge(name: str, labels: dict[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, "help", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def histogram(name: str, labels: dict[str, str]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, "help", labels=tuple(labels))
    family.add_metric(tuple(labels.values()), [("0.25", 1), ("0.5", 3), ("+Inf", 4)], 2.0)
    return family


def served(
    families: list[Metric], scheme: AliasScheme = "dynamo"
) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Sample values by name and labels, as Prometheus would parse them."""
    text = generate_latest(WithAliases(families, scheme)).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def at(**labels: str) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def test_without_a_scheme_only_our_names_are_served() -> None:
    samples = served([counter("kvolt_frontend_requests", {"model": "m"}, 3)], "none")
    assert list(samples) == [("kvolt_frontend_requests_total", at(model="m"))]


def test_frontend_families_are_served_under_both_prefixes() -> None:
    samples = served([counter("kvolt_frontend_requests", {"model": "m", "endpoint": "chat"}, 3)])
    labels = at(model="m", endpoint="chat")
    assert samples["kvolt_frontend_requests_total", labels] == 3
    assert samples["dynamo_frontend_requests_total", labels] == 3


def test_endpoint_labels_of_workers_get_dynamos_names() -> None:
    samples = served([counter("kvolt_worker_requests_started", OURS, 7)])
    assert (
        samples[
            "dynamo_component_requests_total",
            at(**THEIRS),
        ]
        == 7
    )


def test_seconds_become_milliseconds_in_buckets_and_sum_but_not_in_counts() -> None:
    samples = served([histogram("kvolt_worker_first_token_seconds", {"model": "m"})])
    name = "dynamo_worker_prefill_latency_ms"
    assert samples[f"{name}_bucket", at(model="m", le="250.0")] == 1
    assert samples[f"{name}_bucket", at(model="m", le="+Inf")] == 4
    assert samples[f"{name}_sum", at(model="m")] == 2000
    assert samples[f"{name}_count", at(model="m")] == 4


def test_a_mean_is_sum_over_count() -> None:
    samples = served([histogram("kvolt_router_kv_hit_rate", OURS)])
    assert samples["dynamo_router_kv_cache_hit_ratio", at(**THEIRS)] == 0.5


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_utilization_of_tiers_is_a_percentage(tier: str) -> None:
    samples = served([gauge("kvolt_tier_utilization_ratio", {"tier": tier}, 0.25)])
    assert samples["dynamo_kvbm_memory_utilization_percent", at(tier=tier)] == 25


def test_moves_between_tiers_are_chosen_by_tier_and_have_no_suffix() -> None:
    samples = served([counter("kvolt_tier_stored_blocks", {"tier": "disk"}, 5)])
    assert samples["kvbm_offload_blocks_h2d", at()] == 5
    assert ("kvbm_offload_blocks_h2d_total", at()) not in samples


def test_router_overhead_has_dynamos_endpoint_labels() -> None:
    samples = served([histogram("kvolt_router_overhead_total_ms", OURS)])
    assert ("dynamo_router_overhead_total_ms_count", at(**THEIRS)) in samples


def test_the_endpoint_of_a_queue_keeps_its_name() -> None:
    samples = served([gauge("kvolt_router_queue_requests", {"endpoint": "a.b.generate"}, 2)])
    assert samples["dynamo_frontend_router_queue_pending_requests", at(endpoint="a.b.generate")] == 2


def test_errors_of_a_worker_are_one_family_by_type() -> None:
    family = counter("kvolt_worker_requests", {**OURS, "outcome": "failed"}, 3)
    family.add_metric((*OURS.values(), "refused"), 2)
    samples = served([family])
    name = "dynamo_component_errors_total"
    assert samples[name, at(**THEIRS, error_type="generate")] == 3
    assert samples[name, at(**THEIRS, error_type="invalid_message")] == 2
    names = [alias.name for alias in aliases_of(family)]
    assert len(names) == len(set(names))
