"""Prometheus metrics of the router process and its clients; read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.router.metrics import breaker_families, queue_families
from kvolt.router.service.link import RouterLink
from kvolt.router.service.service import RouterService
from kvolt.runtime.metric_families import counter


class RouterCollector(Collector):
    """Metrics of the router process."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        components = self._service.components
        yield counter(
            "kvolt_router_decisions",
            "Requests routed to a worker",
            ("endpoint",),
            (((endpoint,), component.num_decisions) for endpoint, component in components.items()),
        )
        yield CounterMetricFamily(
            "kvolt_router_refusals", "Requests refused by the router process", value=self._service.num_refused
        )
        routers = [(name, component.router) for name, component in components.items()]
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
        yield counter(
            "kvolt_router_fallbacks",
            "Requests routed locally because the router process did not respond or its decision could not be used",
            ("reason",),
            (((reason,), number) for reason, number in sorted(stats.fallbacks.items())),
        )
