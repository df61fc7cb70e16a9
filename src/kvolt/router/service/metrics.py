"""What the router process and those who ask it count, for Prometheus; read off at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.router.breaker_report import breaker_families
from kvolt.router.queue.metrics import queue_families
from kvolt.router.service.client import RouterLink
from kvolt.router.service.service import RouterService


class RouterCollector(Collector):
    """Of the router process."""

    def __init__(self, service: RouterService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        decisions = CounterMetricFamily(
            "kvolt_router_decisions", "Requests that were given a worker", labels=("endpoint",)
        )
        for endpoint, component in self._service.components.items():
            decisions.add_metric((endpoint,), component.num_decisions)
        yield decisions
        yield CounterMetricFamily(
            "kvolt_router_refusals", "Requests that no worker could take", value=self._service.num_refused
        )
        routers = [(name, component.router) for name, component in self._service.components.items()]
        yield from queue_families(routers)
        yield from breaker_families(routers)


class LinkCollector(Collector):
    """Of a process that asks a router."""

    def __init__(self, link: RouterLink) -> None:
        self._link = link

    def collect(self) -> Iterator[Metric]:
        stats = self._link.stats
        yield GaugeMetricFamily(
            "kvolt_router_present", "1 while a router can be asked", value=self._link.present
        )
        yield CounterMetricFamily(
            "kvolt_router_answers", "Requests that the router decided", value=stats.num_answered
        )
        fallbacks = CounterMetricFamily(
            "kvolt_router_fallbacks",
            "Times that the router's word could not be had or used",
            labels=("reason",),
        )
        for reason, number in sorted(stats.fallbacks.items()):
            fallbacks.add_metric((reason,), number)
        yield fallbacks
