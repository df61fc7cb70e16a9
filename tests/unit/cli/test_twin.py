"""`kvolt twin`: figures on one page, the same ones again, and clear words for what cannot be."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvolt.bench.load.report import decode_report
from kvolt.cli import twin
from kvolt.cli.main import main


def test_the_small_trace_on_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["twin", "--limit", "40", "--workers", "2", "--sla", "ttft=1s"]) == 0
    shown = capsys.readouterr().out
    for words in ("40 whole, 0 failed", "input from cache", "goodput", "time to first token", "whole answer"):
        assert words in shown


def test_as_json_it_is_a_report_and_always_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert main(["twin", "--limit", "20", "--json", "--preset", "h200-llama-8b"]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    report = decode_report(told[0].encode(), "twin")
    assert (report.model, report.counts.whole) == ("h200-llama-8b", 20)
    assert report.settings["limit"] == 20


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--workers", "0"], "needs a worker"),
        (["--speed", "0"], "above 0"),
        (["--preset", "h200-llama"], "h200-llama-8b"),
        (["--arg", "no_such=1"], "no_such"),
        (["--arg", "block_size=0"], "block_size"),
        (["--sla", "nonsense"], "sla"),
        (["/no/such/trace"], "/no/such/trace"),
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


def test_an_interrupt_ends_with_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = twin.run_twin

    def interrupted(settings: object, records: list[object], tally: object, on_sample: object) -> None:
        real(settings, records[:5], tally)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(twin, "run_twin", interrupted)
    assert main(["twin", "--json"]) == 130
    report = decode_report(capsys.readouterr().out.encode(), "twin")
    assert report.was_cut
    assert report.counts.whole == 5
