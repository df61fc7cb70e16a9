"""Metrics of several processes merged into one set, as if they were one process. Pure.

Counters and histograms are summed. A gauge is summed only if the sum is meaningful; a value that all processes share
is exported once; a value of one process (memory, files) gets a `process` label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

import msgspec
from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvolt.runtime.config.settings import AliasScheme
from kvolt.runtime.metric_aliases import WithAliases

Labels = tuple[tuple[str, str], ...]


class MergeRule(Enum):
    """Rule that merges the values of several processes for one series."""

    SUM = auto()
    MAX = auto()
    """All processes observe the same thing; one that has not observed all of it yet reports less."""
    MIN = auto()
    """Healthy only if it is healthy for all processes."""
    EACH = auto()
    """Kept apart by a `process` label."""


GAUGES = {
    "kvolt_frontend_disconnected_clients": MergeRule.SUM,
    "kvolt_frontend_active_requests": MergeRule.SUM,
    "kvolt_frontend_tokenizer_cache_bytes": MergeRule.SUM,
    "kvolt_frontend_model_context_length": MergeRule.MAX,
    "kvolt_frontend_model_kv_cache_block_size": MergeRule.MAX,
    "kvolt_frontend_model_total_kv_blocks": MergeRule.MAX,
    "kvolt_frontend_model_max_num_seqs": MergeRule.MAX,
    "kvolt_frontend_model_max_num_batched_tokens": MergeRule.MAX,
    "kvolt_frontend_model_workers": MergeRule.MAX,
    "kvolt_frontend_model_migration_limit": MergeRule.MAX,
    "kvolt_router_queue_requests": MergeRule.SUM,
    "kvolt_plane_connections": MergeRule.SUM,
    "kvolt_plane_streams_active": MergeRule.SUM,
    "kvolt_plane_send_buffer_bytes": MergeRule.SUM,
    "kvolt_plane_queue_depth": MergeRule.SUM,
    "kvolt_plane_unfinished_message_bytes": MergeRule.SUM,
    "kvolt_plane_unfinished_message_limit_bytes": MergeRule.SUM,
    "kvolt_tasks": MergeRule.SUM,
    "kvolt_discovery_connected": MergeRule.MIN,
    "kvolt_router_present": MergeRule.MIN,
    "kvolt_model_workers": MergeRule.MAX,
    "kvolt_model_incompatible_prefill_workers": MergeRule.MAX,
    "kvolt_router_breaker_state": MergeRule.MAX,
    "kvolt_router_worker_failure_rate": MergeRule.MAX,
    "kvolt_router_queue_tokens": MergeRule.SUM,
    "kvolt_router_unstarted_requests": MergeRule.SUM,
}
"""Rules of gauges by name. A gauge that is missing here is kept per process, which is always correct."""

_OWN = "process_"
"""Prefix of metrics that the operating system provides per process, counters included."""


class Family(msgspec.Struct, frozen=True, array_like=True):
    """One metric of one process."""

    name: str
    help: str
    kind: str
    samples: list[tuple[str, dict[str, str], float]]


class Exposition(msgspec.Struct, frozen=True):
    """All metrics of one process at one moment."""

    process: str
    families: list[Family]


def snapshot(registry: Collector, process: str) -> Exposition:
    """Metrics of this process alone."""
    return Exposition(
        process,
        [
            Family(
                metric.name,
                metric.documentation,
                metric.type,
                [(sample.name, dict(sample.labels), float(sample.value)) for sample in metric.samples],
            )
            for metric in registry.collect()
        ],
    )


def rule_of(name: str, kind: str) -> MergeRule:
    if name.startswith(_OWN):
        return MergeRule.EACH
    if kind in ("counter", "histogram"):
        return MergeRule.SUM
    if kind != "gauge":
        return MergeRule.EACH
    return GAUGES.get(name, MergeRule.EACH)


def merge(expositions: Iterable[Exposition]) -> list[Metric]:
    """Merge the metrics of all processes. Independent of their order."""
    merged: dict[str, _Merged] = {}
    for exposition in sorted(expositions, key=lambda one: one.process):
        for family in exposition.families:
            into = merged.get(family.name)
            if into is None:
                rule = rule_of(family.name, family.kind)
                into = merged[family.name] = _Merged(family, rule)
            into.add(family, exposition.process)
    return [family.metric() for family in merged.values()]


_CHOOSE: dict[MergeRule, Callable[[float, float], float]] = {
    MergeRule.SUM: lambda one, other: one + other,
    MergeRule.MAX: max,
    MergeRule.MIN: min,
}


class _Merged:
    """Metric family under construction, from the families of several processes."""

    def __init__(self, first: Family, rule: MergeRule) -> None:
        self._family = first
        self._rule = rule
        self._created = f"{first.name}_created"
        self._values: dict[tuple[str, Labels], float] = {}

    def add(self, family: Family, process: str) -> None:
        values = self._values
        for name, labels, value in family.samples:
            if self._rule is MergeRule.EACH:
                values[name, (*labels.items(), ("process", process))] = value
                continue
            key = (name, tuple(sorted(labels.items())))
            before = values.get(key)
            # A counter has existed since the first process made it.
            choose = min if name == self._created else _CHOOSE[self._rule]
            values[key] = value if before is None else choose(before, value)

    def metric(self) -> Metric:
        metric = Metric(self._family.name, self._family.help, self._family.kind)
        for (name, labels), value in self._values.items():
            metric.add_sample(name, dict(labels), value)
        return metric


def render(metrics: Sequence[Metric], aliases: AliasScheme) -> bytes:
    """Prometheus text."""
    return generate_latest(WithAliases(metrics, aliases))
