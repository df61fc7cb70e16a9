"""Schedules of open-loop runs: iterators of non-decreasing start times in seconds. Pure.

A closed loop has no schedule: a request is due when the user's previous one has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

Draw = Callable[[], float]
"""Draws from a seeded uniform distribution over [0, 1)."""


def constant(rate: float) -> Iterator[float]:
    """One request every 1/rate seconds, infinite."""
    _check_positive(rate, "rate")
    return (number / rate for number in count())


def poisson(rate: float, draw: Draw) -> Iterator[float]:
    """Poisson arrivals: exponential gaps with mean 1/rate seconds, infinite."""
    _check_positive(rate, "rate")
    return _poisson(rate, draw)


def bursts(rate: float, size: int) -> Iterator[float]:
    """Bursts of `size` requests with mean rate `rate`, infinite."""
    _check_positive(rate, "rate")
    if size < 1:
        raise ConfigError(f"--burst is {size}", key="burst", remedy="give 1 or more")
    every_s = size / rate
    return (number // size * every_s for number in count())


def from_trace(records: Iterable[TraceRecord], speed: float = 1.0) -> Iterator[float]:
    """Arrival times of a trace relative to its first record, divided by `speed`.

    A record older than its predecessor is due at once.
    """
    _check_positive(speed, "speed")
    return _from_trace(records, speed)


def _poisson(rate: float, draw: Draw) -> Iterator[float]:
    at_s = 0.0
    while True:
        yield at_s
        at_s -= math.log(1.0 - draw()) / rate


def _from_trace(records: Iterable[TraceRecord], speed: float) -> Iterator[float]:
    first_ms: float | None = None
    at_s = 0.0
    for record in records:
        if first_ms is None:
            first_ms = record.timestamp
        at_s = max(at_s, (record.timestamp - first_ms) / 1000.0 / speed)
        yield at_s


def _check_positive(value: float, name: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"--{name} is {value:g}", key=name, remedy="must be above 0")
