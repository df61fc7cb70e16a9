"""Many numbers in a line: least, mean, percentiles, most."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles are values that occur: the least one that so many percent of all do not exceed."""

    count: int
    min: float
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def distribution(counts: Mapping[int, int]) -> Distribution | None:
    """Of values by how often each occurs, which needs memory for different values only. None of nothing."""
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
    wanted = -(-percent * count // 100)
    seen = 0
    for value in values:
        seen += counts[value]
        if seen >= wanted:
            return value
    raise AssertionError("the last value reaches every percentile")
