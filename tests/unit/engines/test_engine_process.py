"""An engine's process, as who has started it sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
import uvloop

from kvolt.engines.engine_process import EngineProcess

TALKS = """
import os, sys
print("argument", sys.argv[1:])
os.write(int(sys.argv[1]), b"inherited")
print("one\\rtwo", file=sys.stderr)
print()
sys.exit(3)
"""
HAS_A_CHILD = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module `child_for_test` of what is written there."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path / "child_for_test.py"


async def _started(**options: bool) -> EngineProcess:
    return await EngineProcess.start_module("child_for_test", (), name="child", **options)


async def _first_line(child: EngineProcess) -> str:
    async with asyncio.timeout(20):
        while not child.last_lines:
            await asyncio.sleep(0.01)
    return child.last_lines[0]


async def test_what_it_wrote_is_there_at_its_end(module: Path, caplog: pytest.LogCaptureFixture) -> None:
    module.write_text(TALKS)
    reads, writes = os.pipe()
    with caplog.at_level(logging.INFO, "kvolt.engines.engine_process"), os.fdopen(reads, "rb") as end:
        with os.fdopen(writes, "wb"):
            child = await EngineProcess.start_module("child_for_test", [writes], name="engine")
        assert await child.wait_exit() == "exited with code 3"
        assert end.read() == b"inherited"
    assert child.exit_code == 3
    assert child.last_lines == (f"argument ['{writes}']", "two"), "as a terminal shows it"
    assert [each.getMessage() for each in caplog.records] == [
        f"engine: argument ['{writes}']",
        "engine: two",
    ]
    child.kill()


async def test_a_killed_process_is_reported_with_its_signal(module: Path) -> None:
    module.write_text(HAS_A_CHILD)
    child = await _started()
    grandchild = int(await _first_line(child))
    assert child.exit_code is None
    child.kill()
    child.kill()
    assert await child.wait_exit() == "was killed by SIGKILL"
    assert psutil.pid_exists(grandchild), "it leads no group"
    os.kill(grandchild, signal.SIGKILL)


async def test_a_signal_does_not_take_the_exit_code(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen looks for the exit before it sends a signal; of two that reap a process only one learns its exit code."""
    module.write_text("import time; print('here', flush=True); time.sleep(600)")
    child = await _started()
    await _first_line(child)
    reaped: list[bool] = []
    monkeypatch.setattr(subprocess.Popen, "poll", lambda _: reaped.append(True))
    child.terminate()
    child.kill()
    assert not reaped
    assert await child.wait_exit() in {"was killed by SIGTERM", "was killed by SIGKILL"}


@pytest.mark.parametrize("by_us", [True, False])
async def test_all_of_its_group_ends_with_it(module: Path, by_us: bool) -> None:
    await _group_ends(module, by_us)


async def _group_ends(module: Path, by_us: bool) -> None:
    module.write_text(HAS_A_CHILD)
    child = await _started(leads_group=True)
    grandchild = int(await _first_line(child))
    if by_us:
        child.kill()
    else:
        os.kill(child.pid, signal.SIGKILL)
    assert await child.wait_exit() == "was killed by SIGKILL"
    async with asyncio.timeout(10):
        while _runs(grandchild):
            await asyncio.sleep(0.01)


async def test_after_its_end_its_number_is_left_alone(module: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another's by then."""
    module.write_text("print('here')")
    child = await _started(leads_group=True)
    told: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda pid, _: told.append(pid))
    await child.wait_exit()
    assert told == [child.pid], "what it has left behind, once"
    child.kill()
    assert await child.wait_exit() == "exited with code 0"
    assert told == [child.pid]


def test_a_group_ends_on_uvloop_as_well(module: Path) -> None:
    """Which is what workers run on, and does not know all that asyncio's own loop does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_group_ends(module, by_us=True))


def _runs(pid: int) -> bool:
    """The process that adopts orphans may not have reaped it yet."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
