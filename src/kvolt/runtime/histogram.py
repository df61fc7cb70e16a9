"""A mergeable histogram with fixed bounds: a few list operations per observation. Pure.

Observed once per token or decision, where a call into a metrics library would cost too much; turned into a Prometheus
family at a scrape.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (
    0.001,
    0.002,
    0.005,
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
)
"""Bounds for times from a millisecond to minutes, such as TTFT and E2E."""


class Histogram:
    """Counts per bucket and the sum of all values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def merge(self, other: Histogram) -> None:
        """Add the observations of a histogram with the same bounds."""
        assert tuple(other.bounds) == tuple(self.bounds)
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as Prometheus expects them."""
        running, out = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
        return out
