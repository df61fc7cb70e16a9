"""A load generator under test: what it is asked to do, what it saw, what it used for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import msgspec
from benchmarks.frontend.system import clean_environ
from benchmarks.load.metered import Usage
from benchmarks.runtime.pair import BrokenRun

_ROOT = Path(__file__).resolve().parents[2]
_PATIENCE_S = 180.0
_TAIL_CHARACTERS = 2000


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a load generator: closed loop with a concurrency, or open loop with a rate."""

    port: int
    model: str
    requests: int
    input_tokens: int
    output_tokens: int
    concurrency: int | None = None
    rate: float | None = None


class Delay(msgspec.Struct, frozen=True):
    """Milliseconds."""

    p50: float
    p90: float


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a generator reports."""

    answers: int
    failed: int
    output_tokens: int
    input_tokens: float
    """Per request, by the server's count."""
    first: Delay
    """TTFT."""
    gap: Delay | None
    """Between two events with tokens, over all of all answers. None where answers have one."""
    per_token: Delay | None
    """Mean of each answer, over answers."""


class Run(msgspec.Struct, frozen=True):
    seen: Seen
    used: Usage


class Client(Protocol):
    """A load generator."""

    name: str

    def command(self, load: Load, folder: Path) -> list[str]:
        """Its results are to be in the folder, or in its stdout, which will be."""
        ...

    def environ(self) -> dict[str, str]: ...

    def seen(self, folder: Path, stdout: bytes) -> Seen: ...


def run(client: Client, load: Load, cores: str | None = None) -> Run:
    """One run in fresh processes, on the named cores. BrokenRun: it failed, or did not ask for what it was told."""
    with tempfile.TemporaryDirectory(prefix="bench-load-") as name:
        folder = Path(name)
        used, stdout = _metered(client, load, folder, cores)
        if used.status:
            raise BrokenRun(f"{client.name} ended with {used.status}:\n{_tail(folder)}")
        seen = client.seen(folder, stdout)
    wanted = load.requests * load.output_tokens
    if seen.failed or seen.answers != load.requests or seen.output_tokens != wanted:
        raise BrokenRun(
            f"{client.name} has {seen.answers} answers of {load.requests} ({seen.failed} failed) with "
            f"{seen.output_tokens} tokens of {wanted}"
        )
    return Run(seen, used)


def _metered(client: Client, load: Load, folder: Path, cores: str | None) -> tuple[Usage, bytes]:
    pinned: Sequence[str] = ("taskset", "-c", cores) if cores is not None else ()
    usage = folder / "usage.json"
    meter = (sys.executable, "-m", "benchmarks.load.metered", str(usage))
    with (folder / "stdout").open("wb") as stdout, (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*meter, *pinned, *client.command(load, folder)],
            cwd=_ROOT,
            env={**clean_environ(), **client.environ()},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise BrokenRun(f"{client.name} did not end in {_PATIENCE_S:g} s:\n{_tail(folder)}") from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return msgspec.json.decode(usage.read_bytes(), type=Usage), (folder / "stdout").read_bytes()


def _tail(folder: Path) -> str:
    said = [(folder / name).read_text(errors="replace")[-_TAIL_CHARACTERS:] for name in ("stdout", "stderr")]
    return "\n".join(said)
