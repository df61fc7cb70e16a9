"""Gains by router, in the twin: TTFT, ITL, E2E, throughput and hit rate over seeds, compared to Dynamo's router.

    KVOLT_TRACES=FOLDER python -m benchmarks.router.gains     over an hour on two cores; results/gains.{json,txt}
    python -m benchmarks.router.gains --only peer --only cases --seeds 4

Three parts: `peer` (the whole trace, compared to Dynamo), `cases` (shared prefix, hot tenant, slow and failing worker:
`benchmarks.router.cases`) and `loads` (the trace by load). A run with --only replaces these parts of the results
and keeps the others; every part has its own command, commit and date.

Continues where it was stopped, unless kvolt's sources have changed (rows are in --folder, KVOLT_BENCH). Times are
virtual, independent of the load of the machine.

Cluster: 8 workers, blocks of 64 tokens, 16,384 each, the timing of Dynamo's mocker (some cases have another).
Trace: Mooncake's conversations from the folder KVOLT_TRACES (`kvolt trace sources`; without it as many chats of the
project's own recipe, noted in the table).

Load: saturation is the highest rate that round-robin sustains, found by bisection to 3 % on 6,000 requests: first
tokens arrive at 95 % or more of the request rate. Loads are fractions of that rate, the same for all
routers.

Seed: the section used (1,000 consecutive requests, the first 300 of which fill the caches and are not measured) and
every draw of the network and the router. The sections overlap, most requests are in two, so the intervals are those of
this trace, not of all traces. They are 95 % intervals of the mean over seeds (Student's t); comparisons are made seed
by seed.

`classic, best` is the best weight of a small grid, chosen for each load and each figure, with hindsight.

Compared to Dynamo: the whole trace at its own rate and four times as fast, through kvolt's twin and through Dynamo
1.4.2's offline replay with round-robin and with its KV router at `prefill_load_scale` 1 (the default), 4 and 16. Its
first token includes one more decode pass (5.75 ms or more; see `benchmarks.twin.speed`), which is one or two per cent
of the mean here.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

import msgspec
from benchmarks.harness import BrokenRun, machine, report, run, say
from benchmarks.router import cases, gains_report, gains_runs
from benchmarks.router.cases import CASES, CasePoint, CaseRow
from benchmarks.router.gains_report import PeerRow
from benchmarks.router.gains_runs import (
    CLASSIC,
    LATENCY,
    NUM_WORKERS,
    ROUND_ROBIN,
    Figures,
    Found,
    Point,
    Row,
    Search,
    base_rate,
    mooncake,
    records_of,
    saturation,
    solve,
)
from benchmarks.studies import KeptRows, parse_study, study_parser
from benchmarks.twin.replays import PEER, peer_python, replay_dynamo

from kvolt.bench.traces import write_trace

_RESULTS = Path(__file__).parent / "results" / "gains"
LOADS = (0.3, 0.6, 0.9)
_PEER_SPEEDS = (1.0, 4.0)
_PEER_MODES = {
    "Dynamo, KV router": ("kv_router", 1.0),
    "Dynamo, KV router, load scale 4": ("kv_router", 4.0),
    "Dynamo, KV router, load scale 16": ("kv_router", 16.0),
    "Dynamo, round-robin": ("round_robin", 1.0),
}
"""Router mode and `prefill_load_scale`, of which 1 is the default."""


class Plan(msgspec.Struct, frozen=True):
    num_seeds: int
    search: Search
    stretch: tuple[int, int]
    """Requests of a run at a load, and how many of them are not measured."""
    weights: tuple[float, ...]
    """Weights of `classic`."""
    peer_requests: int
    """0: the whole trace."""
    case_s: tuple[float, float]
    """Seconds of a case, and how many of them are not measured."""


_FULL = Plan(20, Search(6000, 18.0, 24.0), (1000, 300), (1.0, 0.5, 2.0, 4.0), 0, (20.0, 6.0))
_SMOKE = Plan(1, Search(60, 18.0, 24.0, 0.5), (40, 10), (1.0,), 20, (1.0, 0.2))


class Part(msgspec.Struct, frozen=True):
    """One part of the study: how it was made, its tables, its rows."""

    command: str
    commit: str
    machine: dict[str, object]
    seeds: int
    text: str
    rows: Mapping[str, object]

    @property
    def title(self) -> str:
        return f"{self.command}\n{self.machine['date']}, commit {self.commit}, seeds {self.seeds}"


def main() -> None:
    options = _options()
    plan = _SMOKE if options.smoke else _FULL
    if options.smoke:
        gains_runs.num_own_requests = 200
    if options.seeds:
        plan = msgspec.structs.replace(plan, num_seeds=options.seeds)
    parts = _kept_parts() if not options.smoke else {}
    commit = _commit()  # before results are written
    for name in options.only or PARTS:
        text, rows = PARTS[name](plan, options)
        num_seeds = 1 if name == "peer" else plan.num_seeds
        parts[name] = Part(_command(), commit, machine(), num_seeds, text, rows)
        in_order = {each: parts[each] for each in PARTS if each in parts}
        whole = "\n\n".join(f"{name}: {part.title}\n\n{part.text}" for name, part in in_order.items())
        report(options, whole, {"parts": in_order})


def _kept_parts() -> dict[str, Part]:
    """Parts of the last results, of which this run replaces some."""
    try:
        kept = msgspec.json.decode(_RESULTS.with_suffix(".json").read_bytes())
        return msgspec.convert(kept.get("parts", {}), dict[str, Part])
    except (OSError, msgspec.MsgspecError):
        return {}


def _command() -> str:
    return shlex.join(["python", "-m", "benchmarks.router.gains", *sys.argv[1:]])


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _cases(plan: Plan, options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    kept = KeptRows(options.folder, "gains-cases", CaseRow)
    points = [
        CasePoint(case, router, seed, *plan.case_s)
        for case, router, seed in product(CASES, cases.ROUTERS, range(plan.num_seeds))
    ]
    rows = kept.solve(cases.solve_case, points, options.processes)
    kept.remove()
    return cases.text(rows), {"rows": rows}


def _loads(plan: Plan, options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    searched = KeptRows(options.folder, "gains-saturation", Found)
    kept = KeptRows(options.folder, "gains-loads", Row)
    [saturated] = searched.solve(saturation, [plan.search], 1)
    routers = [(ROUND_ROBIN, 0.0), *((CLASSIC, weight) for weight in plan.weights), (LATENCY, 0.0)]
    points = [
        Point(router, weight, seed, round(load * saturated.rate_per_s, 6), *plan.stretch)
        for load, seed, (router, weight) in product(LOADS, range(plan.num_seeds), routers)
    ]
    rows = kept.solve(solve, points, options.processes)
    searched.remove()
    kept.remove()
    text = f"trace: {_trace()}\n{gains_report.loads_text(saturated, rows)}"
    return text, {"plan": plan, "saturation": saturated, "rows": rows}


def _trace() -> str:
    return "Mooncake's conversation trace" if mooncake() else "no public trace: chats of the project's own"


# --- beside Dynamo


def _beside_dynamo(plan: Plan, options: argparse.Namespace) -> tuple[str, dict[str, object]]:
    """The peer first: a peer that does not start fails at once."""
    rows = [
        _replayed(plan, name, mode, scale, speed, options)
        for speed in _PEER_SPEEDS
        for name, (mode, scale) in _PEER_MODES.items()
    ]
    points = [
        Point(router, float(router == CLASSIC), 0, speed * base_rate(), plan.peer_requests, 0)
        for speed in _PEER_SPEEDS
        for router in (LATENCY, CLASSIC, ROUND_ROBIN)
    ]
    kept = KeptRows(options.folder, "gains-peer", Row)
    for row in kept.solve(solve, points, options.processes):
        speed = round(row.point.rate_per_s / base_rate(), 6)
        rows.append(PeerRow(f"kvolt, {row.point.name}", speed, row.figures))
    kept.remove()
    return f"trace: {_trace()}\n\n{gains_report.peer_text(rows)}", {"rows": rows}


def _replayed(
    plan: Plan, name: str, mode: str, scale: float, speed: float, options: argparse.Namespace
) -> PeerRow:
    say(f"{name} at {speed:g} x the trace's rate")
    records = records_of(Point(ROUND_ROBIN, 0.0, 0, 0.0, plan.peer_requests, 0))
    try:
        with tempfile.TemporaryDirectory(prefix="bench-gains-") as work:
            path = Path(work) / "trace.jsonl"
            write_trace(path, records)
            core = max(os.sched_getaffinity(0))
            done = replay_dynamo(
                peer_python(options.peer_dir, may_install=not options.smoke),
                path,
                NUM_WORKERS,
                records[0].block_size,
                core,
                mode=mode,
                speed=speed,
                prefill_load_scale=scale,
            )
    except (BrokenRun, OSError) as error:
        return PeerRow(name, speed, None, str(error))
    ttft, itl, e2e = (done.latencies[name] for name in ("ttft", "tpot", "e2e"))
    figures = Figures(ttft["mean"], ttft["p99"], itl["mean"], e2e["mean"], e2e["p99"], done.hit_rate)
    return PeerRow(name, speed, figures)


PARTS: dict[str, Callable[[Plan, argparse.Namespace], tuple[str, dict[str, object]]]] = {
    "peer": _beside_dynamo,
    "cases": _cases,
    "loads": _loads,
}
"""Text and rows of each part, in the order of the report."""


def _options() -> argparse.Namespace:
    parser = study_parser(__file__, __doc__, peer=PEER)
    parser.set_defaults(results=_RESULTS)
    parser.add_argument("--only", action="append", choices=tuple(PARTS), help="run this part; repeatable")
    parser.add_argument("--seeds", type=int, default=0, help="runs of each case and load (default 20)")
    return parse_study(parser)


if __name__ == "__main__":
    run(main)
