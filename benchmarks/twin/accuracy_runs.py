"""Runs of which the study is made: kvolt served for real and loaded by `kvolt bench`, and `kvolt twin`.

Every run is that of a user at the command line: real processes, real sockets, real time, and a fresh cache. A run's
folder appears under its name when the run is whole, so what is there need not be done again.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path

import msgspec
from benchmarks.harness import BrokenRun
from benchmarks.processes import NoiseMeter, Notes, System, arg_flags, output_of, served
from benchmarks.twin.bursts import as_one, bursts_of
from msgspec.structs import replace

from kvolt.bench.load.report import Report, decode_report, encode_report
from kvolt.bench.traces import limit, read_trace, write_trace
from kvolt.core.trace import TraceRecord

STEPS = "steps.jsonl"
PRESET = "preset.json"
_REPORT, _NOTES = "report.json", "notes.json"
_TWIN_S = 300.0
_WARM_UP = ("--rate", "4", "--requests", "4", "--input", "40", "--output", "4", "--seed", "90")
"""Before the trace: what a first request loads is no part of any figure. Its prompts share nothing with the trace's."""
_ASKED = ("--endpoint", "tokens", "--set", "temperature=0", "--quiet")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked, and how fast."""

    trace: str
    speed: float = 1.0
    limit: int | None = None


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
    burst by burst; the other servers are idle during a burst."""
    for job in jobs:
        shutil.rmtree(job.part, ignore_errors=True)
        job.part.mkdir(parents=True)
        for name, content in job.kept.items():
            (job.part / name).write_bytes(content)
    with ExitStack() as stack:
        urls = [stack.enter_context(served(_in_folder(job))) for job in jobs]
        for job, url in zip(jobs, urls, strict=True):
            _bench(url, job.part / "warm-up", (*_WARM_UP, *_answers(job.system)))
        meter = NoiseMeter()
        told: list[list[Report]] = [[] for _ in jobs]
        for turn in zip_longest(*(job.bursts() for job in jobs)):
            for job, url, reports, burst in zip(jobs, urls, told, turn, strict=True):
                if burst is not None:
                    reports.append(_bench_burst(url, job, burst))
        notes = meter.notes()
    return [_whole(job, as_one(reports), notes) for job, reports in zip(jobs, told, strict=True)]


def _in_folder(job: Job) -> System:
    """The job's system, with its files in the job's folder."""
    arguments = {
        name: str(job.part / str(value)) if value in (STEPS, PRESET) else value
        for name, value in job.system.arguments.items()
    }
    return replace(job.system, arguments=arguments)


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
    count = [] if load.limit is None else ["--limit", str(load.limit)]
    workers = ["--workers", str(system.workers), "--speed", f"{load.speed:g}"]
    return [
        "kvolt",
        "twin",
        load.trace,
        "--preset",
        preset,
        *workers,
        *arg_flags(system.arguments),
        *count,
        "--json",
        "--quiet",
    ]


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


def _answers(system: System) -> Sequence[str]:
    return ("--set", f"allowed_token_ids={list(system.answers)}") if system.answers else ()


def _bench(url: str, out: Path, arguments: Sequence[str]) -> None:
    output_of(["kvolt", "bench", "--url", url, *_ASKED, "--out", str(out), *arguments])
