"""Prometheus metrics of KV-aware routers; read at each scrape.

Every series has the endpoint as three labels; per-worker series are bounded by the registered workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.router.policy.custom import FAILURE_REASONS
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import deciding_router
from kvolt.runtime.histogram import Histogram

Labels = tuple[str, ...]

_ENDPOINT = ("namespace", "component", "endpoint")
_PREFIX = "kvolt_router"
_WORKER_TYPE = "aggregated"

_Histogram = tuple[str, str, Callable[[EventFedRouter], Histogram]]
_Value = tuple[str, str, Callable[[EventFedRouter], float]]

_HISTOGRAMS: tuple[_Histogram, ...] = (
    (
        f"{_PREFIX}_time_to_first_token_seconds",
        "Time from a routing decision to the first token",
        lambda it: it.stats.ttft_s,
    ),
    (f"{_PREFIX}_input_sequence_tokens", "Prompt tokens per request", lambda it: it.stats.input_tokens),
    (f"{_PREFIX}_output_sequence_tokens", "Output tokens per request", lambda it: it.stats.output_tokens),
    (
        f"{_PREFIX}_kv_hit_rate",
        "Fraction of a prompt's blocks that the index predicted at the chosen worker",
        lambda it: it.stats.hit_rate,
    ),
    (
        f"{_PREFIX}_overhead_indexer_find_matches_ms",
        "Time to look up a prompt in the prefix index",
        lambda it: it.stats.lookup_ms,
    ),
    (
        f"{_PREFIX}_overhead_scheduling_ms",
        "Time to compute the cost of all workers",
        lambda it: it.stats.scheduling_ms,
    ),
    (f"{_PREFIX}_overhead_total_ms", "Time of a routing decision", lambda it: it.stats.total_ms),
    (
        f"{_PREFIX}_predicted_time_to_first_token_seconds",
        "Predicted time from a routing decision to the first token",
        lambda it: it.stats.predicted_ttft_s,
    ),
    (
        f"{_PREFIX}_time_to_first_token_ratio",
        "Measured over predicted time to the first token",
        lambda it: it.stats.ttft_ratio,
    ),
    (
        f"{_PREFIX}_reported_hit_rate",
        "Fraction of a prompt that the worker reported as cached",
        lambda it: it.stats.reported_hit_rate,
    ),
)

_COUNTERS: tuple[_Value, ...] = (
    (f"{_PREFIX}_requests_started", "Requests routed to a worker", lambda it: it.stats.num_started),
    (f"{_PREFIX}_requests", "Requests that have ended", lambda it: it.stats.num_ended),
    (
        f"{_PREFIX}_saturated_decisions",
        "Requests routed while every worker was saturated",
        lambda it: it.stats.num_saturated,
    ),
    (
        f"{_PREFIX}_cached_token_reports",
        "Requests for which the index predicted cached tokens and the worker reported the real number",
        lambda it: it.prefix_index.health.num_reports,
    ),
    (
        f"{_PREFIX}_overlap_mispredictions",
        "Cached token reports that differ from the prediction by more than half",
        lambda it: it.prefix_index.health.num_wrong,
    ),
    (
        f"{_PREFIX}_worker_flagged",
        "Times that the index of a worker was flagged as unreliable",
        lambda it: it.prefix_index.health.num_flaggings,
    ),
)

_GAUGES: tuple[_Value, ...] = (
    (
        f"{_PREFIX}_kv_event_source_mismatch_workers",
        "Workers without usable KV events",
        lambda it: it.ingest.num_in_state(FeedState.NO_EVENTS),
    ),
    (f"{_PREFIX}_reservations", "Requests in flight", lambda it: it.num_in_flight),
    (
        f"{_PREFIX}_replicas",
        "Other router replicas of the same workers",
        lambda it: it.gossip.replicas.num_replicas,
    ),
    (f"{_PREFIX}_index_bytes", "Memory of the prefix index", lambda it: it.block_index.num_bytes),
    (f"{_PREFIX}_index_blocks", "Distinct blocks in the prefix index", lambda it: it.block_index.num_blocks),
    (
        f"{_PREFIX}_index_pairs",
        "Pairs of block and worker in the prefix index",
        lambda it: it.block_index.num_pairs,
    ),
    (f"{_PREFIX}_pools", "Shared KV pools whose events are indexed", lambda it: it.ingest.num_pools),
    (
        f"{_PREFIX}_events_behind",
        "KV events received and not indexed yet",
        lambda it: it.ingest.num_unapplied,
    ),
    (
        f"{_PREFIX}_approximate_workers",
        "Worker ranks indexed by this router's decisions only",
        lambda it: it.prefix_index.approximate.num_worker_ranks,
    ),
    (
        f"{_PREFIX}_approximate_entries",
        "Blocks in the approximate index",
        lambda it: it.prefix_index.approximate.num_entries,
    ),
    (
        f"{_PREFIX}_approximate_bytes",
        "Memory of the approximate index",
        lambda it: it.prefix_index.approximate.num_bytes,
    ),
    (
        f"{_PREFIX}_flagged_workers",
        "Workers whose index is flagged as unreliable",
        lambda it: len(it.prefix_index.health.flagged),
    ),
)

_WORKER_GAUGES: tuple[tuple[str, str, str], ...] = (
    (
        "worker_active_prefill_tokens",
        "Prompt tokens routed to a worker rank and not computed yet",
        "prefill_tokens",
    ),
    ("worker_active_decode_blocks", "Blocks of the requests in flight at a worker rank", "blocks"),
)


class KvCollector(Collector):
    """Metrics of all KV-aware routers of a process."""

    def __init__(self, routers: Callable[[], Iterable[Router]]) -> None:
        self._routers = routers

    def collect(self) -> Iterator[Metric]:
        deciding = map(deciding_router, self._routers())
        routers = [router for router in deciding if isinstance(router, EventFedRouter)]
        if not routers:
            return
        yield from _families(routers)
        yield from _of_workers(routers)


def _families(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    for name, help_text, histogram in _HISTOGRAMS:
        yield _histograms(name, help_text, _ENDPOINT, [(_endpoint(it), histogram(it)) for it in routers])
    for name, help_text, value in _COUNTERS:
        yield _filled(
            CounterMetricFamily(name, help_text, labels=_ENDPOINT),
            [(_endpoint(it), value(it)) for it in routers],
        )
    for name, help_text, value in _GAUGES:
        yield _filled(
            GaugeMetricFamily(name, help_text, labels=_ENDPOINT),
            [(_endpoint(it), value(it)) for it in routers],
        )
    yield _filled(
        CounterMetricFamily(
            f"{_PREFIX}_policy_decisions", "Requests routed, by policy", labels=(*_ENDPOINT, "policy")
        ),
        [((*_endpoint(it), it.stats.policy), it.stats.num_started) for it in routers],
    )
    yield from _of_overlap(routers)
    yield from _of_ingest(routers)
    yield from _of_shadows(routers)
    yield from _of_custom_policies(routers)


def _of_overlap(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    labels = (*_ENDPOINT, "worker_type")
    yield _filled(
        CounterMetricFamily(
            f"{_PREFIX}_non_max_overlap_selections",
            "Requests routed to a worker other than the one with the longest cached prefix",
            labels=labels,
        ),
        [((*_endpoint(it), _WORKER_TYPE), it.stats.num_non_max_overlap) for it in routers],
    )
    yield _histograms(
        f"{_PREFIX}_overlap_blocks_lost",
        "Cached blocks given up by not choosing the worker with the longest prefix",
        labels,
        [((*_endpoint(it), _WORKER_TYPE), it.stats.overlap_lost) for it in routers],
    )


def _of_ingest(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        f"{_PREFIX}_workers", "Workers by state of their KV events", labels=(*_ENDPOINT, "state")
    )
    ingest = CounterMetricFamily(
        f"{_PREFIX}_ingest",
        "KV events by what ingest did with them",
        labels=(*_ENDPOINT, "outcome"),
    )
    for it in routers:
        for state in FeedState:
            workers.add_metric((*_endpoint(it), state.value), it.ingest.num_in_state(state))
        stats = it.ingest.stats
        for name in stats.__slots__:
            ingest.add_metric((*_endpoint(it), name.removeprefix("num_")), getattr(stats, name))
    yield workers
    yield ingest


def _of_shadows(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    """Shadow policies."""
    shadows = [(it, it.selector.shadow) for it in routers]
    labels = (*_ENDPOINT, "policy")
    decisions = CounterMetricFamily(
        f"{_PREFIX}_shadow_decisions",
        "Shadow policy decisions: agrees, other worker, or failed",
        labels=(*labels, "verdict"),
    )
    gains = GaugeMetricFamily(
        f"{_PREFIX}_shadow_ttft_gain_seconds",
        "Sum of predicted TTFT gains by the shadow policy",
        labels=labels,
    )
    for it, shadow in shadows:
        if shadow is None:
            continue
        stats, names = shadow.stats, (*_endpoint(it), shadow.name)
        other = stats.num_decisions - stats.num_agreed - stats.num_failed
        for verdict, number in (("agrees", stats.num_agreed), ("other", other), ("failed", stats.num_failed)):
            decisions.add_metric((*names, verdict), number)
        gains.add_metric(names, stats.ttft_gain_s)
    yield decisions
    yield gains


def _of_custom_policies(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    """User-defined policies: failures and reloads."""
    labels = (*_ENDPOINT, "policy")
    failures = CounterMetricFamily(
        f"{_PREFIX}_policy_failures",
        "Requests for which a custom policy failed",
        labels=(*labels, "reason"),
    )
    reloads = CounterMetricFamily(
        f"{_PREFIX}_policy_reloads", "Reloads of a custom policy file", labels=(*labels, "result")
    )
    for it in routers:
        for policy in it.custom_policies:
            names = (*_endpoint(it), policy.name)
            for reason in FAILURE_REASONS:
                failures.add_metric((*names, reason), policy.failures[reason])
            reloads.add_metric((*names, "used"), policy.num_reloads)
            reloads.add_metric((*names, "broken"), policy.num_failed_reloads)
    yield failures
    yield reloads


def _of_workers(routers: Sequence[EventFedRouter]) -> Iterator[Metric]:
    loads = [(_endpoint(it), load) for it in routers for load in it.worker_loads()]
    for name, help_text, field in _WORKER_GAUGES:
        yield _filled(
            GaugeMetricFamily(f"{_PREFIX}_{name}", help_text, labels=(*_ENDPOINT, "worker_id", "dp_rank")),
            [((*at, load.instance, str(load.dp_rank)), getattr(load, field)) for at, load in loads],
        )


# ---


def _endpoint(router: EventFedRouter) -> Labels:
    address = router.endpoint
    return address.namespace, address.component, address.endpoint


def _filled(
    family: CounterMetricFamily | GaugeMetricFamily, values: Iterable[tuple[Labels, float]]
) -> CounterMetricFamily | GaugeMetricFamily:
    for labels, value in values:
        family.add_metric(labels, value)
    return family


def _histograms(
    name: str, help_text: str, labels: Labels, histograms: Iterable[tuple[Labels, Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, histogram in histograms:
        family.add_metric(values, buckets=histogram.buckets(), sum_value=histogram.total)
    return family
