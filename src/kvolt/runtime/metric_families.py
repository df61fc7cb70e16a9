"""Prometheus metric families, filled from values by label at a scrape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from kvolt.runtime.histogram import Histogram

Labels = tuple[str, ...]


def gauge(
    name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def counter(
    name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, float]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


def histogram(
    name: str, help_text: str, labels: Sequence[str], values: Iterable[tuple[Labels, Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, help_text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value.buckets(), value.total)
    return family
