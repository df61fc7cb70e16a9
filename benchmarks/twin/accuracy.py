"""How near the twin is to reality: fitted on one workload, judged on another.

    python -m benchmarks.twin.accuracy             about 20 minutes; kept in benchmarks/twin/results

Run from the repository's root, on a machine that does nothing else. Five rounds: two servers with the native engine
(SmolLM2-135M on the CPU) are there at once. One serves the fit workload and writes its step log, the other the judged
trace, in turns of ten seconds (see `bursts`). `kvolt fit` makes a preset of the logs. The sim engine with this preset
then serves the judged trace in real time, five times. Beside each of the two stands `kvolt twin` with the same trace,
preset and arguments. Every run is that of a user at the command line: real processes, sockets and time, a fresh cache.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import ROOT, BrokenRun, parser_for, report, run, say, table
from benchmarks.meters import NoiseMeter, Notes
from benchmarks.processes import System, arg_flags, output_of, served, small_model
from benchmarks.twin.accuracy_judge import HEAD, MISSED, Line, judge
from benchmarks.twin.bursts import as_one, bursts_of

from kvolt.bench.load.report import BenchReport, decode_report
from kvolt.bench.traces import limit, read_trace, write_trace
from kvolt.core.trace import TraceRecord

FOLDER = Path("benchmarks") / "twin" / "traces"
ENGINE: dict[str, str | int] = {
    "block_size": 16,
    "kv_blocks": 400,
    "max_num_seqs": 64,
    "max_batch_tokens": 2048,
}
"""Of the native engine, the sim engine and the twin alike; all but `kv_blocks` are what the first has by default. So
few blocks do not hold the judged trace: what is found in the cache then depends on what was thrown out of it."""
NATIVE: dict[str, str | int] = {"device": "cpu", "threads": 1}
"""Besides. One thread: frontend and generator run on the same cores, and threads that wait for each other there cost
more than they save, and not evenly."""
ANSWERS = (260, 284, 327, 338, 346, 351, 359, 416, 429, 436, 441, 451, 457, 469, 480, 502, 511, 523, 527)
"""Words of SmolLM2's vocabulary, of which its answers are made here: " the", " and", " for" ... Of a token that is part
of a character nothing can be sent until the next one comes: the gaps would be between every other token, and those of
the twin, which knows no text, between all."""
SIM_WORKERS = 2
_NAME = "accuracy-cpu-smollm2-135m"
_NOISE_CORES = 0.15
_WARM_UP = ("--rate", "4", "--requests", "4", "--input", "40", "--output", "4", "--seed", "90")
"""Before the trace: what a first request loads is no part of any figure. Its prompts share nothing with the trace's."""


class Plan(NamedTuple):
    rounds: int = 5
    limit: int | None = None
    """Requests of each trace."""
    answers: Sequence[int] = ANSWERS


class Load(NamedTuple):
    """A trace, and how fast it is played."""

    trace: str
    speed: float = 1.0


class Run(NamedTuple):
    """A real run that is whole."""

    report: BenchReport
    notes: Notes


class Case(NamedTuple):
    """The twin beside one kind of real runs."""

    title: str
    command: str
    lines: list[Line]
    twin: BenchReport
    runs: list[Run]


def main() -> int:
    options = parser_for(__file__, __doc__).parse_args()
    plan = Plan(1, 3, ()) if options.smoke else Plan()
    with tempfile.TemporaryDirectory(prefix="bench-accuracy-") as folder:
        work = Path(folder)
        out = work / "accuracy" if options.smoke else options.out or options.results
        out.parent.mkdir(parents=True, exist_ok=True)
        merged, preset = out.with_name(f"{out.name}_steps.jsonl"), out.with_name(f"{out.name}_preset.json")
        fits, native = _native_runs(plan, work, small_model(work, options.smoke))
        _merge_logs(sorted(work.glob("fit-*.jsonl")), merged)
        command = ["kvolt", "fit", str(merged), "--name", _NAME, "--out", str(preset)]
        fitted = output_of(command, 120.0).decode()
        fast = Load(_trace("judged"), float(SIM_WORKERS))  # as many requests for each worker
        sim = System(model="sim-tiny", workers=SIM_WORKERS, arguments={**ENGINE, "preset": str(preset)})
        sims = [_real_runs(plan, work, {f"sim {number}": (sim, fast)})[0] for number in range(plan.rounds)]
        title = f"sim engine in real time, {SIM_WORKERS} workers, {SIM_WORKERS} x as fast"
        one = Load(_trace("judged"))
        cases = [
            _case("native engine on the CPU, 1 worker", plan, preset, 1, one, native, options.smoke),
            _case(title, plan, preset, SIM_WORKERS, fast, sims, options.smoke),
        ]
    text = "\n\n".join([*map(_case_text, cases), _noise([*fits, *native, *sims]), fitted.rstrip()])
    rows = [
        {
            "title": case.title,
            "command": case.command,
            "lines": case.lines,
            "notes": [each.notes for each in case.runs],
            "started_at": [each.report.started_at for each in case.runs],
        }
        for case in cases
    ]
    report(options, text, {"plan": plan._asdict(), "cases": rows})
    is_met = all(line.verdict != MISSED for case in cases for line in case.lines)
    return 0 if is_met or options.smoke else 1


