"""Turns among processes: one at a time for each name, and never a wait without end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvolt.runtime.host.turns import turn

HOLD = """
import sys
from pathlib import Path
from kvolt.runtime.host.turns import turn
with turn(sys.argv[2:], Path(sys.argv[1]), 0.0, lambda: 0.0, lambda seconds: None):
    print("held", flush=True)
    sys.stdin.readline()
"""


class FakeTime:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.on_sleep = lambda: None

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


def hold_elsewhere(folder: Path, *names: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_waits_until_the_first_is_done(tmp_path: Path) -> None:
    first, time = hold_elsewhere(tmp_path / "turns", "core-0", "core-1"), FakeTime()

    def release_after_a_second() -> None:
        if time.now_s > 1.0:
            first.communicate("\n", timeout=30)
            time.on_sleep = lambda: None

    time.on_sleep = release_after_a_second
    with turn(["core-1", "core-2"], tmp_path / "turns", 30.0, time.now, time.sleep):
        assert 1.0 < time.now_s < 2.0


def test_a_process_that_was_killed_holds_no_turn(tmp_path: Path) -> None:
    first, time = hold_elsewhere(tmp_path / "turns", "core-0"), FakeTime()
    first.kill()
    first.communicate(timeout=30)
    with turn(["core-0"], tmp_path / "turns", 30.0, time.now, time.sleep):
        assert time.now_s == 0.0


def test_other_cores_are_not_waited_for(tmp_path: Path) -> None:
    time = FakeTime()
    with (
        turn(["core-0"], tmp_path / "turns", 30.0, time.now, time.sleep),
        turn(["core-1"], tmp_path / "turns", 30.0, time.now, time.sleep),
    ):
        assert time.now_s == 0.0


def test_the_wait_is_bounded_and_the_caller_goes_ahead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    time = FakeTime()
    with turn(["a"], tmp_path, 30.0, time.now, time.sleep):
        with turn(["a"], tmp_path, 3.0, time.now, time.sleep):
            assert 3.0 <= time.now_s < 3.2
        assert "a is in use after 3 s" in caplog.text


def test_a_folder_that_cannot_be_made_is_no_reason_to_fail(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = False
    with turn(["a"], tmp_path / "file" / "turns", 3.0, lambda: 0.0, lambda seconds: None):
        ran = True
    assert ran


def test_an_error_inside_releases_the_turn(tmp_path: Path) -> None:
    time = FakeTime()
    with pytest.raises(ZeroDivisionError), turn(["a"], tmp_path, 3.0, time.now, time.sleep):
        raise ZeroDivisionError
    with turn(["a"], tmp_path, 3.0, time.now, time.sleep):
        assert time.now_s == 0.0
