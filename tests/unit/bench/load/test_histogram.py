"""Percentiles within a percent, whatever was recorded and however it was merged."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.bench.load.histogram import Histogram, HistogramData
from kvolt.core.errors import InvalidRequest

VALUES = st.lists(st.floats(0.0, 1e5, allow_nan=False), min_size=1, max_size=200)


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(VALUES, st.floats(0.0, 100.0))
def test_a_percentile_is_within_a_percent_of_the_exact_one(values: list[float], percent: float) -> None:
    exact = sorted(values)[max(1, math.ceil(len(values) * percent / 100.0)) - 1]
    assert filled(values).percentile(percent) == pytest.approx(exact, rel=0.01, abs=1e-6)


@given(VALUES)
def test_mean_and_extremes_are_exact(values: list[float]) -> None:
    summary = filled(values).summary()
    assert (summary.count, summary.min, summary.max) == (len(values), min(values), max(values))
    assert summary.mean == pytest.approx(sum(values) / len(values))
    assert summary.p50 <= summary.p90 <= summary.p95 <= summary.p99 <= summary.p99_9 <= summary.max


@given(VALUES, VALUES)
def test_merged_is_recorded_together(left: list[float], right: list[float]) -> None:
    merged, together = filled(left), filled(left + right)
    merged.merge(filled(right))
    ours, theirs = merged.data(), together.data()
    assert (ours.buckets, ours.counts, ours.min, ours.max) == (
        theirs.buckets,
        theirs.counts,
        theirs.min,
        theirs.max,
    )
    assert ours.total == pytest.approx(theirs.total)


@given(VALUES)
def test_a_file_holds_all_of_it(values: list[float]) -> None:
    histogram = filled(values)
    again = Histogram.from_data(histogram.data())
    assert again.data() == histogram.data()
    assert again.summary() == histogram.summary()


def test_an_empty_one_has_no_surprises() -> None:
    empty = Histogram()
    assert empty.summary().max == empty.percentile(99) == empty.mean == 0.0
    empty.merge(filled([2.0]))
    assert empty.summary().min == 2.0


def test_what_no_bucket_holds_counts_at_the_ends() -> None:
    histogram = filled([-3.0, 1e12])
    assert histogram.count == 2
    assert histogram.min == 0.0
    assert histogram.percentile(100) > 1e7


def test_what_cannot_be_merged_or_read_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        Histogram(1e6).merge(Histogram(1e3))
    with pytest.raises(InvalidRequest):
        Histogram.from_data(
            HistogramData(units_per_value=1e6, buckets=[10**6], counts=[1], total=1.0, min=1.0, max=1.0)
        )
