"""Runs of which the study is made: kvolt served for real and loaded by `kvolt bench`, and `kvolt twin`.

Every run is that of a user at the command line: real processes, real sockets, real time, and a fresh cache. A run's
folder appears under its name when the run is whole, so what is there need not be done again.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import zip_longest
from pathlib import Path

import msgspec
import psutil
from benchmarks.frontend.system import Processes, clean_environ, free_port
from benchmarks.runtime.pair import BrokenRun
from benchmarks.twin.bursts import as_one, bursts_of

from kvolt.bench.load.report import Report, decode_report, encode_report
from kvolt.bench.traces import limit, read_trace, write_trace
from kvolt.cli.health import served_models
from kvolt.core.trace import TraceRecord

STEPS = "steps.jsonl"
PRESET = "preset.json"
_REPORT, _NOTES = "report.json", "notes.json"
_READY_S = 180.0
_POLL_S = 0.2
_BENCH_S = 900.0
_TWIN_S = 300.0
_WARM_UP = ("--rate", "4", "--requests", "4", "--input", "40", "--output", "4", "--seed", "90")
"""Before the trace: what a first request loads is no part of any figure. Its prompts share nothing with the trace's."""
_ASKED = ("--endpoint", "tokens", "--set", "temperature=0", "--quiet")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how fast."""

    trace: str
    speed: float = 1.0
    limit: int | None = None


class System(msgspec.Struct, frozen=True, kw_only=True):
    """Who is asked: a model of `kvolt serve`, with arguments of its engine."""

    model: str
    workers: int = 1
    prefill: int = 0
    """Of these, the ones that compute prompts for the others; none: every worker does both."""
    arguments: Mapping[str, str | int | float] = {}
    answers: Sequence[int] = ()
    """Tokens that answers are made of; any where there are none."""


class Notes(msgspec.Struct, frozen=True, kw_only=True):
    """How the machine was meanwhile."""

    wall_s: float
    own_cores: float
    """Kept busy by the run's own processes, generator included."""
    other_cores: float
    """By all others."""
    stolen_cores: float
    """Taken by the host of a virtual machine."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """A real run that is whole."""

    folder: str
    report: Report
    notes: Notes


def find_run(folder: Path) -> Run | None:
    if not folder.exists():
        return None
    report = decode_report((folder / _REPORT).read_bytes(), str(folder / _REPORT))
    return Run(
        folder=str(folder),
        report=report,
        notes=msgspec.json.decode((folder / _NOTES).read_bytes(), type=Notes),
    )


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A run to be made, into a folder. `kept` are files to lie beside its results.

    The engine writes its steps to the same folder if the arguments name `step_log`.
    """

    folder: Path
    system: System
    load: Load
    kept: Mapping[str, bytes] = {}

    @property
    def part(self) -> Path:
        """Where it lies until it is whole."""
        return self.folder.with_suffix(".part")

    def bursts(self) -> list[list[TraceRecord]]:
        records = read_trace(self.load.trace)
        return bursts_of(records if self.load.limit is None else limit(records, self.load.limit))


def real_runs(jobs: Sequence[Job]) -> list[Run]:
    """Serve, warm up, load; BrokenRun if anything of it fails. Several jobs, each with a server of its own, take turns
    burst by burst: of the others' servers there is nothing to be seen meanwhile, since they have nothing to do."""
    for job in jobs:
        shutil.rmtree(job.part, ignore_errors=True)
        job.part.mkdir(parents=True)
        for name, content in job.kept.items():
            (job.part / name).write_bytes(content)
    with ExitStack() as stack:
        urls = [stack.enter_context(served(job.system, job.part)) for job in jobs]
        for job, url in zip(jobs, urls, strict=True):
            _bench(url, job.part / "warm-up", (*_WARM_UP, *_answers(job.system)))
        meter = _Meter()
        told: list[list[Report]] = [[] for _ in jobs]
        for turn in zip_longest(*(job.bursts() for job in jobs)):
            for job, url, reports, burst in zip(jobs, urls, told, turn, strict=True):
                if burst is not None:
                    reports.append(_bench_burst(url, job, burst))
        notes = meter.notes()
    return [_whole(job, as_one(reports), notes) for job, reports in zip(jobs, told, strict=True)]


def _bench_burst(url: str, job: Job, burst: Sequence[TraceRecord]) -> Report:
    trace, out = job.part / "burst.jsonl", job.part / "bench"
    write_trace(trace, burst)
    _bench(url, out, ("--trace", str(trace), "--speed", f"{job.load.speed:g}", *_answers(job.system)))
    report = decode_report((out / _REPORT).read_bytes(), str(out / _REPORT))
    shutil.rmtree(out)
    trace.unlink()
    return report


def _whole(job: Job, report: Report, notes: Notes) -> Run:
    shutil.rmtree(job.part / "warm-up")
    (job.part / _REPORT).write_bytes(encode_report(report))
    (job.part / _NOTES).write_bytes(msgspec.json.format(msgspec.json.encode(notes)) + b"\n")
    job.part.rename(job.folder)
    found = find_run(job.folder)
    assert found is not None
    return found


