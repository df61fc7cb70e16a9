"""Stalled time on one connection."""

from __future__ import annotations

from kvolt.runtime.plane.streams import MAX_STALLS, Stalls


def test_only_the_time_after_the_start_counts() -> None:
    stalls = Stalls()
    assert stalls.seconds_since(0.0) == 0.0
    stalls.record(10.0, 14.0)
    stalls.record(20.0, 21.0)
    assert [stalls.seconds_since(since) for since in (0.0, 10.0, 12.0, 14.0, 20.5, 21.0)] == [
        5.0,
        5.0,
        3.0,
        1.0,
        0.5,
        0.0,
    ]


def test_time_in_two_stalls_counts_once() -> None:
    """Both processes may be stalled at once, in any order."""
    stalls = Stalls()
    stalls.record(10.0, 14.0)
    stalls.record(12.0, 16.0)
    assert stalls.seconds_since(0.0) == 6.0
    stalls.record(13.0, 16.0)
    assert stalls.seconds_since(0.0) == 6.0
    stalls.record(8.0, 20.0)
    assert stalls.seconds_since(0.0) == 12.0
    assert stalls.seconds_since(19.0) == 1.0


def test_the_newest_are_kept() -> None:
    stalls = Stalls()
    for number in range(MAX_STALLS + 10):
        stalls.record(10.0 * number, 10.0 * number + 1.0)
    assert stalls.seconds_since(0.0) == MAX_STALLS
    assert stalls.seconds_since(10.0 * (MAX_STALLS + 8)) == 2.0
