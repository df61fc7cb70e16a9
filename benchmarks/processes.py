"""Systems under test as processes: started in a folder of their own, stopped at the end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import msgspec
import psutil
from benchmarks.harness import BrokenRun, Missing, python_path, say

from kvolt.cli.health import served_models

KVOLT = (sys.executable, "-m", "kvolt")
_READY_S = 180.0
_STOP_S = 10.0
_LOG_TAIL_CHARACTERS = 2000


class Processes:
    """Context of child processes in a temporary folder; both are removed at its end."""

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
        for child in children:  # those in a process group of their own
            with suppress(psutil.NoSuchProcess):
                child.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def environ(self, **more: str) -> dict[str, str]:
        """Environment in which kvolt's processes find each other."""
        return clean_environ(
            KVOLT_DISCOVERY_PATH=str(self.folder / "discovery"),
            KVOLT_SUPERVISOR_LOG_DIR=str(self.folder / "logs"),
            KVOLT_LOG_LEVEL="warning",
            **more,
        )

    def start(
        self, name: str, command: Sequence[str], environ: dict[str, str], stdin: int = subprocess.DEVNULL
    ) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.folder,  # holds no config file
                env=environ,
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running.append((name, process))
        return process

    def wait_for(self, is_ready: Callable[[], bool], what: str) -> None:
        """Poll until ready; BrokenRun with the logs if a process ends or time is up."""
        deadline = time.monotonic() + _READY_S
        while not is_ready():
            for name, process in self._running:
                if process.poll() is not None:
                    raise BrokenRun(f"{self._name}: {name} exited at its start:\n{self._log_tail(name)}")
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {name}\n{self._log_tail(name)}" for name, _ in self._running)
                raise BrokenRun(f"{self._name}: no {what} within {_READY_S:.0f} s\n{logs}")
            time.sleep(0.1)

    def wait_answer(
        self,
        port: int,
        model: str,
        tls: ssl.SSLContext | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Poll until a chat request is answered, over HTTPS if `tls` is given."""
        self.wait_for(lambda: _answers(port, model, tls, headers or {}), "answer")

    def wait_workers(self, port: int, count: int) -> None:
        self.wait_for(lambda: num_workers(f"http://127.0.0.1:{port}") >= count, f"{count} workers")

    def _log_tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-_LOG_TAIL_CHARACTERS:]


class Child:
    """A child process that answers commands, JSON lines over a socket whose descriptor is its last argument."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environ: Mapping[str, str],
        pass_fds: Sequence[int] = (),
        answer_s: float = 125.0,
    ) -> None:
        self.name = name
        self._answer_s = answer_s
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(answer_s)
        self._lines = self._socket.makefile("rb")
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environ,
                pass_fds=(theirs.fileno(), *pass_fds),
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: object) -> None:
        try:
            self._socket.sendall(msgspec.json.encode(command) + b"\n")
        except OSError:
            raise BrokenRun(f"{self.name} exited early: {self._tail()}") from None

    def receive(self) -> dict[str, Any]:
        try:
            line = self._lines.readline()
        except TimeoutError:
            self._process.kill()  # it might spin on a core that others are measured on
            raise BrokenRun(f"{self.name} did not answer within {self._answer_s:.0f} s") from None
        except OSError:
            line = b""
        if not line:
            raise BrokenRun(f"{self.name} exited early: {self._tail()}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise BrokenRun(f"{self.name}: {answer['error']}")
        return answer

    def stop(self) -> None:
        self._lines.close()
        self._socket.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _tail(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        self._output.seek(0)
        return self._output.read().decode(errors="replace").strip()[-_LOG_TAIL_CHARACTERS:] or "no output"


def clean_environ(**more: str) -> dict[str, str]:
    """This process's environment without settings of kvolt and Dynamo, for children in any folder."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVOLT_", "DYN_"))}
    return {**kept, "PYTHONPATH": python_path(), **more}


def free_port() -> int:
    """Below the ports that the kernel gives to outgoing connections: none takes it before the server does."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def arg_flags(arguments: Mapping[str, object]) -> list[str]:
    """`--arg NAME=VALUE` for each engine argument."""
    return [part for name, value in arguments.items() for part in ("--arg", f"{name}={value}")]


# --- kvolt


class System(msgspec.Struct, frozen=True, kw_only=True):
    """A model served by `kvolt serve`, with arguments of its engine."""

    model: str
    workers: int = 1
    prefill: int = 0
    """Prefill workers among them; 0: all workers are aggregated."""
    arguments: Mapping[str, str | int | float] = {}


@contextmanager
def served(system: System, flags: Sequence[str] = ()) -> Iterator[str]:
    """`kvolt serve` with further `flags`; yields its URL once all workers are ready."""
    with Processes("serve") as processes, served_by(processes, system, flags) as url:
        yield url


@contextmanager
def served_by(processes: Processes, system: System, flags: Sequence[str] = ()) -> Iterator[str]:
    port, decode = free_port(), str(system.workers - system.prefill)
    roles = (
        ["--prefill", str(system.prefill), "--decode", decode] if system.prefill else ["--workers", decode]
    )
    command = [*KVOLT, "serve", system.model, "--port", str(port), *roles, *flags]
    processes.start("serve", [*command, *arg_flags(system.arguments)], processes.environ())
    processes.wait_workers(port, system.workers)
    yield f"http://127.0.0.1:{port}"


def num_workers(url: str) -> int:
    """Ready workers behind a frontend, in any role."""
    models = asyncio.run(served_models(url, 2.0)) or {}
    return sum(sum(roles.values()) for roles in models.values())


def metric_total(url: str, name: str) -> float:
    """All series of a metric together; `name` is a regular expression."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    return sum(map(float, re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))


def output_of(command: Sequence[str], timeout_s: float = 900.0) -> bytes:
    """Standard output of a `kvolt ...` command; BrokenRun if it fails."""
    assert command[0] == "kvolt"
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BrokenRun(f"{' '.join(command)} took more than {timeout_s:g} s") from None
    if done.returncode:
        last = (done.stderr or done.stdout).decode(errors="replace")[-_LOG_TAIL_CHARACTERS:]
        raise BrokenRun(f"{' '.join(command)} exited with {done.returncode}:\n{last}")
    return done.stdout


def small_model(folder: Path, smoke: bool) -> str:
    """SmolLM2-135M; for a smoke run a checkpoint with random weights, so that nothing is downloaded."""
    from kvolt.testing.tiny_models import tiny_checkpoint

    return str(tiny_checkpoint(folder / "tiny")) if smoke else "smollm2-135m"


class Answer(msgspec.Struct, frozen=True):
    """A streamed completion as its client saw it."""

    ttft_s: float
    text: str
    cached_tokens: int
    timing: dict[str, Any]
    """`nvext.timing`: the worker's own timings."""


def complete(url: str, prompt: Sequence[int], max_tokens: int) -> Answer:
    """Greedy completion of `max_tokens` tokens after a prompt of token ids, by the model `m`."""
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["timing"]},
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    timing: dict[str, Any] = {}
    started, first_s, texts, cached = time.perf_counter(), 0.0, [], 0
    with urllib.request.urlopen(request, timeout=300) as lines:
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("choices"):
                first_s = first_s or time.perf_counter() - started
                texts.append(event["choices"][0]["text"])
            if event.get("usage"):
                cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            timing |= event.get("nvext", {}).get("timing", {})
    return Answer(first_s, "".join(texts), cached, timing)


# --- peers


def installed_python(
    folder: Path, probe: str, about: str, packages: Sequence[Sequence[str]], *, may_install: bool = True
) -> Path:
    """Interpreter of a peer's virtual environment, created at the first use.

    `probe` is a statement that succeeds where the peer is installed; `packages` are arguments of one `pip
    install` each. Missing: it cannot be installed, or is not there and `may_install` is false.
    """
    python = folder / "bin" / "python"
    if _runs(python, probe):
        return python
    if not may_install:
        raise Missing(f"{about} in {folder}")
    say(f"installing {about} into {folder} (once)")
    commands = [[str(python), "-m", "pip", "install", "--quiet", *each] for each in packages]
    if not python.exists():
        commands.insert(0, [sys.executable, "-m", "venv", str(folder)])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = (done.stderr or done.stdout).strip()[-1500:]
            raise Missing(
                f"{about}; `{' '.join(command)}` failed:\n{last}\nLet pip reach an index that has it, or name the "
                "folder of an installed one with --peer-dir or KVOLT_PEER"
            )
    if not _runs(python, probe):
        raise Missing(f"{about} that runs: the one in {folder} fails at `{probe}`; remove it and try again")
    return python


def _runs(python: Path, statement: str) -> bool:
    if not python.exists():
        return False
    return subprocess.run([str(python), "-c", statement], capture_output=True, check=False).returncode == 0


# ---


def _answers(port: int, model: str, tls: ssl.SSLContext | None, headers: Mapping[str, str]) -> bool:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "hello"}]}
    request = urllib.request.Request(
        f"{'https' if tls else 'http'}://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", **headers},
    )
    try:
        with urllib.request.urlopen(request, timeout=10, context=tls) as response:
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
