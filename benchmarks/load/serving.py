"""The servers that are asked: canned answers, or kvolt with a simulated engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from benchmarks.frontend.system import Processes, clean_environ, free_port
from benchmarks.runtime.pair import BrokenRun

SIM_MODEL = "sim-tiny"

_ROOT = Path(__file__).resolve().parents[2]
_READY_S = 60.0


@contextmanager
def serve_canned(period_s: float, cores: set[int] | None = None) -> Iterator[int]:
    """Its port. On the given cores only."""
    with Processes("canned") as processes:
        port = free_port()
        command = [sys.executable, "-m", "benchmarks.load.canned", str(port), f"{period_s * 1e3:g}"]
        process = processes.start("canned", command, clean_environ(PYTHONPATH=str(_ROOT)))
        if cores is not None:
            os.sched_setaffinity(process.pid, cores)
        _wait_ready(port, process)
        yield port


@contextmanager
def serve_sim() -> Iterator[int]:
    """`kvolt serve` with one simulated worker."""
    with Processes("sim") as processes:
        port = free_port()
        environ = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"), KVOLT_LOG_LEVEL="warning"
        )
        command = [sys.executable, "-m", "kvolt", "serve", SIM_MODEL, "--port", str(port)]
        _wait_ready(port, processes.start("serve", command, environ))
        yield port


class Asked(msgspec.Struct, frozen=True):
    """Of a canned server, since it was last asked."""

    began_s: float
    """When its first request came."""
    peak: int
    """How many streams it had at one time at most."""


def asked_of(port: int) -> Asked:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/asked", timeout=30) as response:
        return msgspec.json.decode(response.read(), type=Asked)


def _wait_ready(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _READY_S
    while not _lists_models(port):
        if process.poll() is not None or time.monotonic() > deadline:
            raise BrokenRun(f"`{process.args!r}` serves no model")
        time.sleep(0.1)


def _lists_models(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5) as response:
            return bool(json.load(response)["data"])
    except (urllib.error.URLError, OSError):
        return False
