"""Stalls on one connection, of this process or of the peer: time that counts for no deadline between responses."""

from __future__ import annotations

from collections import deque

MAX_STALLS = 256
"""Kept per connection, the newest. One is noticed per heartbeat, so they reach back for minutes."""


class Stalls:
    """Disjoint intervals by the loop's clock, in order of time."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)

    def add(self, start: float, end: float) -> None:
        """Record a stall that ends later than all before it. Time that it shares with them counts once."""
        intervals = self._intervals
        while intervals and intervals[-1][0] >= start:
            intervals.pop()
        if intervals:
            start = max(start, intervals[-1][1])
        if start < end:
            intervals.append((start, end))

    def seconds_since(self, since: float) -> float:
        """Stalled seconds after a time."""
        seconds = 0.0
        for start, end in reversed(self._intervals):
            if end <= since:
                break
            seconds += end - max(start, since)
        return seconds
