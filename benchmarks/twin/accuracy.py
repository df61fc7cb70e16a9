"""How near the twin is to reality: fitted on one workload, judged on another.

    python -m benchmarks.twin.accuracy                       all of it, kept in benchmarks/twin/results
    python -m benchmarks.twin.accuracy --stop-after 5        as many runs as five minutes hold; again to go on

Run from the repository's root, on a machine that does nothing else. Five rounds: two servers with the native engine
(SmolLM2-135M on the CPU) are there at once. One serves the fit workload and writes its step log, the other the judged
trace, in turns of ten seconds (see `bursts`). `kvolt fit` makes a preset of the logs. The sim engine with this preset
then serves the judged trace in real time, five times. Beside each of the two stands `kvolt twin` with the same trace,
preset and arguments.

Runs that are done lie in a work folder and are not done again; what was planned otherwise is refused there.
"""

from __future__ import annotations

import argparse
import hashlib
import shlex
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from benchmarks.harness import ROOT, BrokenRun, parser_for, report, run, say, table
from benchmarks.processes import System, small_model
from benchmarks.twin.accuracy_judge import HEAD, Line, Verdict, judge, row_of
from benchmarks.twin.accuracy_runs import (
    PRESET,
    STEPS,
    Job,
    Load,
    Run,
    find_run,
    fit,
    merge_logs,
    real_runs,
    twin_command,
    twin_run,
)

from kvolt.bench.load.report import Report
from kvolt.core.load import decode_step_log
from kvolt.latency.fit import errors_of
from kvolt.latency.presets import PresetFile

FOLDER = Path("benchmarks") / "twin"
FIT_TRACE, JUDGED_TRACE = (str(FOLDER / "traces" / name) for name in ("fit.jsonl", "judged.jsonl"))
ENGINE: dict[str, str | int] = {
    "block_size": 16,
    "kv_blocks": 400,
    "max_num_seqs": 64,
    "max_batch_tokens": 2048,
}
"""Of the native engine, the sim engine and the twin alike; all but `kv_blocks` are what the first has by default. So
few blocks do not hold the judged trace: what is found in the cache then depends on what was thrown out of it."""
NATIVE: dict[str, str | int] = {"device": "cpu", "threads": 1, "step_log": STEPS}
"""Besides. One thread: frontend and generator run on the same cores, and threads that wait for each other there cost
more than they save, and not evenly."""
ANSWERS = (260, 284, 327, 338, 346, 351, 359, 416, 429, 436, 441, 451, 457, 469, 480, 502, 511, 523, 527)
"""Words of SmolLM2's vocabulary, of which its answers are made here: " the", " and", " for" ... Of a token that is part
of a character nothing can be sent until the next one comes: the gaps would be between every other token, and those of
the twin, which knows no text, between all."""
SIM_WORKERS = 2
_NAME = "accuracy-cpu-smollm2-135m"
_NOISE_CORES = 0.15
_START_S, _BURST_S = 20.0, 5.0
"""Of a run beside its trace: start, warm-up, stopping; and of each burst: another generator, the last answers."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the runs; those of another plan are no part of this study."""

    rounds: int = 5
    limit: int | None = None
    model: str = "smollm2-135m"
    traces: Mapping[str, str]
    """sha256 by name."""
    engine: Mapping[str, str | int] = msgspec.field(default_factory=lambda: {**ENGINE, **NATIVE})
    sim_workers: int = SIM_WORKERS
    answers: Sequence[int] = ANSWERS


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """The twin beside one kind of real runs."""

    title: str
    command: str
    lines: list[Line]
    twin: Report
    runs: list[Run]


