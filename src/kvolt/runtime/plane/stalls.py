"""Stalls of this process or of the peer on one connection, which deadlines between responses do not count."""

from __future__ import annotations

from collections import deque

MAX_STALLS = 256
"""Newest intervals kept per connection. At most one per heartbeat, so they cover minutes."""


class Stalls:
    """Disjoint intervals in loop time, oldest first."""

    __slots__ = ("_intervals",)

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, float]] = deque(maxlen=MAX_STALLS)

    def record(self, start: float, end: float) -> None:
        """Record a stall that ends after all earlier ones. Overlapping time counts once."""
        intervals = self._intervals
        while intervals and intervals[-1][0] >= start:
            intervals.pop()
        if intervals:
            start = max(start, intervals[-1][1])
        if start < end:
            intervals.append((start, end))

    def seconds_since(self, since: float) -> float:
        """Stalled seconds after `since`."""
        seconds = 0.0
        for start, end in reversed(self._intervals):
            if end <= since:
                break
            seconds += end - max(start, since)
        return seconds
