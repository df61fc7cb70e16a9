"""`kvolt twin`: figures on one page, the same ones again, and clear words for what cannot be."""

from __future__ import annotations

import csv
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvolt.api import progress as progress_module
from kvolt.api.progress import progress
from kvolt.bench.load.report import decode_report
from kvolt.cli.main import main
from kvolt.cli.progress import ending
from kvolt.cli.twin import command as twin
from kvolt.twin.report import TwinReport


def test_the_small_trace_on_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--limit", "40", "--workers", "2", "--sla", "ttft=20ms"]) == 0
    shown = capsys.readouterr().out
    for words in (
        "40 complete, 0 failed",
        "goodput",
        "time to first token",
        "whole answer",
        "2, 1 GPU each, latency",
        "GPU-seconds",
        "hit rate, device",
        "workers busy",
        "missed the SLA:",
        "long prefill of its own prompt",
    ):
        assert words in shown


def test_as_json_it_is_a_report_and_always_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert main(["twin", "--limit", "20", "--json", "--preset", "h200-llama-8b", "--gpus", "2"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    report = decode_report(told[0].encode(), "twin")
    assert (report.model, report.counts.complete) == ("h200-llama-8b", 20)
    assert report.settings["limit"] == 20
    whole = msgspec.json.decode(told[0], type=TwinReport)
    assert whole.twin.gpus_per_worker == 2
    assert whole.twin.gpu_seconds > 0


def test_the_router_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    told = {}
    for router in ("round-robin", "least-loaded"):
        flags = ["--limit", "60", "--speed", "20", "--workers", "3", "--router", router, "--json"]
        assert main(["twin", *flags]) == 0
        told[router] = msgspec.json.decode(capsys.readouterr().out, type=TwinReport)
        assert told[router].twin.router == router
    assert told["round-robin"].latencies != told["least-loaded"].latencies


def test_the_trace_is_replayed_at_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--rate", "20", "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=TwinReport)
    assert report.throughput.offered_requests_per_s == pytest.approx(20)
    assert (report.settings["rate"], report.settings["speed"]) == (20, None)


def test_ones_own_policy_in_the_twin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    told = []
    for text in ("workers.queue_s + workers.prefill_s", "-workers.requests"):
        path.write_text(f"def cost(request, workers):\n    return {text}\n")
        given = [
            "--router",
            f"{path}:cost",
            "--router-arg",
            "queue=false",
            "--workers",
            "3",
            "--limit",
            "60",
            "--speed",
            "20",
        ]
        assert main(["twin", *given, "--json"]) == 0
        told.append(msgspec.json.decode(capsys.readouterr().out, type=TwinReport))
    assert told[0].twin.router == f"{path}:cost"
    assert told[0].settings["router arguments"] == "queue=false"
    assert told[0].latencies != told[1].latencies, "an edit is another policy"


def test_a_folder_gets_report_page_and_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["twin", "--limit", "15", "--out", str(folder)]) == 0
    assert "written to" in capsys.readouterr().out
    report = msgspec.json.decode((folder / "report.json").read_bytes(), type=TwinReport)
    assert report.counts.complete == 15
    with (folder / "requests.csv").open(encoding="utf-8") as file:
        assert len(list(csv.DictReader(file))) == 15
    assert "<h2>Cluster</h2>" in (folder / "report.html").read_text(encoding="utf-8")
    assert main(["twin", "--limit", "5", "--out", str(folder)]) == 2
    assert "already contains a report" in capsys.readouterr().err
    assert main(["twin", "--limit", "5", "--out", str(folder), "--force"]) == 0


def test_a_folder_that_is_lost_meanwhile_costs_no_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    real = twin.twin_page

    def page(report: TwinReport) -> str:
        (folder / "report.json").mkdir()  # so that it cannot be written
        return real(report)

    monkeypatch.setattr(twin, "twin_page", page)
    assert main(["twin", "--limit", "5", "--out", str(folder)]) == 2
    told = capsys.readouterr()
    assert "cannot write to" in told.err
    assert "5 complete" in told.out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "0"], "--workers is below 1"),
        (["--gpus", "0"], "--gpus is below 1"),
        (["--router", "nobody"], "least-loaded"),
        (["--router", "nowhere.py:cost"], "nowhere.py:cost cannot be used"),
        (["--router-arg", "temprature=1"], "temprature"),
        (["--router-arg", "temperature=-1"], "temperature"),
        (["--router-arg", "temperature"], "--router-arg"),
        (["--speed", "0"], "above 0"),
        (["--rate", "-1"], "--rate is not above 0"),
        (["--rate", "1e308"], "too far from the rate of the trace"),
        (["--rate", "1e-320"], "too far from the rate of the trace"),
        (["--rate", "5", "--limit", "1"], "the trace has no rate"),
        (["--preset", "h200-llama"], "h200-llama-8b"),
        (["--arg", "no_such=1"], "no_such"),
        (["--arg", "block_size=0"], "block_size"),
        (["--sla", "nonsense"], "sla"),
        (["/no/such/trace"], "/no/such/trace"),
        (["--out", "/proc/none/here"], "cannot write to"),
    ],
)
def test_what_cannot_be_is_told(given: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", *given]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_broken_line_is_told_with_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    line = msgspec.json.encode({"timestamp": 0, "input_length": 5, "output_length": 2}).decode()
    trace.write_text(f"{line}\n{line}\n{{broken\n")
    assert main(["twin", str(trace)]) == 2
    told = capsys.readouterr().err
    assert "trace.jsonl" in told
    assert "3" in told


def interrupting(after: int, number: signal.Signals, times: int = 1) -> Callable[..., object]:
    """In the place of the bar: a Ctrl-C when so many requests are over."""

    @contextmanager
    def shown(what: str, total: int, quiet: bool) -> Iterator[Callable[[], None]]:
        seen: list[int] = []

        def step() -> None:
            seen.append(1)
            if len(seen) == after:
                for _ in range(times):
                    signal.raise_signal(number)

        yield step

    return shown


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_with_a_report(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(twin, "progress", interrupting(5, number))
    before = signal.getsignal(number)
    assert main(["twin", "--json", "--speed", "20", "--out", str(tmp_path / "run")]) == 130
    assert signal.getsignal(number) is before
    report = decode_report(capsys.readouterr().out.encode(), "twin")
    assert report.is_interrupted
    assert 5 <= report.counts.complete < 100
    assert report.counts.interrupted > 0
    assert (tmp_path / "run" / "report.html").exists()
    assert "(interrupted)" not in report.model


def test_a_second_interrupt_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "progress", interrupting(5, signal.SIGINT, times=2))
    assert main(["twin", "--speed", "20"]) == 130


def test_the_end_is_asked_for_once() -> None:
    called: list[int] = []
    with ending(lambda: called.append(1)):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert called == [1]


def test_lines_now_and_then_for_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_module, "LINE_S", 0.0)
    with progress("things", 3, quiet=False, done=1) as step:
        step()
        step()
    assert capsys.readouterr().err == "2 of 3 things\n3 of 3 things\n"


def test_a_bar_for_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for is_terminal, quiet in ((False, False), (True, True), (True, False)):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal, raising=False)
        with progress("things", 3, quiet) as step:
            step()
        assert bool(capsys.readouterr().err) == (is_terminal and not quiet)
