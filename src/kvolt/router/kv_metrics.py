"""What routers that know their workers' KV count, for Prometheus; read off at each scrape.

Under Dynamo's names where it has the figure, so that its dashboards go on to work; under ours else. Every series has
the endpoint that is routed to as Dynamo's three labels; of single workers there are as many as are registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.router.event_fed_router import ExactRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.router.policy.custom import REASONS
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import who_decides
from kvolt.runtime.histogram import Histogram

Labels = tuple[str, ...]

_ENDPOINT = ("dynamo_namespace", "dynamo_component", "dynamo_endpoint")
_DYNAMO = "dynamo_component_router"
_OVERHEAD = "dynamo_router_overhead"
_OURS = "kvolt_router"
_WORKER_TYPE = "aggregated"

_Histogram = tuple[str, str, Callable[[ExactRouter], Histogram]]
_Value = tuple[str, str, Callable[[ExactRouter], float]]

_HISTOGRAMS: tuple[_Histogram, ...] = (
    (
        f"{_DYNAMO}_time_to_first_token_seconds",
        "From a decision to the first token",
        lambda it: it.stats.ttft_s,
    ),
    (f"{_DYNAMO}_input_sequence_tokens", "Prompt tokens of a request", lambda it: it.stats.input_tokens),
    (f"{_DYNAMO}_output_sequence_tokens", "Tokens of an answer", lambda it: it.stats.output_tokens),
    (
        f"{_DYNAMO}_kv_hit_rate",
        "Share of a prompt's blocks that its worker was said to hold",
        lambda it: it.stats.hit_rate,
    ),
    (f"{_OVERHEAD}_indexer_find_matches_ms", "Finding who holds a prompt", lambda it: it.stats.find_ms),
    (f"{_OVERHEAD}_scheduling_ms", "Weighing the workers", lambda it: it.stats.weigh_ms),
    (f"{_OVERHEAD}_total_ms", "A decision", lambda it: it.stats.total_ms),
    (
        f"{_OURS}_predicted_time_to_first_token_seconds",
        "What was expected from a decision to the first token",
        lambda it: it.stats.predicted_ttft_s,
    ),
    (
        f"{_OURS}_time_to_first_token_ratio",
        "Real over expected time to the first token",
        lambda it: it.stats.ttft_ratio,
    ),
    (
        f"{_OURS}_reported_hit_rate",
        "Share of a prompt that its worker had, by its own word",
        lambda it: it.stats.real_hit_rate,
    ),
)

_COUNTERS: tuple[_Value, ...] = (
    (f"{_DYNAMO}_requests_started", "Requests that were given a worker", lambda it: it.stats.num_started),
    (f"{_DYNAMO}_requests", "Requests that are over", lambda it: it.stats.num_ended),
    (
        f"{_OURS}_saturated_decisions",
        "Requests sent though every worker had enough to do",
        lambda it: it.stats.num_saturated,
    ),
    (
        f"{_OURS}_cached_token_reports",
        "Answers whose worker told how much of the prompt it had, where there was anything to tell",
        lambda it: it.holders.trust.num_reports,
    ),
    (
        f"{_OURS}_wrong_promises",
        "Of those, where the index was wrong about more than half",
        lambda it: it.holders.trust.num_wrong,
    ),
    (
        f"{_OURS}_flaggings",
        "Times that a worker was no longer believed to hold what its events say",
        lambda it: it.holders.trust.num_flaggings,
    ),
)

_GAUGES: tuple[_Value, ...] = (
    (
        f"{_DYNAMO}_kv_event_source_mismatch_workers",
        "Workers whose KV events are not used",
        lambda it: it.ingest.num_in(FeedState.NO_EVENTS),
    ),
    (f"{_OURS}_bookings", "Requests under way", lambda it: it.num_under_way),
    (
        f"{_OURS}_replicas",
        "Other routers of the same workers that are heard",
        lambda it: it.gossip.others.num_replicas,
    ),
    (f"{_OURS}_index_bytes", "Memory of the index of held blocks", lambda it: it.index.num_bytes),
    (f"{_OURS}_index_blocks", "Different blocks in the index", lambda it: it.index.num_blocks),
    (f"{_OURS}_index_pairs", "Blocks at workers in the index", lambda it: it.index.num_pairs),
    (f"{_OURS}_pools", "Shared pools of KV whose events are used", lambda it: it.ingest.num_pools),
    (f"{_OURS}_events_behind", "KV events heard of and not indexed yet", lambda it: it.ingest.num_behind),
    (
        f"{_OURS}_approximate_workers",
        "Places known by this router's own decisions alone",
        lambda it: it.holders.approximate.num_places,
    ),
    (
        f"{_OURS}_approximate_entries",
        "Blocks that those are taken to hold",
        lambda it: it.holders.approximate.num_entries,
    ),
    (f"{_OURS}_approximate_bytes", "Memory for them", lambda it: it.holders.approximate.num_bytes),
    (
        f"{_OURS}_flagged_workers",
        "Workers whose events and reports disagree",
        lambda it: len(it.holders.trust.flagged),
    ),
)

_PLACES: tuple[tuple[str, str, str], ...] = (
    ("worker_active_prefill_tokens", "Prompt tokens sent there and not computed", "prefill_tokens"),
    ("worker_active_decode_blocks", "Blocks of the requests under way there", "blocks"),
)


class KvCollector(Collector):
    """Of all routers of a process; those that know nothing of KV are passed over."""

    def __init__(self, routers: Callable[[], Iterable[Router]], prefix: str = "dynamo_frontend") -> None:
        self._routers = routers
        self._prefix = prefix

    def collect(self) -> Iterator[Metric]:
        deciding = map(who_decides, self._routers())
        routers = [router for router in deciding if isinstance(router, ExactRouter)]
        if not routers:
            return
        yield from _families(routers)
        yield from _of_places(routers, self._prefix)


def _families(routers: Sequence[ExactRouter]) -> Iterator[Metric]:
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
        CounterMetricFamily(f"{_OURS}_policy_decisions", "Requests by policy", labels=(*_ENDPOINT, "policy")),
        [((*_endpoint(it), it.stats.policy), it.stats.num_started) for it in routers],
    )
    yield from _of_overlap(routers)
    yield from _of_ingest(routers)
    yield from _of_shadows(routers)
    yield from _of_custom_policies(routers)


def _of_overlap(routers: Sequence[ExactRouter]) -> Iterator[Metric]:
    labels = (*_ENDPOINT, "worker_type")
    yield _filled(
        CounterMetricFamily(
            f"{_DYNAMO}_non_max_overlap_selections",
            "Requests sent to somebody though another held more of the prompt",
            labels=labels,
        ),
        [((*_endpoint(it), _WORKER_TYPE), it.stats.num_less_overlap) for it in routers],
    )
    yield _histograms(
        f"{_DYNAMO}_overlap_blocks_lost",
        "Blocks of the prompt that another held beyond who got the request",
        labels,
        [((*_endpoint(it), _WORKER_TYPE), it.stats.overlap_lost) for it in routers],
    )


def _of_ingest(routers: Sequence[ExactRouter]) -> Iterator[Metric]:
    workers = GaugeMetricFamily(
        f"{_OURS}_workers", "Workers by what the index says of them", labels=(*_ENDPOINT, "state")
    )
    ingest = CounterMetricFamily(
        f"{_OURS}_ingest",
        "What happened to KV events on their way into the index",
        labels=(*_ENDPOINT, "what"),
    )
    for it in routers:
        for state in FeedState:
            workers.add_metric((*_endpoint(it), state.value), it.ingest.num_in(state))
        stats = it.ingest.stats
        for name in stats.__slots__:
            ingest.add_metric((*_endpoint(it), name.removeprefix("num_")), getattr(stats, name))
    yield workers
    yield ingest


def _of_shadows(routers: Sequence[ExactRouter]) -> Iterator[Metric]:
    """Of second policies, which are asked and decide nothing."""
    asked = [(it, it.selector.shadow) for it in routers]
    labels = (*_ENDPOINT, "policy")
    verdicts = CounterMetricFamily(
        f"{_OURS}_shadow_decisions",
        "What the shadow policy said of decisions",
        labels=(*labels, "verdict"),
    )
    sooner = GaugeMetricFamily(
        f"{_OURS}_shadow_sooner_seconds",
        "By how much earlier all first tokens together are expected with the shadow policy",
        labels=labels,
    )
    for it, shadow in asked:
        if shadow is None:
            continue
        stats, names = shadow.stats, (*_endpoint(it), shadow.name)
        other = stats.num_decisions - stats.num_agreed - stats.num_silent
        for verdict, number in (("agrees", stats.num_agreed), ("other", other), ("silent", stats.num_silent)):
            verdicts.add_metric((*names, verdict), number)
        sooner.add_metric(names, stats.sooner_s)
    yield verdicts
    yield sooner


def _of_custom_policies(routers: Sequence[ExactRouter]) -> Iterator[Metric]:
    """Of functions of somebody else's: what they failed on, and what became of edits of their files."""
    labels = (*_ENDPOINT, "policy")
    failures = CounterMetricFamily(
        f"{_OURS}_policy_failures",
        "Requests that one's own policy failed on",
        labels=(*labels, "reason"),
    )
    edits = CounterMetricFamily(
        f"{_OURS}_policy_edits", "Times that its file had changed", labels=(*labels, "result")
    )
    for it in routers:
        for policy in it.custom_policies:
            names = (*_endpoint(it), policy.name)
            for reason in REASONS:
                failures.add_metric((*names, reason), policy.failures[reason])
            edits.add_metric((*names, "used"), policy.num_reloads)
            edits.add_metric((*names, "broken"), policy.num_broken_edits)
    yield failures
    yield edits


def _of_places(routers: Sequence[ExactRouter], prefix: str) -> Iterator[Metric]:
    loads = [(_endpoint(it), load) for it in routers for load in it.loads()]
    for name, help_text, field in _PLACES:
        yield _filled(
            GaugeMetricFamily(f"{prefix}_{name}", help_text, labels=(*_ENDPOINT, "worker_id", "dp_rank")),
            [((*at, load.instance, str(load.dp_rank)), getattr(load, field)) for at, load in loads],
        )


# ---


def _endpoint(router: ExactRouter) -> Labels:
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
