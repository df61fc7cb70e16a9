"""Traces as bursts with pauses between, and one report of several. Pure.

The speed of a machine changes within seconds, by the load of other machines on the same host. Two workloads that take
turns in short bursts meet the same machine; one after the other they do not. So the traces of the study have pauses:
a twin passes over them in no time, a real run ends a burst, lets the other workload have one, and goes on with the
next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from kvolt.bench.load.histogram import Histogram
from kvolt.bench.load.report import BenchReport, Counts
from kvolt.core.trace import TraceRecord

PAUSE_S = 120.0
"""Longer than any burst takes to be answered: each burst starts on an idle server."""


def bursts_of(records: Iterable[TraceRecord]) -> list[list[TraceRecord]]:
    """What lies between pauses, each from time 0 on."""
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
    histograms: dict[str, Histogram] = {}
    for name, first in reports[0].histograms.items():
        histograms[name] = Histogram.from_data(first)
        for report in reports[1:]:
            histograms[name].merge(Histogram.from_data(report.histograms[name]))
    return replace(
        reports[0],
        is_interrupted=any(report.is_interrupted for report in reports),
        counts=_sum([report.counts for report in reports]),
        latencies={name: histograms[name].summary() for name in reports[0].latencies},
        histograms={name: each.data() for name, each in histograms.items()},
    )


def _sum(counts: Sequence[Counts]) -> Counts:
    cached = [each.cached_tokens for each in counts]
    total = {
        name: sum(getattr(each, name) for each in counts)
        for name in Counts.__struct_fields__
        if name != "cached_tokens"
    }
    known = [each for each in cached if each is not None]
    return Counts(**total, cached_tokens=sum(known) if len(known) == len(cached) else None)
