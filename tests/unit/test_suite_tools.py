"""The tools that check the suite itself: random order, and processes that are stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.order import shuffled

ROOT = Path(__file__).resolve().parents[2]


def test_a_seed_determines_the_order() -> None:
    tests = [f"{module}::{number}" for module in "abcdef" for number in range(9)]
    modules = [name[0] for name in tests]
    first, again, other = (shuffled(tests, modules, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({tuple(each) for each in (tests, first, other)}) == 3
    assert sorted(first) == sorted(other) == tests
    changes = [at for at in range(1, len(first)) if first[at][0] != first[at - 1][0]]
    assert len(changes) == 5, "the tests of a module stay together"


def test_the_option_shuffles() -> None:
    this = "tests/unit/test_suite_tools.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--order-seed=2", this]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line]
    assert len(names) == 4
    assert names[0] != "test_a_seed_determines_the_order"


@pytest.mark.parametrize("code", [0, 3])
def test_children_are_stopped_and_the_exit_code_is_kept(code: int) -> None:
    """A child of the command sleeps in short steps, and sees the time that it was stopped."""
    child = (
        "import time\nlongest, before = 0.0, time.monotonic()\n"
        "for _ in range(60):\n"
        "    time.sleep(0.02)\n    now = time.monotonic()\n    longest, before = max(longest, now - before), now\n"
        "print(longest)"
    )
    command = f'"{sys.executable}" -c "$CHILD"; exit {code}'
    stops = [
        sys.executable,
        "-m",
        "tests.stops",
        "--seed",
        "1",
        "--mean-pause-s",
        "0.05",
        "--max-stop-s",
        "0.5",
    ]
    done = subprocess.run(
        [*stops, "--", "sh", "-c", command],
        cwd=ROOT,
        env={"CHILD": child, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    assert float(done.stdout) > 0.1
    assert f"exit={code}" in done.stderr
