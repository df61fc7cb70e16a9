"""Prometheus metrics of the router process and its clients; read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.router.breaker_report import breaker_families
from kvolt.router.queue.metrics import queue_families
from kvolt.router.service.client import RouterLink
from kvolt.router.service.service import RouterService


class RouterCollector(Collector):
    """Metrics of the router process."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "kvolt_router_decisions", "Requests routed to a worker", labels=("endpoint",)
        )
        for endpoint, component in self._service.components.items():
            decisions.add_metric((endpoint,), component.num_decisions)
        yield decisions
        yield CounterMetricFamily(
            "kvolt_router_refusals", "Requests refused by the router process", value=self._service.num_refused
        )
        routers = [(name, component.router) for name, component in self._service.components.items()]
        yield from queue_families(routers)
        yield from breaker_families(routers)


class LinkCollector(Collector):
    """Metrics of a client of the router process."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        stats = self._link.stats
        yield GaugeMetricFamily(
            "kvolt_router_present", "1 while a router process is reachable", value=self._link.present
        )
        yield CounterMetricFamily(
            "kvolt_router_answers", "Requests routed by the router process", value=stats.num_answered
        )
        fallbacks = CounterMetricFamily(
            "kvolt_router_fallbacks",
            "Requests routed locally because the router process did not respond or its decision could not be used",
            labels=("reason",),
        )
        for reason, number in sorted(stats.fallbacks.items()):
            fallbacks.add_metric((reason,), number)
        yield fallbacks