def twin_command(preset: str, system: System, load: Load) -> list[str]:
    """As a user would type it, but for `python -m`."""
    given = [part for name, value in system.arguments.items() for part in ("--arg", f"{name}={value}")]
    count = [] if load.limit is None else ["--limit", str(load.limit)]
    workers = ["--workers", str(system.workers), "--speed", f"{load.speed:g}"]
    return ["kvolt", "twin", load.trace, "--preset", preset, *workers, *given, *count, "--json", "--quiet"]


def twin_run(command: Sequence[str]) -> Report:
    told = output_of(command, _TWIN_S)
    return decode_report(told, "the twin's report")


def fit(log: Path, name: str, preset: Path) -> str:
    """A preset of a step log, by `kvolt fit`; what it says of it."""
    command = ["kvolt", "fit", str(log), "--name", name, "--out", str(preset)]
    return output_of(command, 120.0).decode()


def merge_logs(logs: Sequence[Path], merged: Path) -> None:
    """One log with the steps of several, which must be of the same engine."""
    headers, steps = zip(*(log.read_bytes().split(b"\n", 1) for log in logs), strict=True)
    if len(set(headers)) != 1:
        raise BrokenRun("the step logs are of different engines: start anew with --fresh")
    merged.write_bytes(headers[0] + b"\n" + b"".join(steps))


# ---


class _Meter:
    """CPU of the machine, of our own family of processes and of others, from its making on."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._own_s, (self._busy_s, self._stolen_s) = _family_s(), _machine_s()

    def notes(self) -> Notes:
        wall_s = time.perf_counter() - self._start
        own_s, (busy_s, stolen_s) = _family_s(), _machine_s()
        own = (own_s - self._own_s) / wall_s
        return Notes(
            wall_s=round(wall_s, 1),
            own_cores=round(own, 3),
            other_cores=round(max(0.0, (busy_s - self._busy_s) / wall_s - own), 3),
            stolen_cores=round((stolen_s - self._stolen_s) / wall_s, 3),
        )


def _family_s() -> float:
    """Of us and what we started, with those that ended."""
    me = psutil.Process()
    family = (me, *me.children(recursive=True))
    return float(sum(sum(each.cpu_times()[:4]) for each in family))


def _machine_s() -> tuple[float, float]:
    times = psutil.cpu_times()
    stolen = float(getattr(times, "steal", 0.0))
    # What guests use is counted as user time as well.
    guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
    idle = times.idle + getattr(times, "iowait", 0.0)
    return float(sum(times) - idle - guests) - stolen, stolen


@contextmanager
def served(system: System, folder: Path, flags: Sequence[str] = ()) -> Iterator[str]:
    """`kvolt serve` until it is left; yields its URL when every worker is there. `flags` are more of the command's."""
    with Processes("accuracy") as processes:
        port = free_port()
        environ = clean_environ(
            KVOLT_DISCOVERY_PATH=str(processes.folder / "discovery"),
            KVOLT_SUPERVISOR_LOG_DIR=str(processes.folder / "logs"),
            KVOLT_LOG_LEVEL="warning",
        )
        given = {
            name: (folder / str(value)) if value in (STEPS, PRESET) else value
            for name, value in system.arguments.items()
        }
        arguments = [part for name, value in given.items() for part in ("--arg", f"{name}={value}")]
        command = [sys.executable, "-m", "kvolt", "serve", system.model, "--port", str(port)]
        decode = str(system.workers - system.prefill)
        roles = (
            ["--prefill", str(system.prefill), "--decode", decode]
            if system.prefill
            else ["--workers", decode]
        )
        command += [*roles, *flags, *arguments]
        serving = processes.start("serve", command, environ)
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _READY_S
        while num_served(url) < system.workers:
            if serving.poll() is not None or time.monotonic() > deadline:
                said = (processes.folder / "serve.log").read_text(errors="replace")[-2000:]
                raise BrokenRun(f"kvolt serve {system.model} is not ready:\n{said}")
            time.sleep(_POLL_S)
        yield url


def num_served(url: str) -> int:
    """Workers that are ready there, in any role."""
    return sum(sum(roles.values()) for roles in (served_models(url, 2.0) or {}).values())


def _answers(system: System) -> Sequence[str]:
    return ("--set", f"allowed_token_ids={list(system.answers)}") if system.answers else ()


def _bench(url: str, out: Path, arguments: Sequence[str]) -> None:
    output_of(["kvolt", "bench", "--url", url, *_ASKED, "--out", str(out), *arguments], _BENCH_S)


def output_of(command: Sequence[str], timeout_s: float) -> bytes:
    """Of a command of ours, which must end well."""
    assert command[0] == "kvolt"
    try:
        ended = subprocess.run(
            [sys.executable, "-m", *command],
            env=clean_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BrokenRun(f"{' '.join(command)} took more than {timeout_s:g} s") from None
    if ended.returncode:
        said = (ended.stderr or ended.stdout).decode(errors="replace")[-2000:]
        raise BrokenRun(f"{' '.join(command)} ended with {ended.returncode}:\n{said}")
    return ended.stdout
