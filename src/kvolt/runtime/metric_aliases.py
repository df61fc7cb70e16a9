"""Metric aliases: kvolt's series once more under the names that Dynamo's dashboards and alerts query. Pure.

`metrics.aliases = "dynamo"` adds them to what a process serves. Families whose prefix alone differs are renamed by
`_PREFIXES`; all others have an entry in `_DYNAMO`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

import msgspec
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from kvolt.runtime.config.settings import AliasScheme

_NO_LABELS: Mapping[str, str] = MappingProxyType({})


class Alias(msgspec.Struct, frozen=True):
    """One more name for a family, or for its samples with certain labels."""

    source: str
    name: str
    where: Mapping[str, str] = _NO_LABELS
    """Labels of the samples that are taken; the alias does not have these labels."""
    labels: Mapping[str, str] = _NO_LABELS
    """Labels that are added."""
    scale: float = 1.0
    kind: Literal["same", "mean", "unknown"] = "same"
    """`mean`: sum over count of a histogram, as a gauge. `unknown`: a counter without the suffix `_total`."""


_PREFIXES = {
    "kvolt_frontend_": "dynamo_frontend_",
    "kvolt_router_overhead_": "dynamo_router_overhead_",
}

_LABELS = {"namespace": "dynamo_namespace", "component": "dynamo_component", "endpoint": "dynamo_endpoint"}
"""Labels of routers' and workers' families."""

_ROUTER = (
    "time_to_first_token_seconds",
    "input_sequence_tokens",
    "output_sequence_tokens",
    "kv_hit_rate",
    "requests_started",
    "requests",
    "kv_event_source_mismatch_workers",
    "non_max_overlap_selections",
    "overlap_blocks_lost",
)
_WORKER = {
    "requests_started": "requests",
    "open_requests": "inflight_requests",
    "uptime_seconds": "uptime_seconds",
    "kv_total_blocks": "total_blocks",
    "kv_usage_ratio": "gpu_cache_usage_percent",
    "kv_hit_rate": "kv_cache_hit_rate",
    "load_seconds": "model_load_time_seconds",
    "request_seconds": "request_duration_seconds",
}
_TIER_MOVES = (
    ("stored", "host", "kvbm_offload_blocks_d2h"),
    ("stored", "disk", "kvbm_offload_blocks_h2d"),
    ("stored", "object", "kvbm_offload_blocks_d2o"),
    ("loaded", "host", "kvbm_onboard_blocks_h2d"),
    ("loaded", "disk", "kvbm_onboard_blocks_d2d"),
    ("loaded", "object", "kvbm_onboard_blocks_o2d"),
)
"""Dynamo's `h2d` is host to disk for offloads, and host to device for onboarding."""

_DYNAMO = (
    *(Alias(f"kvolt_router_{name}", f"dynamo_component_router_{name}") for name in _ROUTER),
    *(Alias(f"kvolt_worker_{name}", f"dynamo_component_{theirs}") for name, theirs in _WORKER.items()),
    Alias("kvolt_worker_requests", "dynamo_component_cancellation", {"outcome": "cancelled"}),
    *(
        Alias("kvolt_worker_requests", "dynamo_component_errors", {"outcome": outcome}, {"error_type": kind})
        for outcome, kind in (("failed", "generate"), ("refused", "invalid_message"))
    ),
    Alias("kvolt_frontend_active_requests", "dynamo_frontend_inflight_requests"),
    Alias("kvolt_router_kv_hit_rate", "dynamo_router_kv_cache_hit_ratio", kind="mean"),
    Alias("kvolt_router_queue_requests", "dynamo_frontend_router_queue_pending_requests"),
    Alias("kvolt_router_worker_active_prefill_tokens", "dynamo_frontend_worker_active_prefill_tokens"),
    Alias("kvolt_router_worker_active_decode_blocks", "dynamo_frontend_worker_active_decode_blocks"),
    Alias("kvolt_worker_first_token_seconds", "dynamo_worker_prefill_latency_ms", scale=1e3),
    Alias("kvolt_tier_utilization_ratio", "dynamo_kvbm_memory_utilization_percent", scale=100.0),
    Alias("kvolt_tier_matched_tokens", "kvbm_matched_tokens", kind="unknown"),
    *(
        Alias(f"kvolt_tier_{move}_blocks", name, {"tier": tier}, kind="unknown")
        for move, tier, name in _TIER_MOVES
    ),
    *(
        Alias("kvolt_tier_hit_rate", f"kvbm_{tier}_cache_hit_rate", {"tier": tier})
        for tier in ("host", "disk", "object", "peer")
    ),
)


class WithAliases(Collector):
    """A collector's families, followed by their aliases."""

    def __init__(self, families: Iterable[Metric], scheme: AliasScheme) -> None:
        self._families = families
        self._scheme = scheme

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            yield family
            if self._scheme == "dynamo":
                yield from aliases_of(family)


def aliases_of(family: Metric) -> Iterator[Metric]:
    """Yield a family under each of Dynamo's names for it."""
    for ours, theirs in _PREFIXES.items():
        if family.name.startswith(ours):
            yield _renamed(family, [Alias(family.name, theirs + family.name.removeprefix(ours))])
    by_name: dict[str, list[Alias]] = {}
    for alias in _BY_SOURCE.get(family.name, ()):
        by_name.setdefault(alias.name, []).append(alias)
    for aliases in by_name.values():
        yield _renamed(family, aliases)


_BY_SOURCE: dict[str, list[Alias]] = {}
for _alias in _DYNAMO:
    _BY_SOURCE.setdefault(_alias.source, []).append(_alias)


def _renamed(family: Metric, aliases: Sequence[Alias]) -> Metric:
    """Family with the samples of all aliases, which have one name and kind."""
    name, kind = aliases[0].name, aliases[0].kind
    renamed = Metric(
        name, family.documentation, {"same": family.type, "mean": "gauge", "unknown": "unknown"}[kind]
    )
    for alias in aliases:
        samples = [each for each in family.samples if alias.where.items() <= each.labels.items()]
        for sample in _means(family.name, samples) if kind == "mean" else samples:
            suffix = sample.name.removeprefix(family.name)
            if kind == "unknown":
                if suffix != "_total":
                    continue
                suffix = ""
            # The `endpoint` of a frontend's or a queue's series is not that of a component, and keeps its name.
            names = _LABELS if "component" in sample.labels else {}
            labels = {
                names.get(key, key): value for key, value in sample.labels.items() if key not in alias.where
            }
            labels.update(alias.labels)
            is_count = suffix in ("_bucket", "_count", "_created")
            if alias.scale != 1.0 and labels.get("le", "+Inf") != "+Inf":
                labels["le"] = str(float(labels["le"]) * alias.scale)
            renamed.add_sample(
                name + suffix, labels, sample.value if is_count else sample.value * alias.scale
            )
    return renamed


def _means(name: str, samples: Iterable[Sample]) -> Iterator[Sample]:
    """One sample per histogram: sum over count, 0 without observations."""
    sums: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in samples:
        if sample.name in (f"{name}_sum", f"{name}_count"):
            sums.setdefault(tuple(sorted(sample.labels.items())), {})[sample.name] = sample.value
    for labels, pair in sums.items():
        count = pair.get(f"{name}_count", 0.0)
        yield Sample(name, dict(labels), pair.get(f"{name}_sum", 0.0) / count if count else 0.0)
