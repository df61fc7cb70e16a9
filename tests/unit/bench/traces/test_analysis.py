"""What a trace is like: counts, rates, lengths, sessions."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.unit.bench.traces.trace_lab import record

from kvolt.bench.traces import analyze
from kvolt.bench.traces.reuse import distribution
from kvolt.core.errors import ConfigError


def test_counts_lengths_and_sessions() -> None:
    found = analyze(
        [
            replace(record([1, 2], at=1000.0), session="a"),
            replace(record([1, 3], at=2000.0), session="a"),
            replace(record([7], at=6000.0, block_size=16), session="b", output_length=3),
        ],
        (1, 2),
    )
    assert (found.requests, found.duration_s, found.input_tokens, found.output_tokens) == (3, 5.0, 32, 5)
    assert (found.input_length.min, found.input_length.p50, found.input_length.max) == (8, 8, 16)
    assert (found.output_length.mean, found.output_length.p99) == (5 / 3, 3)
    assert found.block_sizes == (4, 16)
    assert found.sessions is not None
    assert (found.sessions.count, found.sessions.turns.max) == (2, 2)
    assert found.reuse is not None
    assert found.reuse.hit_rate == 0.2
    assert [each.blocks for each in found.reuse.lru] == [1, 2]


def test_what_a_trace_does_not_say() -> None:
    found = analyze([record((), 5)])
    assert (found.sessions, found.reuse, found.block_sizes) == (None, None, ())
    assert (found.duration_s, found.rate.mean, found.rate.peak) == (0.0, 0.0, 1.0)


def test_a_trace_without_requests_is_told() -> None:
    with pytest.raises(ConfigError, match="has no requests"):
        analyze([])


def test_rates_over_time() -> None:
    # Two a second for a minute, then nothing, then one after an hour; times need not begin at 0.
    times = [5e9 + half * 500 for half in range(120)] + [5e9 + 3_600_000]
    found = analyze(record((), 5, at=time) for time in times)
    assert found.duration_s == 3600
    assert found.rate.window_s == 32
    assert len(found.rate.windows) == 113
    assert found.rate.windows[:3] == (2.0, (120 - 64) / 32, 0.0)
    assert found.rate.windows[-1] == 1 / 32
    assert found.rate.peak == 2.0
    assert found.rate.mean == 121 / 3600


def test_windows_stay_few() -> None:
    found = analyze(record((), 5, at=float(power)) for power in (0, 10**3, 10**6, 10**9, 10**12))
    assert len(found.rate.windows) <= 120
    assert sum(found.rate.windows) * found.rate.window_s == pytest.approx(5)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=300))
def test_percentiles_are_those_of_the_sorted_row(values: list[int]) -> None:
    found = distribution(Counter(values))
    assert found is not None
    row = sorted(values)
    for percent, value in ((50, found.p50), (90, found.p90), (99, found.p99)):
        below = sum(each <= value for each in row)
        assert below * 100 >= percent * len(row)
        assert sum(each < value for each in row) * 100 < percent * len(row)
    assert (found.count, found.min, found.max) == (len(row), row[0], row[-1])
    assert found.mean == pytest.approx(sum(row) / len(row))


def test_nothing_has_no_distribution() -> None:
    assert distribution({}) is None
