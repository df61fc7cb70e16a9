"""Prometheus metrics of the handoffs of a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from kvolt.worker.handoffs import HandoffStats


class HandoffMetrics(Collector):
    """Of all of them together; nothing where none takes part."""

    def __init__(self, stats: Callable[[], Sequence[HandoffStats]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        every = self._stats()
        if not every:
            return
        for name, text, value in (
            ("handoffs_given", "Prompts computed for other workers", sum(each.num_given for each in every)),
            ("handoffs_taken", "Prompts that others had computed", sum(each.num_taken for each in every)),
            ("handoff_bytes", "KV bytes that came from others", sum(each.num_bytes for each in every)),
            ("handoff_pull_seconds", "Time that KV was on its way here", sum(each.pull_s for each in every)),
        ):
            family = CounterMetricFamily(f"kvolt_{name}", text)
            family.add_metric((), value)
            yield family
        by_path = sum((each.by_path for each in every), Counter[str]())
        failures = sum((each.failures for each in every), Counter[str]())
        for name, text, label, counts in (
            ("handoff_blocks", "KV blocks that came from others", "path", by_path),
            ("handoff_failures", "KV of handoffs that did not come and was computed again", "code", failures),
        ):
            family = CounterMetricFamily(f"kvolt_{name}", text, labels=(label,))
            for kind, count in sorted(counts.items()):
                family.add_metric((kind,), count)
            yield family
