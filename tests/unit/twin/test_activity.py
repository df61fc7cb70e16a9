"""What workers did over time: sums that stay right however long a run gets, in bounded memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.twin.activity import MAX_INTERVALS, Activity


def test_a_step_within_an_interval_and_one_over_several() -> None:
    activity = Activity()
    activity.add(0.0, 0.125, 4, 2, 10)
    activity.add(0.2, 0.6, 1, 0, 5)  # 0.05 s of the first, all of the second, 0.1 s of the third
    data = activity.data(0.75, 2, 10)
    assert data.width_s == 0.25
    assert data.busy == pytest.approx([0.35, 0.5, 0.2])
    assert data.running == pytest.approx([2.2, 1.0, 0.4])
    assert data.waiting == pytest.approx([1.0, 0.0, 0.0])
    assert data.kv_used == pytest.approx([0.3, 0.25, 0.1])


def test_the_last_interval_may_be_short_and_nothing_is_nothing() -> None:
    activity = Activity()
    activity.add(0.0, 0.375, 1, 0, 1)
    assert activity.data(0.375, 1, 1).busy == [1.0, 1.0]
    assert activity.data(0.5 + 1e-12, 1, 1).busy == [1.0, 0.5]  # no interval of nothing but rounding
    assert Activity().data(0.0, 3, 10).busy == []


@given(
    steps=st.lists(
        st.tuples(st.floats(0, 20_000), st.floats(0, 3000), st.integers(0, 50), st.integers(0, 9)),
        max_size=30,
    )
)
def test_nothing_is_lost_when_intervals_become_one(steps: list[tuple[float, float, int, int]]) -> None:
    activity = Activity()
    for begin_s, length_s, running, waiting in steps:
        activity.add(begin_s, begin_s + length_s, running, waiting, running)
    end_s = max((begin_s + length_s for begin_s, length_s, _, _ in steps), default=0.0)
    data = activity.data(end_s, 1, 1)
    assert len(data.busy) <= MAX_INTERVALS
    lengths = [min(data.width_s, end_s - at * data.width_s) for at in range(len(data.busy))]

    def total(shares: list[float]) -> float:
        return sum(share * length_s for share, length_s in zip(shares, lengths, strict=True))

    assert total(data.busy) == pytest.approx(sum(step[1] for step in steps), rel=1e-3, abs=0.1)
    assert total(data.running) == pytest.approx(sum(step[1] * step[2] for step in steps), rel=1e-3, abs=0.1)
    assert total(data.waiting) == pytest.approx(sum(step[1] * step[3] for step in steps), rel=1e-3, abs=0.1)
