"""`kvolt twin sweep`: the set that none beats, what was done stays done, and clear words before anything runs."""

from __future__ import annotations

import csv
import signal
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvolt.cli.main import main
from kvolt.cli.twin import sweep as twin_sweep
from kvolt.twin.axes import PointSetup
from kvolt.twin.sweep_report import SweepReport
from kvolt.twin.sweep_runner import Common, PointOutcome, solve

FLAGS = ["--limit", "30", "--speed", "20", "--sla", "ttft=100ms", "--axis", "workers=1,2"]


class Here:
    """In the place of the processes: each point here, as many as it may, then the end that it is told."""

    def __init__(self, most: int = 1000, end: BaseException | None = None) -> None:
        self.num_run = 0
        self._most = most
        self._end = end

    def __call__(
        self, common: Common, setups: Sequence[PointSetup], num_processes: int
    ) -> Generator[PointOutcome, None, None]:
        for place in reversed(range(len(setups))):  # in no certain order
            if self.num_run == self._most:
                assert self._end is not None
                raise self._end
            self.num_run += 1
            yield PointOutcome(place, solve(common, setups[place]))


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Here:
    found = Here()
    monkeypatch.setattr(twin_sweep, "run_points", found)
    return found


def sweep(*flags: str) -> int:
    return main(["twin", "sweep", *FLAGS, *flags])


def report_of(folder: Path) -> SweepReport:
    return msgspec.json.decode((folder / "sweep.json").read_bytes(), type=SweepReport)


def test_in_processes_with_all_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    assert sweep("--axis", "router=round-robin,least-loaded", "--out", str(folder), "--processes", "2") == 0
    shown = capsys.readouterr().out
    assert "4 of 4 clusters; Pareto set for good_share, gpu_seconds" in shown
    report = report_of(folder)
    assert [point.point for point in report.points] == [
        {"workers": workers, "router": router}
        for workers in (1, 2)
        for router in ("round-robin", "least-loaded")
    ]
    assert set(report.pareto) <= {point.digest for point in report.points}
    with (folder / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["digest"] for row in rows] == [point.digest for point in report.points]
    assert {row["digest"] for row in rows if row["pareto"] == "1"} == set(report.pareto)
    page = (folder / "sweep.html").read_text(encoding="utf-8")
    assert "good_share over gpu_seconds" in page
    assert page.count("<svg") == 1
    assert len((folder / "points.jsonl").read_bytes().splitlines()) == 4


def test_what_was_done_is_not_done_again(
    tmp_path: Path, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "sweep")
    assert sweep("--out", folder) == 0
    first = report_of(tmp_path / "sweep")
    assert here.num_run == 2
    assert sweep("--out", folder) == 0
    assert here.num_run == 2
    assert report_of(tmp_path / "sweep") == first
    assert sweep("--axis", "gpus=1,2", "--out", folder) == 0  # a new axis, of which one value was the base
    assert here.num_run == 4
    assert all("gpus" in point.point for point in report_of(tmp_path / "sweep").points)
    assert sweep("--seed", "1", "--out", folder) == 0
    assert here.num_run == 6


def test_cut_and_torn_it_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    whole = ["--axis", "kv_blocks=2000,3000", "--out", str(folder)]
    cut = Here(3, KeyboardInterrupt())
    monkeypatch.setattr(twin_sweep, "run_points", cut)
    assert sweep(*whole) == 130
    assert "3 of 4 clusters" in capsys.readouterr().out
    assert len(report_of(folder).points) == 3
    assert "1 points were not run" in (folder / "sweep.html").read_text(encoding="utf-8")
    lines = folder / "points.jsonl"
    lines.write_bytes(lines.read_bytes()[:-20])  # the last one was not written to its end
    rest = Here()
    monkeypatch.setattr(twin_sweep, "run_points", rest)
    assert sweep(*whole) == 0
    assert rest.num_run == 2
    assert len(report_of(folder).points) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cuts_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def cut(common: Common, setups: Sequence[PointSetup], num: int) -> Generator[PointOutcome, None, None]:
        yield PointOutcome(1, solve(common, setups[1]))
        signal.raise_signal(number)
        yield PointOutcome(0, solve(common, setups[0]))

    monkeypatch.setattr(twin_sweep, "run_points", cut)
    assert sweep() == 130
    assert "1 of 2 clusters" in capsys.readouterr().out