def _trace(name: str) -> str:
    return str(ROOT / FOLDER / f"{name}.jsonl")


# --- real runs


def _native_runs(plan: Plan, work: Path, model: str) -> tuple[list[Run], list[Run]]:
    """Of the fit workload and, in turns with it, of the judged trace; each writes its step log to the work folder."""
    rounds = []
    for number in range(plan.rounds):
        jobs = {}
        for kind, trace in (("fit", "fit"), ("native", "judged")):
            log = str(work / f"{kind}-{number}.jsonl")
            arguments = {**ENGINE, **NATIVE, "step_log": log}
            jobs[f"{kind} {number}"] = (System(model=model, arguments=arguments), Load(_trace(trace)))
        rounds.append(_real_runs(plan, work, jobs, plan.answers))
    fits, native = zip(*rounds, strict=True)
    return list(fits), list(native)


def _real_runs(
    plan: Plan, work: Path, jobs: Mapping[str, tuple[System, Load]], answers: Sequence[int] = ()
) -> list[Run]:
    """Serve, warm up, load; BrokenRun if anything of it fails. Several jobs, each with a server of its own, take turns
    burst by burst; the other servers are idle during a burst. `answers`: token ids that answers are limited to."""
    flags = ("--set", f"allowed_token_ids={list(answers)}") if answers else ()
    with ExitStack() as stack:
        urls = [stack.enter_context(served(system)) for system, _ in jobs.values()]
        for url in urls:
            _bench(url, (*_WARM_UP, *flags))
        meter = NoiseMeter()
        reports: list[list[BenchReport]] = [[] for _ in jobs]
        for turn in zip_longest(*(_bursts(plan, load) for _, load in jobs.values())):
            for (_, load), url, mine, burst in zip(jobs.values(), urls, reports, turn, strict=True):
                if burst is not None:
                    write_trace(work / "burst.jsonl", burst)
                    played = ("--trace", str(work / "burst.jsonl"), "--speed", f"{load.speed:g}")
                    mine.append(_bench(url, (*played, *flags)))
        runs = [Run(as_one(each), meter.notes()) for each in reports]
    for name, each in zip(jobs, runs, strict=True):
        ttft, itl = each.report.latencies["ttft"], each.report.latencies["itl"]
        say(f"{name}: ttft p50 {1e3 * ttft.p50:.0f} ms, itl p50 {1e3 * itl.p50:.1f} ms, {each.notes}")
    return runs


def _bursts(plan: Plan, load: Load) -> list[list[TraceRecord]]:
    records = read_trace(load.trace)
    return bursts_of(records if plan.limit is None else limit(records, plan.limit))


def _bench(url: str, arguments: Sequence[str]) -> BenchReport:
    flags = ("--endpoint", "tokens", "--set", "temperature=0", "--quiet", "--json")
    return decode_report(
        output_of(["kvolt", "bench", "--url", url, *flags, *arguments]), "the report of kvolt bench"
    )


def _merge_logs(logs: Sequence[Path], merged: Path) -> None:
    """One log with the steps of several, which must be of the same engine."""
    headers, steps = zip(*(log.read_bytes().split(b"\n", 1) for log in logs), strict=True)
    if len(set(headers)) != 1:
        raise BrokenRun("the step logs are of different engines")
    merged.write_bytes(headers[0] + b"\n" + b"".join(steps))


# --- the twin beside them


def _case(
    title: str, plan: Plan, preset: Path, workers: int, load: Load, runs: list[Run], may_merge: bool
) -> Case:
    here, trace = Path.cwd(), Path(load.trace)
    command = [
        *("kvolt", "twin", str(trace.relative_to(here) if trace.is_relative_to(here) else trace)),
        *("--preset", str(preset), "--workers", str(workers), "--speed", f"{load.speed:g}"),
        *arg_flags(ENGINE),
        *([] if plan.limit is None else ["--limit", str(plan.limit)]),
        *("--json", "--quiet"),
    ]
    twin = decode_report(output_of(command, 300.0), "the twin's report")
    try:
        lines = judge(twin, [each.report for each in runs], may_merge=may_merge)
    except ValueError as error:
        raise BrokenRun(f"{title}: {error}") from error
    return Case(title, shlex.join(command), lines, twin, runs)


def _case_text(case: Case) -> str:
    counts = case.twin.counts
    about = (
        f"{case.title}: {counts.complete} requests, {counts.input_tokens:,} prompt and {counts.output_tokens:,} output "
        f"tokens, {len(case.runs)} real runs"
    )
    return "\n".join([about, f"$ {case.command}", table(HEAD, [line.cells for line in case.lines])])


def _noise(runs: Sequence[Run]) -> str:
    worst = max(each.notes.other_cores for each in runs)
    stolen = max(each.notes.stolen_cores for each in runs)
    quiet = "" if worst <= _NOISE_CORES else ": not a quiet machine, do not quote these figures"
    return f"other processes kept at most {worst:.2f} cores busy in a run, the host took {stolen:.2f}{quiet}"


if __name__ == "__main__":
    run(main)
