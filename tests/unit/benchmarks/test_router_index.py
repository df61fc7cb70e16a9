"""The benchmark of the index: one history for all, the same answers, and rows that are missing are said to be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from benchmarks.harness import BrokenRun
from benchmarks.router import index as benchmark
from benchmarks.router.index import Row, run_side
from benchmarks.router.sides import (
    DYNAMO,
    KVOLT,
    KVOLT_EVENTS,
    KVOLT_JSON,
    KVOLT_PYTHON,
    SYSTEMS,
    find,
    ingest,
    memory,
)
from benchmarks.router.workload import Shape, history, prompts

from kvolt.router.index import prefix_index as index

SHAPE = Shape(num_workers=6, num_blocks=64, num_sessions=20)
OURS = [KVOLT_PYTHON, *((KVOLT, KVOLT_EVENTS, KVOLT_JSON) if index.IS_NATIVE else ())]


@pytest.fixture(autouse=True)
def _collector_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gc.disable", lambda: None)


def test_a_history_stores_parents_first_and_removes_leaves_first() -> None:
    held: dict[int, list[int]] = {worker: [] for worker in range(SHAPE.num_workers)}
    for change in history(SHAPE):
        mine = held[change.worker]
        if change.local is None:
            assert mine[-len(change.sequence) :] == change.sequence[::-1]
            del mine[-len(change.sequence) :]
        else:
            assert change.parent is None or change.parent in mine
            assert not set(mine) & set(change.sequence)
            mine.extend(change.sequence)
    assert all(held.values())


def test_prompts_are_of_one_length_and_some_are_known() -> None:
    asked = prompts(SHAPE, 20)
    assert {len(names) for prompt in asked for names in prompt} == {64}
    known = {name for change in history(SHAPE) for name in change.sequence}
    assert {sum(name in known for name in prompt.sequence) for prompt in asked} == {24, 48, 64}


def test_every_form_of_ours_gives_the_same_answers() -> None:
    answers = {find(SYSTEMS[system](6), SHAPE, 20)["answers"] for system in OURS}
    assert len(answers) == 1
    shared = SHAPE._replace(is_shared=True, num_sessions=2)
    assert len({find(SYSTEMS[system](6), shared, 20)["answers"] for system in OURS}) == 1


def test_figures_of_a_side() -> None:
    made = SYSTEMS[KVOLT_PYTHON](6)
    assert ingest(made, SHAPE)["num_blocks"] == sum(len(change.sequence) for change in history(SHAPE))
    figures = memory(SYSTEMS[KVOLT_PYTHON](6), SHAPE)
    assert figures["num_pairs"] == made.index.num_pairs
    assert figures["said_per_pair"] > 0


def test_a_side_that_does_not_start_says_why() -> None:
    job = {"system": DYNAMO, "work": "find", "shape": tuple(SHAPE), "num_finds": 1}
    with pytest.raises(BrokenRun, match="dynamo"):
        run_side(sys.executable, job)
    with pytest.raises(BrokenRun, match="not installed"):
        run_side("", job)


def row(system: str, work: str, number: int = 0, **figures: Any) -> Row:
    return Row(number, system, work, tuple(SHAPE), figures)


def test_goals_are_held_against_ratios_within_a_round() -> None:
    rows = [
        *(row(KVOLT_EVENTS, "ingest", number, blocks_per_s=8e6 * (number + 1)) for number in range(2)),
        *(row(DYNAMO, "ingest", number, blocks_per_s=2e6 * (number + 1)) for number in range(2)),
        row(KVOLT, "find", p50_us=4.0, p99_us=1500.0, answers="a"),
        row(DYNAMO, "find", p50_us=20.0, p99_us=60.0, answers="b"),
        row(KVOLT, "memory", num_pairs=10**7, resident_per_pair=30.0, said_per_pair=28.0),
    ]
    text = benchmark.text(rows)
    assert "4.00 (4.00..4.00)" in text
    assert "goal met     3 times the peer's ingest rate (kvolt, its events)" in text
    assert "goal met     a third of the peer's find latency" in text
    assert "goal missed  p99 of every find under 1 ms" in text
    assert "0 of 1 cases" in text
    assert "goal met     under 100 bytes a pair: 30.0" in text
    assert "9 to 13 M" in text


def test_a_missing_peer_is_a_missing_row() -> None:
    rows = [
        row(KVOLT, "find", p50_us=4.0, p99_us=9.0, answers="a"),
        Row(0, DYNAMO, "find", tuple(SHAPE), {}, "it is not installed"),
    ]
    text = benchmark.text(rows)
    assert f"missing: {DYNAMO}: it is not installed" in text
    assert "third" not in text
