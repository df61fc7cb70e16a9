"""Traces as bursts separated by pauses, and one report of several runs. Pure.

The speed of a machine changes within seconds with the load of other machines on the same host. Two workloads that
alternate in short bursts see the same conditions; run one after the other they do not. The study's traces therefore
have pauses: the twin skips them, a real run ends a burst, waits for a burst of the other workload, and starts the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvolt.bench.load.histogram import Histogram, HistogramData
from kvolt.bench.load.report import BenchReport, Counts
from kvolt.core.trace import TraceRecord

BURST_S = 10.0
PAUSE_S = 120.0
"""Longer than any burst takes to be answered: each burst starts on an idle server."""


def with_pauses(records: Iterable[TraceRecord], burst_s: float = BURST_S) -> list[TraceRecord]:
    """The same requests, with a pause after every `burst_s`."""
    return [
        replace(record, timestamp=record.timestamp + record.timestamp // (1e3 * burst_s) * 1e3 * PAUSE_S)
        for record in records
    ]


def bursts_of(records: Iterable[TraceRecord]) -> list[list[TraceRecord]]:
    """Bursts between the pauses, each with times from 0."""
    bursts: list[list[TraceRecord]] = []
    start = before = 0.0
    for record in records:
        if not bursts or record.timestamp - before > 1e3 * PAUSE_S / 2:
            bursts.append([])
            start = record.timestamp
        before = record.timestamp
        bursts[-1].append(replace(record, timestamp=record.timestamp - start))
    return bursts


def as_one(reports: Sequence[BenchReport]) -> BenchReport:
    """Merged report of the runs; fields that cannot be merged are those of the first one."""
    histograms = {
        name: _merged([report.histograms[name] for report in reports]) for name in reports[0].histograms
    }
    latencies = {name: histograms[name].summary() for name in reports[0].latencies}
    return replace(
        reports[0],
        is_interrupted=any(report.is_interrupted for report in reports),
        counts=_sum([report.counts for report in reports]),
        latencies=latencies,
        histograms={name: each.data() for name, each in histograms.items()},
    )


def _merged(parts: Sequence[HistogramData]) -> Histogram:
    merged = Histogram.from_data(parts[0])
    for part in parts[1:]:
        merged.merge(Histogram.from_data(part))
    return merged


def _sum(counts: Sequence[Counts]) -> Counts:
    cached = [each.cached_tokens for each in counts]
    total = {
        name: sum(getattr(each, name) for each in counts)
        for name in Counts.__struct_fields__
        if name != "cached_tokens"
    }
    known = [each for each in cached if each is not None]
    return Counts(**total, cached_tokens=sum(known) if len(known) == len(cached) else None)
