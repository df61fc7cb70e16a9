"""PointStats to choose clusters by, and the set that no other one beats."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.twin.test_inside import ONE, record, reported

from kvolt.core.errors import ConfigError
from kvolt.twin.objectives import (
    OBJECTIVES,
    PointStats,
    check_objectives,
    default_objectives,
    pareto,
    stats_of,
)


def test_figures_are_those_of_the_report() -> None:
    report = reported(ONE, [record(0), record(1000, tokens=300)], "ttft=200ms")
    stats = stats_of(report)
    assert list(stats) == list(OBJECTIVES)
    assert stats["good_share"] == 0.5
    assert stats["gpu_seconds"] == report.twin.gpu_seconds
    assert stats["good_per_gpu_second"] == pytest.approx(1 / report.twin.gpu_seconds, rel=1e-6)
    assert stats["ttft_p90"] == report.latencies["ttft"].p90
    assert (stats["gpus"], stats["failed"], stats["hit_rate"]) == (1, 0, 0.0)


def test_what_a_run_does_not_have_is_none() -> None:
    stats = stats_of(reported(ONE, [record(0, output=1)]))
    assert stats["itl_p50"] is None
    assert stats["goodput"] is stats["good_share"] is stats["good_per_gpu_second"] is None
    assert stats["ttft_p50"] is not None


def test_objectives_are_known_and_good_needs_limits() -> None:
    for has_sla in (True, False):
        check_objectives(default_objectives(has_sla), has_sla)
    check_objectives(list(OBJECTIVES), has_sla=True)
    with pytest.raises(ConfigError, match="unknown objective 'speed'"):
        check_objectives(["speed"], has_sla=True)
    with pytest.raises(ConfigError, match="goodput requires an SLA"):
        check_objectives(["gpu_seconds", "goodput"], has_sla=False)


def test_less_and_more_are_told_apart() -> None:
    points: list[PointStats] = [
        {"goodput": 10.0, "gpu_seconds": 5.0},
        {"goodput": 9.0, "gpu_seconds": 5.0},  # the first is better at the same cost
        {"goodput": 9.0, "gpu_seconds": 4.0},
        {"goodput": 9.0, "gpu_seconds": 4.0},  # as good as the one before
        {"goodput": None, "gpu_seconds": 1.0},
        {"gpu_seconds": 1.0},
    ]
    assert pareto(points, ["goodput", "gpu_seconds"]) == [0, 2, 3]
    assert pareto(points, ["gpu_seconds"]) == [4, 5]
    assert pareto([], ["gpu_seconds"]) == []


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=40))
def test_none_of_the_set_is_beaten_and_all_others_are(values: list[tuple[int, int, int]]) -> None:
    names = ("goodput", "ttft_p90", "gpu_seconds")
    points: list[PointStats] = [dict(zip(names, map(float, each), strict=True)) for each in values]
    costs = [(-good, ttft, gpu) for good, ttft, gpu in values]

    def is_beaten(cost: tuple[int, int, int]) -> bool:
        return any(other != cost and all(a <= b for a, b in zip(other, cost, strict=True)) for other in costs)

    assert pareto(points, names) == [place for place, cost in enumerate(costs) if not is_beaten(cost)]
