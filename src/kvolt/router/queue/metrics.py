"""Prometheus metrics of router queues; read at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.router.port import Router
from kvolt.router.queue.queue_router import QueueRouter

_LABELS = ("endpoint",)


def queue_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Metric families of queueing routers, by endpoint; nothing if no router has a queue."""
    queues = [(endpoint, router) for endpoint, router in routers if isinstance(router, QueueRouter)]
    if not queues:
        return
    pending = GaugeMetricFamily(
        "kvolt_router_queue_requests", "Requests waiting in the router queue", labels=_LABELS
    )
    tokens = GaugeMetricFamily(
        "kvolt_router_queue_tokens", "Tokens of the requests waiting in the router queue", labels=_LABELS
    )
    unstarted = GaugeMetricFamily(
        "kvolt_router_unstarted_requests", "Requests sent to a worker that it has not started", labels=_LABELS
    )
    at_once = CounterMetricFamily(
        "kvolt_router_queue_passed", "Requests routed without waiting", labels=_LABELS
    )
    waits = HistogramMetricFamily(
        "kvolt_router_queue_wait_seconds",
        "Time in the router queue of requests that waited",
        labels=_LABELS,
    )
    refused = CounterMetricFamily(
        "kvolt_router_queue_refused",
        "Requests refused by the router queue, by reason",
        labels=(*_LABELS, "reason"),
    )
    moves = CounterMetricFamily(
        "kvolt_router_withdrawals",
        "Requests withdrawn from a worker and sent to another one",
        labels=_LABELS,
    )
    for endpoint, router in queues:
        stats = router.stats
        pending.add_metric((endpoint,), router.num_waiting)
        tokens.add_metric((endpoint,), router.num_waiting_tokens)
        unstarted.add_metric((endpoint,), router.num_unstarted)
        at_once.add_metric((endpoint,), stats.num_immediate)
        waits.add_metric((endpoint,), stats.waits_s.buckets(), stats.waits_s.total)
        for reason, number in sorted(stats.refused.items()):
            refused.add_metric((endpoint, reason), number)
        moves.add_metric((endpoint,), stats.num_withdrawals)
    yield from (pending, tokens, unstarted, at_once, waits, refused, moves)