class Study:
    """The runs of a plan in a work folder."""

    def __init__(self, plan: Plan, work: Path, stop_at: float | None, drop_noisy: bool) -> None:
        self.plan = plan
        self._work = work
        self._stop_at = stop_at
        self._drop_noisy = drop_noisy
        self.fit_runs: list[Run] = []

    def native_runs(self) -> list[Run] | None:
        """Of the judged trace, in turns with fit runs; None when time is up before all are there."""
        system = System(model=self.plan.model, arguments={**ENGINE, **NATIVE}, answers=self.plan.answers)
        found: list[Run] = []
        for number in range(1, self.plan.rounds + 1):
            jobs = [
                Job(folder=self._work / f"{kind}-{number}", system=system, load=self._load(trace))
                for kind, trace in (("fit", FIT_TRACE), ("native", JUDGED_TRACE))
            ]
            runs = self._done(jobs)
            if runs is None:
                return None
            self.fit_runs.append(runs[0])
            found.append(runs[1])
        return found

    def logs(self, kind: str) -> list[Path]:
        return [self._work / f"{kind}-{number}" / STEPS for number in range(1, self.plan.rounds + 1)]

    def sim_runs(self, preset: Path) -> list[Run] | None:
        system = self.sim({"preset": PRESET})
        content = preset.read_bytes()
        found: list[Run] = []
        for number in range(1, self.plan.rounds + 1):
            folder = self._work / f"sim-{number}"
            if folder.exists() and (folder / PRESET).read_bytes() != content:
                shutil.rmtree(folder)  # of a fit that is no more
            job = Job(folder=folder, system=system, load=self.sim_load(), kept={PRESET: content})
            runs = self._done([job])
            if runs is None:
                return None
            found += runs
        return found

    def sim(self, more: Mapping[str, str | int]) -> System:
        return System(model="sim-tiny", workers=SIM_WORKERS, arguments={**ENGINE, **more})

    def judged_load(self) -> Load:
        return self._load(JUDGED_TRACE)

    def sim_load(self) -> Load:
        """As many requests for each worker."""
        return self._load(JUDGED_TRACE, speed=float(SIM_WORKERS))

    def _load(self, trace: str, speed: float = 1.0) -> Load:
        return Load(trace=str(ROOT / trace), speed=speed, limit=self.plan.limit)

    def _done(self, jobs: Sequence[Job]) -> list[Run] | None:
        """Runs that take turns: all of them anew if one is missing. None when time is up."""
        names = " and ".join(job.folder.name for job in jobs)
        found = [find_run(job.folder) for job in jobs]
        runs = [run for run in found if run is not None]
        if len(runs) == len(jobs):
            noise = max(run.notes.other_cores for run in runs)
            if not self._drop_noisy or noise <= _NOISE_CORES:
                return runs
            say(f"{names} are done again: others kept {noise:.2f} cores busy")
        for job in jobs:
            shutil.rmtree(job.folder, ignore_errors=True)
        needs_s = sum(_needs_s(job) for job in jobs)
        if self._stop_at is not None and time.monotonic() + needs_s > self._stop_at:
            say(f"{names} would take {needs_s:.0f} s more: time is up")
            return None
        say(f"{names}: about {needs_s:.0f} s")
        runs = real_runs(jobs)
        for job, each in zip(jobs, runs, strict=True):
            ttft, itl, notes = each.report.latencies["ttft"], each.report.latencies["itl"], each.notes
            say(
                f"{job.folder.name}: ttft {1e3 * ttft.p50:.0f} / {1e3 * ttft.p90:.0f} ms, itl {1e3 * itl.p50:.1f} / "
                f"{1e3 * itl.p90:.1f} ms, {notes.own_cores:.2f} cores, others {notes.other_cores:.2f}"
            )
        return runs


