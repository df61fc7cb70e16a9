"""Summary of a distribution: minimum, mean, percentiles, maximum."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Summary statistics. Percentiles are nearest-rank values."""

    count: int
    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(counts: Mapping[int, int]) -> Distribution | None:
    """Summarize values given by their counts; None without values."""
    count = sum(counts.values())
    if not count:
        return None
    values = sorted(counts)
    return Distribution(
        count=count,
        min=values[0],
        mean=sum(value * times for value, times in counts.items()) / count,
        p50=_percentile(values, counts, 50, count),
        p90=_percentile(values, counts, 90, count),
        p99=_percentile(values, counts, 99, count),
        max=values[-1],
    )


def _percentile(values: list[int], counts: Mapping[int, int], percent: int, count: int) -> int:
    rank = -(-percent * count // 100)
    num_seen = 0
    for value in values:
        num_seen += counts[value]
        if num_seen >= rank:
            return value
    raise AssertionError("the maximum covers every percentile")
