"""A sample of seeds of the virtual cluster; `make seeds` runs a thousand."""

from __future__ import annotations

import logging
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvolt.core.ids import RequestId
from kvolt.runtime.endpoint.server import OWN_ENDPOINTS
from kvolt.runtime.plane import served_stream as backlog
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session
from kvolt.scheduler.scheduler import Scheduler
from kvolt.testing.cluster import faults
from kvolt.testing.cluster.cluster import Violation
from kvolt.worker.open_requests import OpenRequests

SAMPLE = range(8)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvolt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_a_sample_of_seeds_holds_in_two_processes_with_equal_logs(capsys: pytest.CaptureFixture[str]) -> None:
    assert faults.compare(SAMPLE) == 0, capsys.readouterr().err


def test_a_seed_gives_work_and_trouble() -> None:
    """The suite would be worthless if nothing were asked, or nothing ever went wrong."""
    reports = [faults.run_seed(seed) for seed in range(2)]
    assert sum(report.ok for report in reports) > 200
    assert sum(sum(report.failed.values()) for report in reports) > 10
    assert any("crashes" in line for report in reports for line in report.log)


def test_lost_tokens_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in merging (the later tokens only) must show as a violation, with the seed in its text."""
    monkeypatch.setattr(backlog, "merge_deltas", lambda deltas: deltas[-1])
    with pytest.raises(Violation, match=r"seed \d+ at"):
        for seed in range(8):
            faults.run_seed(seed)


def keep_served_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    encode_ends = Session._encode_ends

    def keep(self: Session, out: list[bytes]) -> None:
        before = dict(self._served)
        encode_ends(self, out)
        self._served.update(before)

    monkeypatch.setattr(Session, "_encode_ends", keep)


def keep_cancelled_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cancel = Session._on_cancel

    def keep(self: Session, stream_id: int) -> None:
        stream = self._served.get(stream_id)
        on_cancel(self, stream_id)
        if stream is not None:
            self._served[stream_id] = stream

    monkeypatch.setattr(Session, "_on_cancel", keep)


def keep_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    cancel_call = Session.cancel_call

    def keep(self: Session, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        cancel_call(self, stream_id)
        if call is not None:
            self._calls[stream_id] = call

    monkeypatch.setattr(Session, "cancel_call", keep)


def keep_counting_cancelled_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = ServedStream.abort

    def keep(self: ServedStream, error: Any) -> None:
        if not self.target.startswith(OWN_ENDPOINTS):
            self.on_closed = None
        abort(self, error)

    monkeypatch.setattr(ServedStream, "abort", keep)


def keep_requests_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenRequests, "close", lambda self, request_id, outcome: self.get(request_id))


def keep_blocks_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    abort = Scheduler.abort

    def keep(self: Scheduler, request_id: RequestId) -> bool:
        for sequence in self.planner.running:
            if sequence.request.request_id == request_id:
                self.pool.retain(sequence.blocks)
        return abort(self, request_id)

    monkeypatch.setattr(Scheduler, "abort", keep)


@pytest.mark.parametrize(
    ("break_it", "found"),
    [
        (keep_served_streams, "served streams on its connections"),
        (keep_cancelled_streams, "served streams on its connections"),
        (keep_calls, "calls open"),
        (keep_counting_cancelled_streams, "streams at its endpoints"),
        (keep_requests_in_the_worker, "requests open in its worker"),
        (keep_blocks_in_the_engine, "blocks used in its engine|no response within"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_left_of_a_request_is_noticed(
    break_it: Any, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(Violation, match=f"(still has .*)?({found})"):
        for seed in range(2):
            faults.run_seed(seed)


def test_a_run_that_dies_is_bad(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/true")
    assert faults.compare(range(2)) == 1
    assert "1 FAILED the process died" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes in /proc")
def test_a_terminal_shows_progress_and_an_interrupt_ends_both_runs() -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "kvolt.testing.cluster.faults", "--seeds", "100000"]
    with open(ours, "rb", buffering=0) as terminal, subprocess.Popen(command, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"\r1/100000 seeds, 0 bad" not in shown:
            shown += terminal.read(100)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
        shown += terminal.read(100_000)
    assert len(children) == 2
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
    assert b"Traceback" not in shown


def test_different_seeds_differ() -> None:
    assert faults.log_digest(faults.run_seed(1, 20.0)) != faults.log_digest(faults.run_seed(2, 20.0))
