"""Time series of worker activity in a bounded number of intervals, merged pairwise when there are too many. Pure."""

from __future__ import annotations

import math

import msgspec

MAX_INTERVALS = 512
_FIRST_WIDTH_S = 0.25
_NOTHING = 1e-9
"""Fraction of an interval that is ignored as a rounding error."""


class ActivityData(msgspec.Struct, frozen=True, kw_only=True):
    """Activity of all workers per interval since the start of the run."""

    width_s: float
    busy: list[float]
    """Fraction of the workers' time spent computing."""
    running: list[float]
    """Mean number of running requests."""
    waiting: list[float]
    """Mean number of requests waiting at workers, as reported at the end of each step."""
    kv_used: list[float]
    """Fraction of KV blocks in use."""


class Activity:
    """Sums of time x count per interval."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._busy = [0.0] * MAX_INTERVALS
        self._running = [0.0] * MAX_INTERVALS
        self._waiting = [0.0] * MAX_INTERVALS
        self._kv_blocks = [0.0] * MAX_INTERVALS

    def add(self, begin_s: float, end_s: float, running: int, waiting: float, kv_blocks: int) -> None:
        """Add one step, or several merged ones, of one worker. Times from the start of the run.

        Called for every step; nearly all lie within one interval.
        """
        while end_s >= self._width_s * MAX_INTERVALS:
            self._widen()
        width_s = self._width_s
        interval = int(begin_s / width_s)
        while True:
            time_s = min(end_s, (interval + 1) * width_s) - begin_s
            self._busy[interval] += time_s
            self._running[interval] += time_s * running
            self._waiting[interval] += time_s * waiting
            self._kv_blocks[interval] += time_s * kv_blocks
            interval += 1
            begin_s = interval * width_s
            if begin_s >= end_s:
                return

    def _widen(self) -> None:
        self._width_s *= 2
        for sums in (self._busy, self._running, self._waiting, self._kv_blocks):
            pairs = [sums[at] + sums[at + 1] for at in range(0, MAX_INTERVALS, 2)]
            sums[:] = pairs + [0.0] * (MAX_INTERVALS - len(pairs))

    def data(self, end_s: float, num_workers: int, kv_blocks: int) -> ActivityData:
        """Series until `end_s` for a cluster of this size; the last interval may be shorter."""
        width_s = self._width_s
        num_intervals = min(MAX_INTERVALS, max(0, math.ceil(end_s / width_s - _NOTHING)))
        lengths = [min(width_s, end_s - at * width_s) for at in range(num_intervals)]

        def per(sums: list[float], capacity: float) -> list[float]:
            return [
                round(total / (length_s * capacity), 6)
                for total, length_s in zip(sums, lengths, strict=False)
            ]

        return ActivityData(
            width_s=width_s,
            busy=per(self._busy, num_workers),
            running=per(self._running, 1),
            waiting=per(self._waiting, 1),
            kv_used=per(self._kv_blocks, num_workers * kv_blocks),
        )
