"""Prometheus metrics of the handoffs of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.worker.handoffs import HandoffStats


class HandoffMetrics(Collector):
    """Sum over all workers of the process; empty if none takes part in handoffs."""

    def __init__(self, stats: Callable[[], Sequence[HandoffStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        every = self._stats()
        if not every:
            return
        for name, text, value in (
            ("handoffs_sent", "Prompts computed for other workers", sum(each.num_sent for each in every)),
            (
                "handoffs_received",
                "Handoffs accepted from other workers",
                sum(each.num_received for each in every),
            ),
            ("handoff_bytes", "KV bytes pulled from other workers", sum(each.num_bytes for each in every)),
            ("handoff_pull_seconds", "Time of KV pulls", sum(each.pull_s for each in every)),
        ):
            family = CounterMetricFamily(f"kvolt_{name}", text)
            family.add_metric((), value)
            yield family
        by_path = sum((each.by_path for each in every), Counter[str]())
        failures = sum((each.failures for each in every), Counter[str]())
        for name, text, label, counts in (
            ("handoff_blocks", "KV blocks pulled from other workers", "path", by_path),
            (
                "handoff_failures",
                "Handoffs whose KV could not be pulled and was recomputed",
                "code",
                failures,
            ),
        ):
            family = CounterMetricFamily(f"kvolt_{name}", text, labels=(label,))
            for kind, count in sorted(counts.items()):
                family.add_metric((kind,), count)
            yield family
