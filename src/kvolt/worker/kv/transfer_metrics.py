"""Prometheus metrics of the KV transfers of a process: handoffs, transfer paths and limits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.transfer.agent import TransferAgent
from kvolt.transfer.paths.path_watch import PathWatch
from kvolt.worker.kv.handoffs import HandoffStats


class HandoffMetrics(Collector):
    """Sum over all workers of the process; empty if none takes part in handoffs."""

    def __init__(self, stats: Callable[[], Sequence[HandoffStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if not stats:
            return
        for name, text, value in (
            ("sent", "Prompts computed for other workers", sum(each.num_sent for each in stats)),
            ("received", "Handoffs accepted from other workers", sum(each.num_received for each in stats)),
        ):
            yield CounterMetricFamily(f"kvolt_handoffs_{name}", text, value)
        num_bytes, pull_s = sum(each.num_bytes for each in stats), sum(each.pull_s for each in stats)
        yield CounterMetricFamily("kvolt_handoff_bytes", "KV bytes pulled from other workers", num_bytes)
        yield CounterMetricFamily("kvolt_handoff_pull_seconds", "Time of KV pulls", pull_s)
        by_path = sum((each.by_path for each in stats), Counter[str]())
        failures = sum((each.failures for each in stats), Counter[str]())
        failed = "Handoffs whose KV could not be pulled and was recomputed"
        for name, text, label, counts in (
            ("handoff_blocks", "KV blocks pulled from other workers", "path", by_path),
            ("handoff_failures", failed, "code", failures),
        ):
            family = CounterMetricFamily(f"kvolt_{name}", text, labels=(label,))
            for kind, count in sorted(counts.items()):
                family.add_metric((kind,), count)
            yield family


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
        for labels, count in sorted(paths.slow_paths().items()):
            slow.add_metric(labels, count)
        yield slow
        prefix, labels = "kvolt_transfer_link", ("path", "peer")
        speed = GaugeMetricFamily(
            f"{prefix}_bytes_per_second", "Measured bandwidth of a transfer path", labels=labels
        )
        latency = GaugeMetricFamily(
            f"{prefix}_latency_seconds", "Fixed latency of a read over a transfer path", labels=labels
        )
        for name, link in paths.links().items():
            labels = (link.path, name.rpartition("@")[2])
            speed.add_metric(labels, link.bytes_per_s)
            latency.add_metric(labels, link.latency_s)
        yield from (speed, latency)
        agent = self._agent()
        if agent is not None:
            yield from _limits(agent)


def _limits(agent: TransferAgent) -> Iterator[Metric]:
    budget = agent.frame_budget
    limit = "Budget for incomplete messages; one address may use half of it"
    shed = "Connections closed because the budget for incomplete messages was exceeded"
    for kind, name, text, value in (
        (
            GaugeMetricFamily,
            "unfinished_bytes",
            "Bytes buffered for incomplete messages of peers",
            budget.used_bytes,
        ),
        (GaugeMetricFamily, "unfinished_limit_bytes", limit, budget.limit_bytes),
        (CounterMetricFamily, "shed_connections", shed, budget.num_shed),
        (
            CounterMetricFamily,
            "refused_connections",
            "Connections refused because of a limit",
            agent.num_refused,
        ),
        (
            CounterMetricFamily,
            "refused_reads",
            "Tickets that a peer presented and that were made for another process",
            agent.num_refused_reads,
        ),
    ):
        yield kind(f"kvolt_transfer_{name}", text, value)
    if not agent.handshakes:
        return  # without TLS
    shaken = CounterMetricFamily(
        "kvolt_transfer_tls_handshakes",
        "TLS handshakes of accepted transfer connections, by outcome",
        labels=("outcome",),
    )
    for outcome, count in sorted(agent.handshakes.items()):
        shaken.add_metric((outcome,), count)
    yield shaken
