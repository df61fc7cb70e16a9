"""The benchmark of decisions: it decides and frees, goals are held against the tail, who is not there is said."""

from __future__ import annotations

import pytest
from benchmarks.router import decisions
from benchmarks.router.decision_side import Held, measured
from benchmarks.router.sides import DYNAMO
from benchmarks.router.workload import Shape

SHAPE = Shape(num_workers=6, num_blocks=64, num_sessions=20)


@pytest.fixture(autouse=True)
def _collector_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("disable", "freeze"):
        monkeypatch.setattr(f"gc.{name}", lambda: None)


@pytest.mark.parametrize("policy", decisions.POLICIES)
def test_decisions_are_measured(policy: str) -> None:
    figures = measured(policy, SHAPE, 10)
    assert 0 < figures["find_p50_us"] <= figures["choose_p50_us"] < figures["decision_p50_us"]
    assert figures["decision_p99_us"] >= figures["decision_p50_us"]


def test_the_index_of_the_benchmark_holds_the_history() -> None:
    held = Held(SHAPE)
    assert {held.slot_of(each) for each in held.ids} == set(range(6))


def row(system: str, number: int, p99_us: float = 90.0, error: str = "") -> decisions.Row:
    if system == DYNAMO:
        figures = {"p50_us": 160.0, "p99_us": 300.0}
    else:
        names = ("decision_p50_us", "choose_p50_us", "find_p50_us")
        figures = {**dict.fromkeys(names, 80.0), "decision_p99_us": p99_us}
    return decisions.Row(number, system, 256, 512, {} if error else figures, error)


def test_goals_and_ratios() -> None:
    systems = (*decisions.POLICIES, DYNAMO)
    text = decisions.report_text([row(system, number) for number in range(2) for system in systems])
    assert text.count("goal met") == 2
    assert "0.50 (0.50..0.50)" in text
    slow = decisions.report_text(
        [row("latency", 0, 130.0), row("classic", 0), row(DYNAMO, 0, error="no such file")]
    )
    assert "goal missed  latency, 256 workers, 512 blocks: p99 under 100 us: 130 (130..130)" in slow
    assert f"missing: {DYNAMO}: no such file" in slow
