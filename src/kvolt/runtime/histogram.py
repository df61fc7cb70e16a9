"""A histogram that costs a few list operations; turned into a Prometheus family when somebody asks.

What is observed once per token or decision must not cost a call into a metrics library.
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
"""Bounds for what takes a moment or minutes: first tokens, whole answers."""


class Histogram:
    """Counts by bucket; `observe` takes several equal values at once."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_observed(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus counts them: by upper bound, each with all below it."""
        running, out = 0, []
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            running += count
            out.append(("+Inf" if bound == float("inf") else str(float(bound)), float(running)))
        return out
