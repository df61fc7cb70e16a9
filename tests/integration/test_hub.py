"""Models from an imitation of the hub, through the command and its environment, in processes of their own."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.models.hub_lab import TOKEN, FakeHub, Repo

pytest.importorskip("huggingface_hub")

WEIGHTS = random.Random(2).randbytes(4_000_000)
REPOS = {
    "kvolt/tiny": Repo(
        {
            "config.json": b"{}",
            "tokenizer.json": b'{"version": "1.0"}',
            "model.safetensors": WEIGHTS,
            "x.bin": b"no",
        }
    ),
    "kvolt/gated": Repo({"config.json": b"{}", "model.safetensors": b"x"}, gated=True),
}


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub(REPOS) as server:
        yield server


class Machine:
    """Runs `kvolt model` with caches of its own."""

    def __init__(self, home: Path, endpoint: str) -> None:
        self.home = home
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KVOLT_"))}
        self.env = {
            **kept,
            "HF_HOME": str(home / "hf"),
            "KVOLT_HOME": str(home / "kvolt"),
            "HF_ENDPOINT": endpoint,
        }

    def start(self, *argv: str, **env: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "kvolt", "model", *argv]
        return subprocess.Popen(
            command,
            env={**self.env, **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.home,
        )

    def wait_for_partial(self, least_bytes: float) -> None:
        deadline = time.monotonic() + 40
        while max((path.stat().st_size for path in self.home.rglob("*.incomplete")), default=0) < least_bytes:
            assert time.monotonic() < deadline, "no such part of the file is here"
            time.sleep(0.05)

    def run(self, *argv: str, **env: str) -> tuple[int, str, str]:
        with self.start(*argv, **env) as process:
            out, err = process.communicate(timeout=50)
            return process.returncode, out.strip(), err.strip()


@pytest.fixture
def machine(tmp_path: Path, hub: FakeHub) -> Machine:
    return Machine(tmp_path, hub.url)


def test_download_then_offline(machine: Machine, hub: FakeHub) -> None:
    hub.faults.cut_after = [1_000_000]
    code, out, err = machine.run("fetch", "kvolt/tiny")
    assert (code, Path(out).parents[2]) == (0, machine.home / "hf" / "hub"), err
    assert (Path(out) / "model.safetensors").read_bytes() == WEIGHTS
    assert not (Path(out) / "x.bin").exists()
    assert [asked.range for asked in hub.large_asked() if asked.range] == ["bytes=1000000-"]
    assert "fetching kvolt/tiny" in err
    assert "HTTP Request" not in err
    assert "fetched kvolt/tiny" in err
    hub.asked.clear()
    code, shown, err = machine.run("show", "kvolt/tiny", HF_HUB_OFFLINE="1")
    assert code == 0, err
    assert out in shown
    assert hub.asked == []
    code, _, err = machine.run("fetch", "kvolt/gated", HF_HUB_OFFLINE="1")
    assert (code, err.count("\n")) == (2, 0)
    assert "HF_HUB_OFFLINE forbids" in err


def test_a_killed_download_goes_on_in_the_next_process(machine: Machine, hub: FakeHub) -> None:
    hub.faults.hold = threading.Event()
    partial_bytes = len(WEIGHTS) // 2
    with machine.start("fetch", "kvolt/tiny") as process:
        machine.wait_for_partial(partial_bytes * 0.9)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=20)
    hub.faults.hold.set()
    hub.faults.hold = None
    hub.asked.clear()
    code, out, err = machine.run("fetch", "kvolt/tiny")
    assert code == 0, err
    assert (Path(out) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [asked.range for asked in hub.large_asked() if asked.range]
    assert len(ranges) == 1
    assert int(ranges[0].removeprefix("bytes=").rstrip("-")) > partial_bytes * 0.9
    assert "already here" in err


def test_ctrl_c_ends_it_and_keeps_what_came(machine: Machine, hub: FakeHub) -> None:
    hub.faults.hold = threading.Event()
    with machine.start("fetch", "kvolt/tiny") as process:
        machine.wait_for_partial(len(WEIGHTS) * 0.4)
        process.send_signal(signal.SIGINT)
        hub.faults.hold.set()
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    # On a busy machine the rest may have come before the signal was handled.
    files = [path for path in (machine.home / "hf").rglob("*") if path.is_file()]
    assert max(path.stat().st_size for path in files) >= len(WEIGHTS) * 0.4


def test_gated_by_token_and_unknown(machine: Machine) -> None:
    code, _, err = machine.run("fetch", "kvolt/gated")
    assert code == 2
    assert "kvolt/gated is gated" in err
    assert "HF_TOKEN" in err
    code, out, err = machine.run("fetch", "kvolt/gated", HF_TOKEN=TOKEN)
    assert code == 0, err
    assert (Path(out) / "model.safetensors").read_bytes() == b"x"
    code, _, err = machine.run("fetch", "kvolt/none")
    assert code == 2
    assert "has no model kvolt/none" in err


def test_two_processes_fetch_once(machine: Machine, hub: FakeHub) -> None:
    both = [machine.start("fetch", "kvolt/tiny") for _ in range(2)]
    outputs = [process.communicate(timeout=50) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    weights = [asked for asked in hub.large_asked() if asked.method == "GET"]
    assert len({asked.path for asked in weights}) == len(weights) == 2