def study(runs: Study, out: Path, options: argparse.Namespace) -> int:
    """Make all runs that are missing, then report; 3 if time is up before that."""
    native = runs.native_runs()
    if native is None:
        return 3
    merged, preset = out.with_name(f"{out.name}_steps.jsonl"), out.with_name(f"{out.name}_preset.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    merge_logs(runs.logs("fit"), merged)
    fitted = fit(merged, _NAME, preset)
    sim = runs.sim_runs(preset)
    if sim is None:
        return 3
    one = System(model="", arguments=ENGINE)
    title = f"sim engine in real time, {SIM_WORKERS} workers, {SIM_WORKERS} x as fast"
    cases = [
        _case("native engine on the CPU, 1 worker", preset, one, runs.judged_load(), native, options.smoke),
        _case(title, preset, runs.sim({}), runs.sim_load(), sim, options.smoke),
    ]
    steps = _judged_steps(runs.logs("native"), preset)
    text = "\n\n".join([*map(_case_text, cases), steps, _noise(runs.fit_runs, cases), fitted.rstrip()])
    rows = [
        {
            "title": case.title,
            "command": case.command,
            "lines": case.lines,
            "notes": [run.notes for run in case.runs],
            "started_at": [run.report.started_at for run in case.runs],
        }
        for case in cases
    ]
    report(options, text, {"plan": runs.plan, "cases": rows})
    is_met = all(line.verdict is not Verdict.MISSED for case in cases for line in case.lines)
    return 0 if is_met or options.smoke else 1


def _case(title: str, preset: Path, system: System, load: Load, runs: list[Run], may_merge: bool) -> Case:
    here = Path.cwd()
    trace = Path(load.trace)
    shown = msgspec.structs.replace(
        load, trace=str(trace.relative_to(here) if trace.is_relative_to(here) else trace)
    )
    command = twin_command(str(preset), system, shown)
    twin = twin_run(command)
    try:
        lines = judge(twin, [run.report for run in runs], may_merge=may_merge)
    except ValueError as error:
        raise BrokenRun(f"{title}: {error}") from error
    return Case(title=title, command=shlex.join(command), lines=lines, twin=twin, runs=runs)


# --- report


def _case_text(case: Case) -> str:
    counts = case.twin.counts
    about = (
        f"{case.title}: {counts.complete} requests, {counts.input_tokens:,} prompt and {counts.output_tokens:,} output "
        f"tokens, {len(case.runs)} real runs"
    )
    return "\n".join([about, f"$ {case.command}", table(HEAD, [row_of(line) for line in case.lines])])


def _judged_steps(logs: Sequence[Path], preset: Path) -> str:
    """How far the preset is off on steps that it was not fitted to, of another workload."""
    model = msgspec.json.decode(preset.read_bytes(), type=PresetFile).latency
    rows = []
    for number, log in enumerate(logs, 1):
        with log.open("rb") as lines:
            _, steps = decode_step_log(lines)
        errors = errors_of(model, steps)
        took, predicted = sum(step.time_s for step in steps), sum(map(model.step_s, steps))
        rows.append(
            f"  run {number}: {len(steps):,} steps took {took:.1f} s, predicted {predicted:.1f} s "
            f"({predicted / took - 1:+.1%}); error of a step {errors.median:.1%} (median), {errors.p90:.1%} (p90)"
        )
    return "\n".join(["The preset on the steps of the judged runs, which it was not fitted to:", *rows])


def _noise(fits: Sequence[Run], cases: Sequence[Case]) -> str:
    notes = [run.notes for run in (*fits, *(run for case in cases for run in case.runs))]
    worst = max(each.other_cores for each in notes)
    stolen = max(each.stolen_cores for each in notes)
    quiet = "" if worst <= _NOISE_CORES else ": not a quiet machine, do not quote these figures"
    return f"other processes kept at most {worst:.2f} cores busy in a run, the host took {stolen:.2f}{quiet}"


# --- the command


def _needs_s(job: Job) -> float:
    bursts = job.bursts()
    return _START_S + sum(burst[-1].timestamp / 1e3 / job.load.speed + _BURST_S for burst in bursts)


def _plan(model: str | None = None) -> Plan:
    """The whole study, or a smoke run with this model."""
    traces = {
        trace: hashlib.sha256((ROOT / trace).read_bytes()).hexdigest() for trace in (FIT_TRACE, JUDGED_TRACE)
    }
    return Plan(traces=traces, rounds=1, limit=3, model=model, answers=()) if model else Plan(traces=traces)


def _claim(work: Path, plan: Plan, fresh: bool) -> None:
    """The work folder is this plan's; BrokenRun if it is another's."""
    path, content = work / "plan.json", msgspec.json.format(msgspec.json.encode(plan, order="sorted")) + b"\n"
    if path.exists() and path.read_bytes() != content and not fresh:
        raise BrokenRun(f"{work} holds runs of another plan: give --fresh to drop them, or another --work")
    if fresh and path.exists():
        shutil.rmtree(work)
    work.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def main() -> int:
    parser = parser_for(__file__, __doc__)
    add = parser.add_argument
    add(
        "--work", type=Path, default=Path.home() / ".cache" / "kvolt-accuracy", help="folder of finished runs"
    )
    add("--stop-after", type=float, metavar="MINUTES", help="start no run that would end later")
    add("--drop-noisy", action="store_true", help="repeat runs beside which other processes used the machine")
    add("--fresh", action="store_true", help="drop the runs in the work folder")
    options = parser.parse_args()
    stop_at = None if options.stop_after is None else time.monotonic() + 60 * options.stop_after
    with ExitStack() as stack:
        work, out, plan = options.work.expanduser().resolve(), options.out or options.results, _plan()
        if options.smoke:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-accuracy-")))
            out, plan = work / "accuracy", _plan(small_model(work, smoke=True))
        _claim(work, plan, options.fresh)
        return study(Study(plan, work, stop_at, options.drop_noisy), out, options)


if __name__ == "__main__":
    run(main)
