"""Prometheus metrics that an external engine keeps in this process, with kvolt's labels added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.samples import Sample


def engine_metrics(
    prefix: str,
    labels: Mapping[str, str],
    folder: str | None = None,
    registry: CollectorRegistry = REGISTRY,
) -> Iterator[Metric]:
    """Metrics whose names start with `prefix`. `folder`: metrics of the engine's processes (PROMETHEUS_MULTIPROC_DIR),
    which are used instead of this process's registry."""
    if folder:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    for family in registry.collect():
        if not family.name.startswith(prefix):
            continue
        labelled = Metric(family.name, family.documentation, family.type, family.unit)
        labelled.samples = [_labelled(each, labels) for each in family.samples]
        yield labelled


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    """Add labels; those of the engine win."""
    return sample._replace(labels={**labels, **sample.labels})
