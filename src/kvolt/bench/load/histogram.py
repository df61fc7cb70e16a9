"""Histogram with bounded memory and percentiles within 0.4 % (log-linear buckets like HdrHistogram).

Values are counted in units (microseconds for times). Below 256 units each value has its own bucket; above, each power
of two is divided into 128 equal buckets:

    units    0 ... 255 | 256 ... 511 | 512 ... 1023 | ...
    width        1     |      2      |      4       |
    bucket   0 ... 255 | 256 ... 383 | 384 ...  511 | ...

Recording is a shift and an addition, since it happens for every token. Histograms with equal units can be merged in any
order.
"""

from __future__ import annotations

import math

import msgspec

from kvolt.core.errors import InvalidRequest

_MANTISSA_BITS = 8
_HALF_BITS = _MANTISSA_BITS - 1
_MAX_UNITS = (1 << 44) - 1
"""About 200 days in microseconds; larger values are clamped."""
_NUM_BUCKETS = ((_MAX_UNITS.bit_length() - _MANTISSA_BITS) << _HALF_BITS) + (1 << _MANTISSA_BITS)

PERCENTILES = (50.0, 90.0, 95.0, 99.0, 99.9)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of one metric in a report; times in seconds."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p95: float
    p99: float
    p99_9: float
    max: float


class HistogramData(msgspec.Struct, frozen=True, kw_only=True):
    """Serialized histogram: the non-empty buckets."""

    units_per_value: float
    buckets: list[int]
    counts: list[int]
    total: float
    min: float
    max: float


class Histogram:
    """Counts non-negative values; a negative value (clock skew) counts as 0."""

    __slots__ = ("_counts", "_units_per_value", "count", "max", "min", "total")

    def __init__(self, units_per_value: float = 1e6) -> None:
        self._units_per_value = units_per_value
        self._counts = [0] * _NUM_BUCKETS
        self.count = 0
        self.total = 0.0
        self.min = math.inf
        self.max = 0.0

    def record(self, value: float, times: int = 1) -> None:
        if value < 0.0:  # noqa: PLR1730
            value = 0.0
        units = int(value * self._units_per_value)
        shift = units.bit_length() - _MANTISSA_BITS
        if shift <= 0:
            self._counts[units] += times
        elif units > _MAX_UNITS:
            self._counts[_NUM_BUCKETS - 1] += times
        else:
            self._counts[(shift << _HALF_BITS) + (units >> shift)] += times
        self.count += times
        self.total += value * times
        if value > self.max:  # noqa: PLR1730 - max() costs three times this, for every token
            self.max = value
        if value < self.min:  # noqa: PLR1730
            self.min = value

    def merge(self, other: Histogram) -> None:
        if other._units_per_value != self._units_per_value:
            raise InvalidRequest("histograms with different units cannot be merged", param="units_per_value")
        self._counts = [mine + theirs for mine, theirs in zip(self._counts, other._counts, strict=True)]
        self.count += other.count
        self.total += other.total
        self.min = min(self.min, other.min)
        self.max = max(self.max, other.max)

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def percentile(self, percent: float) -> float:
        """Percentile by nearest rank; 0 without values."""
        return self.percentiles((percent,))[0]

    def percentiles(self, percents: tuple[float, ...]) -> list[float]:
        """Several percentiles, in rising order, in one pass."""
        if not self.count:
            return [0.0] * len(percents)
        values: list[float] = []
        num_seen = 0
        ranks = [max(1, math.ceil(self.count * percent / 100.0)) for percent in percents]
        for bucket, number in enumerate(self._counts):
            if not number:
                continue
            num_seen += number
            while len(values) < len(ranks) and ranks[len(values)] <= num_seen:
                values.append(min(max(self._middle(bucket), self.min), self.max))
            if len(values) == len(ranks):
                break
        return values

    def summary(self) -> Summary:
        p50, p90, p95, p99, p99_9 = self.percentiles(PERCENTILES)
        return Summary(
            count=self.count,
            mean=self.mean,
            min=self.min if self.count else 0.0,
            p50=p50,
            p90=p90,
            p95=p95,
            p99=p99,
            p99_9=p99_9,
            max=self.max,
        )

    def data(self) -> HistogramData:
        filled = [bucket for bucket, number in enumerate(self._counts) if number]
        return HistogramData(
            units_per_value=self._units_per_value,
            buckets=filled,
            counts=[self._counts[bucket] for bucket in filled],
            total=self.total,
            min=self.min if self.count else 0.0,
            max=self.max,
        )

    @classmethod
    def from_data(cls, data: HistogramData) -> Histogram:
        made = cls(data.units_per_value)
        for bucket, number in zip(data.buckets, data.counts, strict=True):
            if not 0 <= bucket < _NUM_BUCKETS or number < 0:
                raise InvalidRequest(
                    f"invalid histogram: {number} values in bucket {bucket}", param="buckets"
                )
            made._counts[bucket] = number
            made.count += number
        made.total, made.max = data.total, data.max
        made.min = data.min if made.count else math.inf
        return made

    def _middle(self, bucket: int) -> float:
        shift = max(0, (bucket >> _HALF_BITS) - 1)
        units = (bucket - (shift << _HALF_BITS)) << shift
        return (units + (1 << shift) / 2) / self._units_per_value
