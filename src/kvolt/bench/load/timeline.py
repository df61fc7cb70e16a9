"""Time series of a run in a bounded number of intervals, which are merged pairwise when there are too many. Pure."""

from __future__ import annotations

import msgspec

MAX_INTERVALS = 512
_FIRST_WIDTH_S = 0.25


class TimelineData(msgspec.Struct, frozen=True, kw_only=True):
    """Sums per interval since the start of the run."""

    width_s: float
    started: list[int]
    ended: list[int]
    failed: list[int]
    tokens: list[float]


class Timeline:
    """Counts starts and ends of requests, and spreads output tokens over their arrival period."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._started: list[float] = []
        self._ended: list[float] = []
        self._failed: list[float] = []
        self._tokens: list[float] = []

    def started(self, at_s: float) -> None:
        interval = self._interval(at_s)  # first, since it may replace the lists
        self._started[interval] += 1

    def ended(self, at_s: float, failed: bool) -> None:
        interval = self._interval(at_s)
        self._ended[interval] += 1
        self._failed[interval] += failed

    def tokens(self, number: int, first_s: float, last_s: float) -> None:
        end = self._interval(last_s)
        begin = self._interval(first_s)
        each = number / (end - begin + 1)
        for interval in range(begin, end + 1):
            self._tokens[interval] += each

    def data(self) -> TimelineData:
        return TimelineData(
            width_s=self._width_s,
            started=[int(number) for number in self._started],
            ended=[int(number) for number in self._ended],
            failed=[int(number) for number in self._failed],
            tokens=[round(number, 3) for number in self._tokens],
        )

    def _interval(self, at_s: float) -> int:
        at_s = max(0.0, at_s)
        while at_s / self._width_s >= MAX_INTERVALS:
            self._width_s *= 2
            self._started, self._ended = _paired(self._started), _paired(self._ended)
            self._failed, self._tokens = _paired(self._failed), _paired(self._tokens)
        interval = int(at_s / self._width_s)
        for counts in (self._started, self._ended, self._failed, self._tokens):
            counts.extend([0] * (interval + 1 - len(counts)))
        return interval


def _paired(counts: list[float]) -> list[float]:
    return [sum(counts[at : at + 2]) for at in range(0, len(counts), 2)]
