"""Prometheus metrics of routers, their queues and circuit breakers; read at each scrape.

Series of KV-aware routers have the endpoint as three labels, all others as one. Per-worker series are bounded by the
registered workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.breaker import Breakers, BreakerState
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy.custom import FAILURE_REASONS
from kvolt.router.port import Router
from kvolt.router.queue.queue_router import QueueRouter, deciding_router
from kvolt.router.stats import RouterStats
from kvolt.runtime.histogram import Histogram
from kvolt.runtime.metric_families import Labels, counter, gauge, histogram

_PREFIX = "kvolt_router_"

_SEVERITY = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}

# --- queues

_QUEUE: tuple[tuple[Callable[..., Metric], str, str, Callable[[QueueRouter], float]], ...] = (
    (gauge, "queue_requests", "Requests waiting in the router queue", lambda it: it.num_waiting),
    (
        gauge,
        "queue_tokens",
        "Tokens of the requests waiting in the router queue",
        lambda it: it.num_waiting_tokens,
    ),
    (
        gauge,
        "unstarted_requests",
        "Requests routed to a worker that it has not started",
        lambda it: it.num_unstarted,
    ),
    (counter, "queue_passed", "Requests routed without waiting", lambda it: it.stats.num_immediate),
    (
        counter,
        "withdrawals",
        "Requests withdrawn from a worker and sent to another one",
        lambda it: it.stats.num_withdrawals,
    ),
)


def queue_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Metric families of queueing routers, by endpoint; nothing if no router has a queue."""
    queues = [((endpoint,), router) for endpoint, router in routers if isinstance(router, QueueRouter)]
    if not queues:
        return
    labels = ("endpoint",)
    for family, name, help_text, value in _QUEUE:
        yield family(_PREFIX + name, help_text, labels, ((at, value(it)) for at, it in queues))
    yield histogram(
        "kvolt_router_queue_wait_seconds",
        "Time in the router queue of requests that waited",
        labels,
        ((at, it.stats.waits_s) for at, it in queues),
    )
    yield histogram(
        "kvolt_router_prompt_hold_seconds",
        "Time for which prompts were held until their worker had computed those before them",
        labels,
        ((at, it.holds_s) for at, it in queues),
    )
    yield counter(
        "kvolt_router_queue_refused",
        "Requests refused by the router queue, by reason",
        (*labels, "reason"),
        (((*at, why), number) for at, it in queues for why, number in sorted(it.stats.refused.items())),
    )


# --- circuit breakers


def _breakers(router: Router) -> Breakers | None:
    deciding = deciding_router(router)
    return deciding.candidate_filter.breakers if isinstance(deciding, KvRouter | RoundRobinRouter) else None


