"""What waits in routers and what became of it, for Prometheus; read off at each scrape."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvolt.router.port import Router
from kvolt.router.queue.queue_router import QueueRouter

_LABELS = ("endpoint",)


def queue_families(routers: Iterable[tuple[str, Router]]) -> Iterator[Metric]:
    """Of the routers that let requests wait, each with the endpoint that it decides for; nothing where none does."""
    queues = [(endpoint, router) for endpoint, router in routers if isinstance(router, QueueRouter)]
    if not queues:
        return
    pending = GaugeMetricFamily(
        "dynamo_frontend_router_queue_pending_requests", "Requests that wait for a worker", labels=_LABELS
    )
    tokens = GaugeMetricFamily(
        "kvolt_router_queue_tokens", "Tokens of the requests that wait for a worker", labels=_LABELS
    )
    unstarted = GaugeMetricFamily(
        "kvolt_router_unstarted_requests", "Requests that a worker has and has not begun", labels=_LABELS
    )
    at_once = CounterMetricFamily(
        "kvolt_router_queue_passed", "Requests that did not have to wait", labels=_LABELS
    )
    waits = HistogramMetricFamily(
        "kvolt_router_queue_wait_seconds",
        "Time from a request to its worker, of those that waited",
        labels=_LABELS,
    )
    refused = CounterMetricFamily(
        "kvolt_router_queue_refused", "Requests that got no worker, by reason", labels=(*_LABELS, "reason")
    )
    moves = CounterMetricFamily(
        "kvolt_router_take_backs",
        "Requests that were asked back to be sent to another worker",
        labels=_LABELS,
    )
    for endpoint, router in queues:
        stats = router.stats
        pending.add_metric((endpoint,), router.num_waiting)
        tokens.add_metric((endpoint,), router.num_waiting_tokens)
        unstarted.add_metric((endpoint,), router.num_unstarted)
        at_once.add_metric((endpoint,), stats.num_at_once)
        waits.add_metric((endpoint,), stats.waits_s.buckets(), stats.waits_s.total)
        for reason, number in sorted(stats.refused.items()):
            refused.add_metric((endpoint, reason), number)
        moves.add_metric((endpoint,), stats.num_moves)
    yield from (pending, tokens, unstarted, at_once, waits, refused, moves)