def test_without_a_folder_it_only_shows(here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--json", "--objective", "ttft_p90", "--objective", "gpus") == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=SweepReport)
    assert report.objectives == ["ttft_p90", "gpus"]
    assert (len(report.points), report.sla) == (2, {"ttft": 0.1})


def test_axes_from_a_file_and_some_by_chance(
    tmp_path: Path, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "axes.json"
    file.write_text(
        '{"kv_blocks": [1000, 2000, 3000, 1000], "latency": [{"base_s": 0.01}, {"base_s": 0.02}]}'
    )
    assert sweep("--axes", str(file), "--sample", "5", "--json") == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=SweepReport)
    assert report.axes["kv_blocks"] == [1000, 2000, 3000]  # once each
    assert len(report.points) == here.num_run == 5
    assert report.points[0].point["latency"] in ({"base_s": 0.01}, {"base_s": 0.02})


def test_a_point_that_fails_is_told_and_the_others_count(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(
        common: Common, setups: Sequence[PointSetup], num: int
    ) -> Generator[PointOutcome, None, None]:
        yield PointOutcome(0, error="ValueError: too bad")
        yield PointOutcome(1, solve(common, setups[1]))

    monkeypatch.setattr(twin_sweep, "run_points", failing)
    assert sweep() == 1
    told = capsys.readouterr()
    assert "workers=1: ValueError: too bad" in told.err
    assert "1 of 2 clusters" in told.out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--axis", "worker=1"], "did you mean 'workers'"),
        (["--axis", "workers=0,1"], "invalid value workers=0"),
        (["--axis", "block_size=big"], "block_size"),
        (["--axis", "router=best"], "known: latency, classic"),
        (["--axis", "kv_blocks="], "kv_blocks"),
        (["--axes", "/no/such/file"], "cannot read /no/such/file"),
        (["--objective", "speed"], "known: goodput"),
        (["--processes", "0"], "--processes is 0"),
        (["--sample", "-1"], "--sample is -1"),
        (["--out", "/proc/none/here"], "cannot write to"),
        (["/no/such/trace"], "/no/such/trace"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(
    given: list[str], words: str, here: Here, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(*given) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1
    assert here.num_run == 0


def test_more_that_cannot_be(tmp_path: Path, here: Here, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "sweep"]) == 2
    assert "at least one axis" in capsys.readouterr().err
    assert main(["twin", "sweep", "--axis", "workers=1", "--objective", "goodput"]) == 2
    assert "requires an SLA" in capsys.readouterr().err
    file = tmp_path / "axes.json"
    file.write_text("[1]")
    assert sweep("--axes", str(file)) == 2
    assert "invalid axes" in capsys.readouterr().err
    folder = tmp_path / "sweep"
    folder.mkdir()
    (folder / "points.jsonl").write_text("nonsense\n")
    assert sweep("--out", str(folder)) == 2
    assert "line 1" in capsys.readouterr().err
    assert here.num_run == 0


def test_a_folder_that_is_lost_meanwhile_is_told(
    tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"

    def text(report: Any) -> str:
        (folder / "sweep.csv").mkdir()
        return ""

    monkeypatch.setattr(twin_sweep, "csv_text", text)
    assert sweep("--out", str(folder)) == 2
    assert "cannot write to" in capsys.readouterr().err
    assert len((folder / "points.jsonl").read_bytes().splitlines()) == 2


def test_help_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "sweep", "--help"]) == 0
    assert "--axis" in capsys.readouterr().out
    assert main(["twin", "--help"]) == 0
    assert "--axis NAME" not in capsys.readouterr().out
