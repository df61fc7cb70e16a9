"""Two runs beside each other: a difference is found where there is one, and only there."""

from __future__ import annotations

import random

import msgspec
import pytest
from tests.unit.bench.load.test_report import FACTS, reported, sample

from kvolt.bench.load.compare import Change, compare, differing_settings
from kvolt.bench.load.report import BenchReport
from kvolt.bench.load.report_text import change_rows
from kvolt.bench.load.sla import Sla


def run(seed: int, mean_s: float, number: int = 400) -> BenchReport:
    draw = random.Random(seed)
    return reported(
        [sample(each, ttft_s=draw.expovariate(1 / mean_s)) for each in range(number)], Sla({"ttft": 0.2})
    )


def by_figure(changes: list[Change]) -> dict[str, Change]:
    return {change.figure: change for change in changes}


def test_a_run_twice_as_slow_is_worse() -> None:
    found = by_figure(compare(run(1, 0.1), run(2, 0.2)))
    change = found["ttft mean"]
    assert change.change == pytest.approx(1.0, abs=0.3)
    assert change.low is not None
    assert change.high is not None
    assert change.low < 1.0 < change.high
    assert change.high - change.low < 0.8
    assert found["ttft p50"].verdict == "worse"
    assert by_figure(compare(run(2, 0.2), run(1, 0.1)))["ttft p90"].verdict == "better"


def test_chance_alone_is_mostly_recognised_as_chance() -> None:
    verdicts = [
        by_figure(compare(run(seed, 0.1, 200), run(seed + 1000, 0.1, 200), num_draws=200))[
            "ttft mean"
        ].verdict
        for seed in range(30)
    ]
    assert verdicts.count("no significant difference") >= 25


def test_what_does_not_vary_is_no_difference() -> None:
    found = by_figure(compare(run(1, 0.1), run(1, 0.1)))
    assert found["tpot mean"].change == 0.0
    assert found["requests/s"].change == 0.0
    assert found["ttft p99"].verdict == "no significant difference"


def test_the_seed_decides() -> None:
    first, second = run(1, 0.1), run(2, 0.1)
    assert compare(first, second, seed=3) == compare(first, second, seed=3)
    assert compare(first, second, seed=3) != compare(first, second, seed=4)


def test_single_numbers_have_no_interval() -> None:
    found = by_figure(compare(run(1, 0.1), run(2, 0.1)))
    assert found["good requests/s"].low is None
    assert found["good requests/s"].verdict == ""
    assert found["failed requests"].change == 0.0


def test_too_few_answers_are_not_judged() -> None:
    few = reported([sample(number) for number in range(3)])
    assert [change.figure for change in compare(few, few)] == [
        "requests/s",
        "output tokens/s",
        "failed requests",
    ]


def test_a_failure_where_there_was_none_has_no_ratio() -> None:
    failing = reported([sample(0, error="hang_up")])
    change = by_figure(compare(reported([sample(0)]), failing))["failed requests"]
    assert (change.first, change.second, change.change) == (0.0, 1.0, None)
    assert change_rows([change])[1] == ["failed requests", "0", "1", "-", "", ""]


def test_settings_that_differ_are_named() -> None:
    first = run(1, 0.1, 5)
    facts = msgspec.structs.replace(FACTS, settings={"rate": 3.0, "turns": 2}, model="other")
    second = reported([sample(0)], facts=facts)
    assert differing_settings(first, second) == {
        "rate": (2.0, 3.0),
        "turns": (None, 2),
        "model": ("<m>", "other"),
    }
