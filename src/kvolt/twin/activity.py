"""What workers did over time, in a bounded number of intervals: when there are too many, two become one. Pure.

Fed with steps as they end and with nothing else: while nothing happens nothing is done here either.
"""

from __future__ import annotations

import math

import msgspec

MAX_INTERVALS = 512
_FIRST_WIDTH_S = 0.25
_NOTHING = 1e-9
"""So little of an interval is left out: what is in it is the rounding of times."""


class ActivityData(msgspec.Struct, frozen=True, kw_only=True):
    """Of all workers together, per interval from the start of the run."""

    width_s: float
    busy: list[float]
    """The share of the workers' time in which they computed."""
    running: list[float]
    """Requests in steps, on average over the interval."""
    waiting: list[float]
    """Requests that waited at a worker, as it said at the end of each step."""
    kv_used: list[float]
    """The share of all KV blocks that somebody held."""


class Activity:
    """Sums of time x number per interval."""

    def __init__(self) -> None:
        self._width_s = _FIRST_WIDTH_S
        self._busy = [0.0] * MAX_INTERVALS
        self._running = [0.0] * MAX_INTERVALS
        self._waiting = [0.0] * MAX_INTERVALS
        self._kv_blocks = [0.0] * MAX_INTERVALS

    def add(self, begin_s: float, end_s: float, running: int, waiting: float, kv_blocks: int) -> None:
        """One step, or several that are one event, of one worker. Times from the start of the run.

        It is asked for each of them, and nearly all lie within one interval.
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
        """Up to `end_s`, for so many workers with so many blocks each; the last interval may be a short one."""
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
