"""Points in processes of their own: the same figures as here, and none lost or left however it ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.twin.test_inside import ENGINE, ONE, record

from kvolt.bench.load.sla import parse_sla
from kvolt.twin.axes import PointSetup
from kvolt.twin.sweep_runner import Common, PointOutcome, _run_assigned, run_points, solve

COMMON = Common([record(at * 50, output=20) for at in range(20)], parse_sla("ttft=300ms"))
SETUPS = [
    PointSetup(settings=replace(ONE, num_workers=number), arrivals=speed)
    for number in (1, 2)
    for speed in (1, 8)
]


def test_processes_find_what_is_found_here() -> None:
    outcomes = sorted(run_points(COMMON, SETUPS, 2), key=lambda outcome: outcome.place)
    assert [outcome.place for outcome in outcomes] == [0, 1, 2, 3]
    assert [outcome.stats for outcome in outcomes] == [solve(COMMON, setup) for setup in SETUPS]
    assert len({str(outcome.stats) for outcome in outcomes}) == 4
    assert multiprocessing.active_children() == []


def test_a_point_that_fails_and_one_whose_process_dies_do_not_end_the_others(tmp_path: Path) -> None:
    preset = tmp_path / "preset.json"
    preset.write_text('{"name": "mine", "latency": {"base_s": 0.1}}')
    bad = PointSetup(settings=replace(ONE, engine=replace(ENGINE, latency=None, preset=str(preset))))
    preset.unlink()  # and so no process can read it
    outcomes: list[PointOutcome] = []
    for outcome in run_points(COMMON, [SETUPS[0], bad, *SETUPS], 1):
        outcomes.append(outcome)
        if len(outcomes) == 2:
            [child] = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGKILL)
            child.join()  # before it is given the third point
    by_place = {outcome.place: outcome for outcome in outcomes}
    assert sorted(by_place) == list(range(6))
    assert str(preset) in by_place[1].error
    dead = [outcome for outcome in outcomes if "exited with" in outcome.error]
    assert len(dead) == 1
    assert all(outcome.stats for outcome in outcomes if not outcome.error)
    assert multiprocessing.active_children() == []


def test_a_process_that_dies_at_work_is_told() -> None:
    slow = PointSetup(settings=replace(ONE, num_workers=300))
    outcomes: list[PointOutcome] = []
    for outcome in run_points(COMMON, [SETUPS[0], slow], 2):
        outcomes.append(outcome)
        for child in multiprocessing.active_children() if len(outcomes) == 1 else ():
            child.kill()
    assert [outcome.place for outcome in outcomes] == [0, 1]
    assert outcomes[0].stats
    assert outcomes[1].error == "the process exited with code -9 (out of memory?)"


def test_left_early_nothing_goes_on() -> None:
    outcomes = run_points(COMMON, SETUPS * 3, 2)
    next(outcomes)
    children = multiprocessing.active_children()
    assert len(children) == 2
    outcomes.close()
    assert multiprocessing.active_children() == []
    assert all(child.exitcode is not None for child in children)


class Script:
    """A connection with what a parent says on it, and then no more."""

    def __init__(self, *jobs: tuple[int, PointSetup]) -> None:
        self._jobs = [(place, msgspec.msgpack.encode(setup)) for place, setup in jobs]
        self.sent: list[PointOutcome] = []

    def recv(self) -> tuple[int, bytes]:
        if not self._jobs:
            raise EOFError
        return self._jobs.pop(0)

    def send(self, outcome: PointOutcome) -> None:
        self.sent.append(outcome)


def test_what_runs_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    script = Script((3, SETUPS[0]), (4, replace(SETUPS[0], arrivals=-1.0)), (5, SETUPS[1]))
    _run_assigned(script, msgspec.msgpack.encode(COMMON))  # type: ignore[arg-type]
    assert [outcome.place for outcome in script.sent] == [3, 4, 5]
    assert [bool(outcome.error) for outcome in script.sent] == [False, True, False]
    assert script.sent[0].stats == solve(COMMON, SETUPS[0])
