"""The metrics that an engine of others keeps in this process, under its names and with our labels besides."""

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
    """`folder`: where the engine's other processes leave theirs (PROMETHEUS_MULTIPROC_DIR), which then go before what
    this one has."""
    if folder:
        registry = CollectorRegistry()
        MultiProcessCollector(registry, folder)  # type: ignore[no-untyped-call]
    for family in registry.collect():
        if not family.name.startswith(prefix):
            continue
        told = Metric(family.name, family.documentation, family.type, family.unit)
        told.samples = [_labelled(each, labels) for each in family.samples]
        yield told


def _labelled(sample: Sample, labels: Mapping[str, str]) -> Sample:
    """What the engine says of itself goes before what we say of it."""
    return sample._replace(labels={**labels, **sample.labels})
