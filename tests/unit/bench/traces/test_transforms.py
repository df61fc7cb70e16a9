"""Transforms: pure functions from records to records."""

from __future__ import annotations

import math
from itertools import count, islice, repeat

import pytest
from msgspec.structs import replace
from tests.unit.bench.traces.trace_lab import record, shared_blocks

from kvolt.bench.traces import (
    LengthBounds,
    cut,
    filter_lengths,
    limit,
    merge,
    own_ids,
    renumber,
    sample,
    scale_time,
    shift,
    small_trace,
    sort_by_time,
    start_at_zero,
)
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


def at(*times: float) -> list[TraceRecord]:
    return [record([1], at=time) for time in times]


def times(records: object) -> list[float]:
    assert hasattr(records, "__iter__")
    return [each.timestamp for each in records]


def test_speed_divides_times_and_delays() -> None:
    turn = replace(record([1], at=100.0), delay=50.0)
    fast, bare = scale_time([turn, record([1], at=200.0)], 2)
    assert (fast.timestamp, fast.delay, bare.timestamp, bare.delay) == (50.0, 25.0, 100.0, None)


@pytest.mark.parametrize("speed", [0, -1, math.inf, math.nan])
def test_speed_must_be_one(speed: float) -> None:
    with pytest.raises(ConfigError, match="speed"):
        scale_time([], speed)


def test_cut_by_time_stops_at_the_end() -> None:
    endless = (record([1], at=float(time)) for time in count())
    assert times(cut(endless, 3, 6)) == [3, 4, 5]
    assert times(cut(at(1, 2, 3))) == [1, 2, 3]


def test_limit() -> None:
    assert times(limit(at(1, 2, 3), 2)) == [1, 2]
    assert times(limit(at(1, 2, 3), 0)) == []
    with pytest.raises(ConfigError, match="limit"):
        limit([], -1)


def test_a_sample_is_decided_by_its_seed() -> None:
    records = at(*range(2000))
    kept = times(sample(records, 0.25, seed=1))
    assert kept == times(sample(records, 0.25, seed=1))
    assert kept != times(sample(records, 0.25, seed=2))
    assert 400 < len(kept) < 600, "2,000 draws: 500, with a standard deviation of 19"
    assert kept == sorted(kept)
    assert set(kept) < set(times(sample(records, 0.5, seed=1))), "more of it keeps what less of it kept"
    assert list(sample(records, 1.0)) == records
    assert list(sample(records, 0.0)) == []


def test_a_sample_keeps_sessions_whole() -> None:
    records = small_trace()
    kept = {each.session for each in sample(records, 0.3)}
    assert [each for each in records if each.session in kept] == list(sample(records, 0.3))
    assert 0 < len(kept) < len({each.session for each in records})


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_a_sample_is_a_share(share: float) -> None:
    with pytest.raises(ConfigError, match="sample"):
        sample([], share)


def test_merge_is_by_time_and_lazy() -> None:
    odd, even = at(1, 3, 5), at(0, 2, 3)
    merged = list(merge(odd, even))
    assert times(merged) == [0, 1, 2, 3, 3, 5]
    assert merged[3] is odd[1]
    assert times(islice(merge(repeat(odd[0]), even), 3)) == [0, 1, 1]


def test_own_ids_are_shared_within_a_trace_only() -> None:
    trace = [replace(record([1, 2]), session="s"), record([1, 3])]
    one, other = (list(own_ids(trace, name)) for name in ("a", "b"))
    assert shared_blocks(one[0].hash_ids, one[1].hash_ids) == 1
    assert not set(one[0].hash_ids) & set(other[0].hash_ids)
    assert (one[0].session, other[0].session, one[1].session) == ("a/s", "b/s", None)
    assert list(own_ids(trace, "a")) == one


def test_shift() -> None:
    assert times(shift(at(1, 2), 10)) == [11, 12]
    assert times(start_at_zero(at(5, 7))) == [0, 2]
    assert list(start_at_zero([])) == []
    with pytest.raises(ConfigError, match="a shift by -2 ms moves a request to -1 ms"):
        list(shift(at(1), -2))


def test_lengths() -> None:
    def sized(inputs: int, outputs: int) -> TraceRecord:
        return replace(record((), inputs), output_length=outputs)

    records = [sized(1, 5), sized(5, 1), sized(5, 5), sized(9, 9)]
    assert list(filter_lengths(records, LengthBounds())) == records
    assert list(filter_lengths(records, LengthBounds(min_input=2, max_input=8))) == records[1:3]
    assert list(filter_lengths(records, LengthBounds(min_output=2, max_output=5))) == [records[0], records[2]]
    assert list(filter_lengths(records, LengthBounds(max_total=6))) == records[:2]


def test_numbers_in_order_of_appearance() -> None:
    found = list(renumber([record([70, 90]), record([70, 80]), record([80])]))
    assert [each.hash_ids for each in found] == [(0, 1), (0, 2), (2,)]


def test_sorting_keeps_equal_times_as_they_were() -> None:
    late, one, two = record([1], at=5), record([2], at=1), record([3], at=1)
    assert sort_by_time([late, one, two]) == [one, two, late]