def breaker_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Metric families of routers by endpoint. A worker has series while it has recent failures."""
    breakers = [
        (endpoint, breaker) for endpoint, router in routers if (breaker := _breakers(router)) is not None
    ]
    views = [
        ((endpoint, worker), view)
        for endpoint, each in breakers
        for worker, view in sorted(each.views().items())
    ]
    yield gauge(
        "kvolt_router_breaker_state",
        "Circuit breaker of a worker: 0 closed, 1 half-open, 2 open",
        ("endpoint", "worker_id"),
        ((at, _SEVERITY[view.state]) for at, view in views),
    )
    yield gauge(
        "kvolt_router_worker_failure_rate",
        "Fraction of a worker's recent requests that failed",
        ("endpoint", "worker_id"),
        ((at, view.failure_rate) for at, view in views),
    )
    yield counter(
        "kvolt_router_breaker_opened",
        "Times that the breaker of a worker opened",
        ("endpoint",),
        (((endpoint,), each.num_opened) for endpoint, each in breakers),
    )


def describe_breakers(routers: Iterable[Router]) -> list[dict[str, Any]]:
    """All breakers that are not closed, for `kvolt status`."""
    return [
        {
            "worker": instance_id,
            "state": view.state.value,
            "failure_rate": round(view.failure_rate, 3),
            "retry_in_s": round(view.retry_in_s, 3),
        }
        for router in routers
        if (breakers := _breakers(router)) is not None
        for instance_id, view in sorted(breakers.views().items())
        if view.state is not BreakerState.CLOSED
    ]


def describe_queues(routers: Iterable[Router]) -> dict[str, int]:
    """Requests and tokens that wait in the queues of these routers, for `kvolt status`."""
    queues = [router for router in routers if isinstance(router, QueueRouter)]
    return {
        "requests": sum(queue.num_waiting for queue in queues),
        "tokens": sum(queue.num_waiting_tokens for queue in queues),
    }


# --- KV-aware routers

_ENDPOINT = ("namespace", "component", "endpoint")
_WORKER_TYPE = "aggregated"

_Value = tuple[str, str, Callable[[EventFedRouter], float]]

_HISTOGRAMS: tuple[tuple[str, str, Callable[[RouterStats], Histogram]], ...] = (
    ("time_to_first_token_seconds", "Time from a routing decision to the first token", lambda it: it.ttft_s),
    ("input_sequence_tokens", "Prompt tokens per request", lambda it: it.input_tokens),
    ("output_sequence_tokens", "Output tokens per request", lambda it: it.output_tokens),
    (
        "kv_hit_rate",
        "Fraction of a prompt's blocks that the index predicted at the chosen worker",
        lambda it: it.hit_rate,
    ),
    (
        "overhead_indexer_find_matches_ms",
        "Time to look up a prompt in the prefix index",
        lambda it: it.lookup_ms,
    ),
    ("overhead_scheduling_ms", "Time to compute the cost of all workers", lambda it: it.scheduling_ms),
    ("overhead_total_ms", "Time of a routing decision", lambda it: it.total_ms),
    (
        "predicted_time_to_first_token_seconds",
        "Predicted time from a routing decision to the first token",
        lambda it: it.predicted_ttft_s,
    ),
    (
        "time_to_first_token_ratio",
        "Measured over predicted time to the first token",
        lambda it: it.ttft_ratio,
    ),
    (
        "reported_hit_rate",
        "Fraction of a prompt that the worker reported as cached",
        lambda it: it.reported_hit_rate,
    ),
)

_COUNTERS: tuple[_Value, ...] = (
    ("requests_started", "Requests routed to a worker", lambda it: it.stats.num_started),
    ("requests", "Requests that have ended", lambda it: it.stats.num_ended),
    (
        "saturated_decisions",
        "Requests routed while every worker was saturated",
        lambda it: it.stats.num_saturated,
    ),
    (
        "cached_token_reports",
        "Requests for which the index predicted cached tokens and the worker reported the real number",
        lambda it: it.prefix_index.health.num_reports,
    ),
    (
        "overlap_mispredictions",
        "Cached token reports that differ from the prediction by more than half",
        lambda it: it.prefix_index.health.num_wrong,
    ),
    (
        "worker_flagged",
        "Times that the index of a worker was flagged as unreliable",
        lambda it: it.prefix_index.health.num_flaggings,
    ),
    (
        "forged_events",
        "Events about a worker that another process published",
        lambda it: it.ingest.forged.num_events,
    ),
)

_GAUGES: tuple[_Value, ...] = (
    (
        "kv_event_source_mismatch_workers",
        "Workers without usable KV events",
        lambda it: it.ingest.num_in_state(FeedState.NO_EVENTS),
    ),
    ("reservations", "Requests in flight", lambda it: it.num_in_flight),
    ("replicas", "Other router replicas of the same workers", lambda it: it.gossip.replicas.num_replicas),
    ("index_bytes", "Memory of the prefix index", lambda it: it.block_index.num_bytes),
    ("index_blocks", "Distinct blocks in the prefix index", lambda it: it.block_index.num_blocks),
    ("index_pairs", "Pairs of block and worker in the prefix index", lambda it: it.block_index.num_pairs),
    ("pools", "Shared KV pools whose events are indexed", lambda it: it.ingest.num_pools),
    ("events_behind", "KV events received and not indexed yet", lambda it: it.ingest.num_unapplied),
    (
        "approximate_workers",
        "Worker ranks indexed by this router's decisions only",
        lambda it: it.prefix_index.approximate.num_worker_ranks,
    ),
    (
        "approximate_entries",
        "Blocks in the approximate index",
        lambda it: it.prefix_index.approximate.num_entries,
    ),
    (
        "approximate_bytes",
        "Memory of the approximate index",
        lambda it: it.prefix_index.approximate.num_bytes,
    ),
    (
        "flagged_workers",
        "Workers whose index is flagged as unreliable",
        lambda it: len(it.prefix_index.health.flagged),
    ),
)

_WORKER_GAUGES = (
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
        routers = [(_endpoint(it), it) for it in deciding if isinstance(it, EventFedRouter)]
        if routers:
            yield from _of_routers(routers)
            yield from _of_ingest(routers)
            yield from _of_policies(routers)
            yield from _of_workers(routers)


_Routers = Sequence[tuple[Labels, EventFedRouter]]


def _endpoint(router: EventFedRouter) -> Labels:
    address = router.endpoint
    return address.namespace, address.component, address.endpoint


def _of_routers(routers: _Routers) -> Iterator[Metric]:
    for name, help_text, pick in _HISTOGRAMS:
        yield histogram(_PREFIX + name, help_text, _ENDPOINT, ((at, pick(it.stats)) for at, it in routers))
    for name, help_text, count in _COUNTERS:
        yield counter(_PREFIX + name, help_text, _ENDPOINT, ((at, count(it)) for at, it in routers))
    for name, help_text, value in _GAUGES:
        yield gauge(_PREFIX + name, help_text, _ENDPOINT, ((at, value(it)) for at, it in routers))
    yield counter(
        f"{_PREFIX}policy_decisions",
        "Requests routed, by policy",
        (*_ENDPOINT, "policy"),
        (((*at, it.stats.policy), it.stats.num_started) for at, it in routers),
    )
    labels = (*_ENDPOINT, "worker_type")
    yield counter(
        f"{_PREFIX}non_max_overlap_selections",
        "Requests routed to a worker other than the one with the longest cached prefix",
        labels,
        (((*at, _WORKER_TYPE), it.stats.num_non_max_overlap) for at, it in routers),
    )
    yield histogram(
        f"{_PREFIX}overlap_blocks_lost",
        "Cached blocks given up by not choosing the worker with the longest prefix",
        labels,
        (((*at, _WORKER_TYPE), it.stats.overlap_lost) for at, it in routers),
    )


def _of_ingest(routers: _Routers) -> Iterator[Metric]:
    yield gauge(
        f"{_PREFIX}workers",
        "Workers by state of their KV events",
        (*_ENDPOINT, "state"),
        (((*at, state.value), it.ingest.num_in_state(state)) for at, it in routers for state in FeedState),
    )
    yield counter(
        f"{_PREFIX}ingest",
        "KV events by what ingest did with them",
        (*_ENDPOINT, "outcome"),
        (
            ((*at, name.removeprefix("num_")), getattr(it.ingest.stats, name))
            for at, it in routers
            for name in it.ingest.stats.__slots__
        ),
    )


def _of_policies(routers: _Routers) -> Iterator[Metric]:
    """Shadow policies; failures and reloads of user-defined ones."""
    labels = (*_ENDPOINT, "policy")
    shadows = [((*at, shadow.name), shadow.stats) for at, it in routers if (shadow := it.selector.shadow)]
    yield counter(
        f"{_PREFIX}shadow_decisions",
        "Shadow policy decisions: agrees, other worker, or failed",
        (*labels, "verdict"),
        (
            ((*at, verdict), number)
            for at, stats in shadows
            for verdict, number in (
                ("agrees", stats.num_agreed),
                ("other", stats.num_decisions - stats.num_agreed - stats.num_failed),
                ("failed", stats.num_failed),
            )
        ),
    )
    yield gauge(
        f"{_PREFIX}shadow_ttft_gain_seconds",
        "Sum of predicted TTFT gains by the shadow policy",
        labels,
        ((at, stats.ttft_gain_s) for at, stats in shadows),
    )
    policies = [((*at, policy.name), policy) for at, it in routers for policy in it.custom_policies]
    yield counter(
        f"{_PREFIX}policy_failures",
        "Requests for which a custom policy failed",
        (*labels, "reason"),
        (((*at, why), policy.failures[why]) for at, policy in policies for why in FAILURE_REASONS),
    )
    yield counter(
        f"{_PREFIX}policy_reloads",
        "Reloads of a custom policy file",
        (*labels, "result"),
        (
            ((*at, result), number)
            for at, policy in policies
            for result, number in (("used", policy.num_reloads), ("broken", policy.num_failed_reloads))
        ),
    )


def _of_workers(routers: _Routers) -> Iterator[Metric]:
    loads = [
        ((*at, load.instance, str(load.dp_rank)), load) for at, it in routers for load in it.worker_loads()
    ]
    for name, help_text, field in _WORKER_GAUGES:
        labels = (*_ENDPOINT, "worker_id", "dp_rank")
        yield gauge(_PREFIX + name, help_text, labels, ((at, getattr(load, field)) for at, load in loads))
