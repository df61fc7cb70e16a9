"""Prometheus metrics of transfer paths: speed by host, and slow paths by reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.paths.path_watch import PathWatch


class PathMetrics(Collector):
    """Collector of one process; empty without KV transfers."""

    def __init__(
        self,
        paths: Callable[[], PathWatch | None],
        agent: Callable[[], TransferAgent | None] = lambda: None,
    ) -> None:
        self._paths = paths
        self._agent = agent

    def collect(self) -> Iterator[Metric]:
        paths = self._paths()
        if paths is None:
            return
        slow = CounterMetricFamily(
            "kvolt_transfer_slow_path",
            "Peers whose KV took a slower path, by path and reason",
            labels=("path", "missing"),
        )
        for (path, missing), count in sorted(paths.slow_paths().items()):
            slow.add_metric((path, missing), count)
        yield slow
        speed = GaugeMetricFamily(
            "kvolt_transfer_link_bytes_per_second",
            "Measured bandwidth of a transfer path",
            labels=("path", "peer"),
        )
        latency = GaugeMetricFamily(
            "kvolt_transfer_link_latency_seconds",
            "Fixed latency of a read over a transfer path",
            labels=("path", "peer"),
        )
        for name, link in paths.links().items():
            labels = (link.path, name.rpartition("@")[2])
            speed.add_metric(labels, link.bytes_per_s)
            latency.add_metric(labels, link.latency_s)
        yield speed
        yield latency
        agent = self._agent()
        if agent is not None:
            yield from _limits(agent)


def _limits(agent: TransferAgent) -> Iterator[Metric]:
    budget = agent.frame_budget
    for name, text, value in (
        ("unfinished_bytes", "Bytes buffered for incomplete messages of peers", budget.used_bytes),
        (
            "unfinished_limit_bytes",
            "Budget for incomplete messages; one address may use half of it",
            budget.limit_bytes,
        ),
    ):
        yield GaugeMetricFamily(f"kvolt_transfer_{name}", text, value)
    for name, text, value in (
        (
            "shed_connections",
            "Connections closed because the budget for incomplete messages was exceeded",
            budget.num_shed,
        ),
        ("refused_connections", "Connections refused because of a limit", agent.num_refused),
    ):
        yield CounterMetricFamily(f"kvolt_transfer_{name}", text, value)
