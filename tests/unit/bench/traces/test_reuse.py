"""Hit rates in one pass, beside caches that are really kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.bench.traces.trace_lab import lru_hits, prompts, record

from kvolt.bench.traces import Reuse, ReuseMeter
from kvolt.bench.traces.reuse import _Fenwick
from kvolt.core.trace import TraceRecord

CAPACITIES = (1, 2, 3, 5, 8, 13, 100)


def measured(records: list[TraceRecord], capacities: tuple[int, ...] = ()) -> Reuse:
    meter = ReuseMeter(capacities)
    for each in records:
        meter.add(each)
    result = meter.result()
    assert result is not None
    return result


@given(st.lists(prompts(4), min_size=1, max_size=40))
def test_every_size_at_once_is_each_size_alone(records: list[TraceRecord]) -> None:
    """Ids repeat within prompts and stand behind different ones here: only all ids up to a block name it."""
    found = measured(records, CAPACITIES)
    blocks = sum(len(each.hash_ids) for each in records)
    assert found.blocks == blocks
    assert found.hit_rate == lru_hits(records, None) / blocks
    assert found.distinct_blocks == blocks - lru_hits(records, None)
    assert [each.blocks for each in found.lru] == list(CAPACITIES)
    for each in found.lru:
        assert each.hit_rate == lru_hits(records, each.blocks) / blocks


@given(st.lists(prompts(4), min_size=1, max_size=40))
def test_distances_are_those_of_the_hits(records: list[TraceRecord]) -> None:
    found = measured(records)
    if found.distance is None:
        assert found.hit_rate == 0
        return
    assert found.distance.count == lru_hits(records, None)
    most = int(found.distance.max)
    assert lru_hits(records, most + 1) == lru_hits(records, None), "the furthest is found by one block more"
    assert lru_hits(records, most) < lru_hits(records, None), "and not by less"
    assert lru_hits(records, int(found.distance.min)) == 0


def test_a_case_by_hand() -> None:
    found = measured(
        [record([1, 2, 3]), record([1, 2, 4]), record([9]), record([1, 2, 3], length=10)], (3, 4, 5)
    )
    # 12345 -> 10 blocks; the second finds 2, the last 3: [1 2] with one other block since, [3] with four.
    assert (found.blocks, found.distinct_blocks, found.hit_rate) == (10, 5, 0.5)
    assert [each.hit_rate for each in found.lru] == [0.4, 0.4, 0.5]
    assert found.requests_with_reuse == 0.5
    assert found.token_hit_rate == (8 + 10) / (12 + 12 + 4 + 10)
    assert found.distance is not None
    assert (found.distance.min, found.distance.max, found.distance.count) == (0, 4, 5)


def test_nothing_is_known_without_ids() -> None:
    meter = ReuseMeter((10,))
    meter.add(record((), 100))
    assert meter.result() is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-3, 9)), max_size=60))
def test_sums_of_beginnings(changes: list[tuple[int, int]]) -> None:
    tree, plain = _Fenwick(), []
    for place, value in changes:
        if place < len(plain):
            tree.add(place, value)
            plain[place] += value
        else:
            tree.append(value)
            plain.append(value)
        assert len(tree) == len(plain)
        assert [tree.sum_through(end) for end in range(len(plain))] == [
            sum(plain[: end + 1]) for end in range(len(plain))
        ]


@pytest.mark.parametrize("capacities", [(), (5, 5, 1)])
def test_sizes_are_sorted_and_told_once(capacities: tuple[int, ...]) -> None:
    found = measured([record([1])], capacities)
    assert [each.blocks for each in found.lru] == sorted(set(capacities))
