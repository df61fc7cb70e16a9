"""When requests are due in an open loop: iterators of seconds from the start, never decreasing.

Pure: chance comes in as a function that draws from [0, 1). What is asked at those times is the workload's matter.
A closed loop has no schedule: there a request is due when one before it has ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count

from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

Draw = Callable[[], float]
"""The next number of a seeded generator, uniform in [0, 1)."""


def constant(rate: float) -> Iterator[float]:
    """One request every 1/rate seconds, without end."""
    _check_positive(rate, "rate")
    return (number / rate for number in count())


def poisson(rate: float, draw: Draw) -> Iterator[float]:
    """Independent users: exponential gaps with a mean of 1/rate seconds, without end."""
    _check_positive(rate, "rate")
    return _poisson(rate, draw)


def bursts(rate: float, size: int) -> Iterator[float]:
    """`size` requests at once, so often that the mean rate is `rate`; without end."""
    _check_positive(rate, "rate")
    if size < 1:
        raise ConfigError(f"a burst of {size} requests is none", key="burst", remedy="give 1 or more")
    every_s = size / rate
    return (number // size * every_s for number in count())


def from_trace(records: Iterable[TraceRecord], speed: float = 1.0) -> Iterator[float]:
    """The trace's own times, from its first record on, `speed` times as fast; ends with the trace.

    A record that is older than the one before it is due at once: a schedule does not go back.
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
        raise ConfigError(f"--{name} is {value:g}", key=name, remedy="give a number above 0")
