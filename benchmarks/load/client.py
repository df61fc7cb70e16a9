"""A load generator under test: what it is asked to do, what it saw, what it used for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Protocol

import msgspec
from benchmarks.harness import BrokenRun
from benchmarks.load.metered import Usage, run_metered


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
        used, stdout = run_metered(
            client.name, client.command(load, folder), folder, cores, **client.environ()
        )
        seen = client.seen(folder, stdout)
    wanted = load.requests * load.output_tokens
    if seen.failed or seen.answers != load.requests or seen.output_tokens != wanted:
        raise BrokenRun(
            f"{client.name} has {seen.answers} answers of {load.requests} ({seen.failed} failed) with "
            f"{seen.output_tokens} tokens of {wanted}"
        )
    return Run(seen, used)
