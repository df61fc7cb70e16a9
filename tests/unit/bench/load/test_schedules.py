"""When requests are due: the statistics that were asked for, the same for the same seed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.bench.load.schedules import bursts, constant, from_trace, poisson
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


def taken(schedule: Iterator[float], number: int = 4000) -> list[float]:
    return list(islice(schedule, number))


def records(*times_ms: float) -> list[TraceRecord]:
    return [TraceRecord(timestamp=at, input_length=1, output_length=1) for at in times_ms]


def test_constant_gaps_do_not_drift() -> None:
    times = taken(constant(3.0), 3001)
    assert times[:4] == pytest.approx([0.0, 1 / 3, 2 / 3, 1.0])
    assert times[3000] == 1000.0


@given(st.floats(0.1, 1000.0), st.integers(0, 2**32))
def test_poisson_has_the_mean_and_the_spread_of_independent_users(rate: float, seed: int) -> None:
    times = taken(poisson(rate, random.Random(seed).random))
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0.0
    assert statistics.fmean(gaps) * rate == pytest.approx(1.0, rel=0.12)
    assert statistics.stdev(gaps) * rate == pytest.approx(1.0, rel=0.25)


def test_poisson_is_a_function_of_its_seed() -> None:
    first, again, other = (taken(poisson(5.0, random.Random(seed).random), 50) for seed in (7, 7, 8))
    assert first == again != other


def test_bursts_come_together_and_keep_the_rate() -> None:
    assert taken(bursts(10.0, 5), 11) == [0.0] * 5 + [0.5] * 5 + [1.0]


def test_a_trace_begins_at_once_and_never_goes_back() -> None:
    assert taken(from_trace(records(500, 1500, 1000, 2500), speed=2.0)) == [0.0, 0.5, 0.5, 1.0]
    assert taken(from_trace([])) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: constant(0.0),
        lambda: constant(float("nan")),
        lambda: poisson(-1.0, random.random),
        lambda: bursts(1.0, 0),
        lambda: from_trace([], speed=0.0),
    ],
)
def test_nonsense_is_refused_before_the_run(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        make()
