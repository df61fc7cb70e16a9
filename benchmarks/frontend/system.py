"""A system under test: its processes, its meters, and the mock engines behind it.

What is metered is the edge: every process between a client's socket and the workers, with its threads
and children. The mock workers are no part of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from benchmarks.frontend import tiny_model
from benchmarks.runtime.pair import BrokenRun

NUM_WORKERS = 2
BLOCK_SIZE = 16
"""Tokens: of the workers, and so of what KV routers hear of, on both sides."""

_READY_S = 90.0
_STOP_S = 10.0
_LOG_TAIL_CHARACTERS = 2000


class Meter:
    """What processes, their threads and their children have used since they started."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]

    def cpu_s(self) -> float:
        """User and system time; of children that have ended too."""
        return sum(sum(process.cpu_times()[:4]) for process in self._family())

    def rss_bytes(self) -> int:
        return sum(process.memory_info().rss for process in self._family())

    def _family(self) -> list[psutil.Process]:
        try:
            return [each for root in self._roots for each in (root, *root.children(recursive=True))]
        except psutil.NoSuchProcess as error:
            raise BrokenRun(f"process {error.pid} has ended") from None


@dataclass(slots=True)
class Edge:
    """A system that serves."""

    name: str
    port: int
    meter: Meter
    mock_meter: Meter
    step_s: float | None
    """Time of a step of the mock, which gives every stream a token; None for no time at all."""
    window_hooks: tuple[Callable[[], None], Callable[[], None]] | None = None
    """Called as a measured window begins and ends: for a profile."""


class Processes:
    """Child processes in a folder of their own; all are gone, and the folder too, when it is left."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.folder = Path(tempfile.mkdtemp(prefix=f"bench-{name}-"))
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        children = [each for _, process in self._running for each in _children(process.pid)]
        for _, process in self._running:
            _signal_group(process, signal.SIGTERM)
        deadline = time.monotonic() + _STOP_S
        for _, process in self._running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.1))
            _signal_group(process, signal.SIGKILL)
            process.wait()
        for child in children:  # those in a group of their own, had they outlived their parent
            with suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(
        self, name: str, command: Sequence[str], environ: dict[str, str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,  # where no config file lies that one of them might read
                env=environ,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((name, process))
        return process

    def wait_ready(self, port: int) -> None:
        """Until a request is answered."""
        deadline = time.monotonic() + _READY_S
        while not _answers(port):
            for name, process in self._running:
                if process.poll() is not None:
                    raise BrokenRun(f"{self._name}: {name} ended at its start:\n{self._log_tail(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self._log_tail(name)}" for name, _ in self._running)
                raise BrokenRun(f"{self._name} did not answer within {_READY_S:.0f} s\n{logs}")
            time.sleep(0.2)

    def _log_tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without what would configure either system behind our back."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVOLT_", "DYN_"))}
    return {**kept, **more}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    message = {"role": "user", "content": "are you there"}
    body = {"model": tiny_model.NAME, "max_tokens": 2, "messages": [message]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _children(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def _signal_group(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
