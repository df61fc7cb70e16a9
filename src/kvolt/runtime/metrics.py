"""Prometheus metrics of a process.

Owns names, labels and buckets; the registry is a parameter, never the global one, so that two runtimes in one
process (a test, the twin) do not share counters. Independent of the code that counts.

Label values are resolved once: `metrics.bytes_out.inc(n)` and `metrics.frames_out["data"].inc()` cost one
method call. Label values come from code or config, never from a client, so families stay small.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from kvolt.runtime.clock import Clock
from kvolt.runtime.config.settings import AliasScheme
from kvolt.runtime.metric_aliases import WithAliases

Child = TypeVar("Child", bound=Counter | Gauge | Histogram)

_LAG_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_HTTP_BUCKETS_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    30,
    60,
    120,
)


class ByLabel(dict[str, Child]):
    """A family's children by the value of its last label, each resolved on first use."""

    def __init__(self, resolve: Callable[[str], Child]) -> None:
        super().__init__()
        self._resolve = resolve

    def __missing__(self, value: str) -> Child:
        child = self[value] = self._resolve(value)
        return child


class Metrics:
    """The runtime's metrics but for the request plane's, which `plane_metrics` reads off at each scrape."""

    def __init__(self, registry: CollectorRegistry, aliases: AliasScheme = "none") -> None:
        self.registry = registry
        self.aliases = aliases
        ProcessCollector(registry=registry)
        self._discovery()
        self._event_plane()
        self._http()
        self._handshakes = self._by_label(
            "tls_handshakes", "TLS handshakes of accepted connections, by outcome", "outcome"
        )
        self.loop_lag = Histogram(
            "kvolt_event_loop_lag_seconds",
            "Delay of event loop timers",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )

    def count_tasks(self, loop: asyncio.AbstractEventLoop) -> None:
        """Export the number of the loop's tasks; a number that only grows shows a leak."""
        tasks = self._gauge("tasks", "Pending tasks of the event loop")
        tasks.set_function(lambda: len(asyncio.all_tasks(loop)))

    def _discovery(self) -> None:
        state = self._gauge(
            "discovery_connected",
            "1 while discovery is reachable, 0 while the last known state is used",
            "backend",
        )
        self.discovery_connected: ByLabel[Gauge] = ByLabel(state.labels)
        self.discovery_losses = self._counter("discovery_losses", "Times that discovery became unreachable")

    def _event_plane(self) -> None:
        self.events_published = self._by_label("events_published", "Events published", "topic")
        self.events_received = self._by_label("events_received", "Events received", "topic")
        self.events_dropped = self._by_label("events_dropped", "Events that could not be sent", "topic")
        self.events_rejected = self._by_label(
            "events_rejected", "Event messages and publishers rejected, by reason", "reason"
        )
        self.events_missed = self._by_label(
            "events_missed", "Events lost between publisher and subscriber", "topic"
        )

    def _http(self) -> None:
        self._http_requests = self._counter("http_requests", "HTTP responses", "server", "method", "status")
        self._http_duration = Histogram(
            "kvolt_http_request_duration_seconds",
            "Time from a complete HTTP request to the end of its response",
            ("server",),
            buckets=_HTTP_BUCKETS_S,
            registry=self.registry,
        )

    def http_observer(self, server: str) -> Callable[[str, int, float], None]:
        """Observer that `HttpServer` calls with (method, status, seconds). The parser bounds the set of methods."""
        requests = self._http_requests
        children: dict[tuple[str, int], Counter] = {}
        duration = self._http_duration.labels(server)

        def observe(method: str, status: int, seconds: float) -> None:
            child = children.get((method, status))
            if child is None:
                child = children[method, status] = requests.labels(server, method, str(status))
            child.inc()
            duration.observe(seconds)

        return observe

    def count_handshake(self, outcome: str) -> None:
        self._handshakes[outcome].inc()

    def render(self) -> tuple[bytes, str]:
        """The text that Prometheus scrapes, and its content type."""
        return generate_latest(WithAliases(self.registry.collect(), self.aliases)), CONTENT_TYPE_LATEST

    def _by_label(self, name: str, help_text: str, label: str) -> ByLabel[Counter]:
        return ByLabel(self._counter(name, help_text, label).labels)

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"kvolt_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"kvolt_{name}", help_text, labels, registry=self.registry)


class LoopLag:
    """Samples how late the event loop is: what every other latency of the process is made of."""

    def __init__(self, clock: Clock, lag: Histogram, interval_s: float = 0.1) -> None:
        self._clock = clock
        self._lag = lag
        self._interval_s = interval_s

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            due = self._clock.monotonic() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self._lag.observe(max(0.0, self._clock.monotonic() - due))
