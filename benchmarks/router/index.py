"""The router's index compared to Dynamo's RadixTree: blocks ingested per second, latency of a find, bytes per pair.

    python -m benchmarks.router.index              three rounds, some ten minutes; kept in results/index.{json,txt}

Run from the repository's root, on an otherwise idle machine. Both indexes get one history (`workload`) in their own
processes (`sides`), in turn and alternating order. The peer is installed at the first run (--peer-dir, KVOLT_PEER).
If it does not start, its rows are missing, with the reason.

Ingest: the peer's binding takes JSON, so its result includes decoding. Compared to it: kvolt with the same bytes,
decoded by msgspec; kvolt with its own event format, as its router receives it; and the index alone, with decoded
hashes.
Find: one call, from hashes to the result. Ours is an array with a number for each worker. The peer's is an object
that creates its dictionary on access, which is not measured. Both results are compared for every prompt.
Bytes per pair: growth of the resident set over pairs of block and worker, and the size that the index reports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.frontend.edges import dynamo_python
from benchmarks.harness import (
    ROOT,
    BrokenRun,
    Figure,
    Rows,
    cell,
    goal,
    in_turn,
    parser_for,
    report,
    run,
    say,
    table,
)
from benchmarks.processes import clean_environ
from benchmarks.router.sides import DYNAMO, KVOLT, KVOLT_EVENTS, KVOLT_JSON, KVOLT_PYTHON
from benchmarks.router.workload import Shape

GOAL_INGEST = 3.0
GOAL_FIND = 1 / 3
GOAL_FIND_US = 1000.0
GOAL_BYTES = 100.0
CITED = "published for Dynamo's index in Rust with many threads: 9 to 13 M block operations/s (its INDEXER_BENCH.md)"
_PATIENCE_S = 900.0
_TAIL_CHARACTERS = 500
_FEW_PAIRS = 500_000
"""Above this size the Python index is skipped: it would need too much memory and time."""


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    ingest: Shape
    finds: tuple[tuple[Shape, int], ...]
    """Shapes, and the number of finds of each."""
    memory: Shape


_LENGTHS, _WORKERS = (64, 512, 8192), (8, 64, 512, 1024)
_SESSIONS = {64: 16, 512: 4, 8192: 1}
"""Per worker."""
_NUM_FINDS = {64: 5000, 512: 2000, 8192: 400}

_FULL = Plan(
    3,
    Shape(64, 128, 12_000),
    (
        *(
            (Shape(num, length, num * _SESSIONS[length]), _NUM_FINDS[length])
            for length in _LENGTHS
            for num in _WORKERS
        ),
        (Shape(64, 128, 1024), 5000),
        (Shape(1024, 512, 2, is_shared=True), 2000),
        (Shape(1024, 8192, 1, is_shared=True), 400),
    ),
    Shape(64, 512, 26_600),
)
_SMOKE = Plan(
    1, Shape(8, 64, 20), ((Shape(8, 64, 16), 20), (Shape(8, 64, 1, is_shared=True), 20)), Shape(8, 64, 20)
)


class Row(msgspec.Struct, frozen=True):
    """One system under one piece of work in one round."""

    round: int
    system: str
    work: str
    shape: tuple[int, int, int, bool]
    figures: dict[str, Any]
    error: str = ""


def main() -> None:
    options = parser_for(__file__, __doc__, peer="Dynamo").parse_args()
    plan = _SMOKE if options.smoke else _FULL
    python = dynamo_or_nothing(options)
    rows = [row for number in range(plan.rounds) for row in _round(plan, number, python)]
    report(options, text(rows), {"rows": rows})


def dynamo_or_nothing(options: argparse.Namespace) -> Path | str:
    """Interpreter of the peer; empty where it cannot be installed."""
    try:
        return dynamo_python(options.peer_dir, may_install=not options.smoke)
    except BrokenRun as error:
        say(f"{DYNAMO} is missing: {error}")
        return ""


def _round(plan: Plan, number: int, python: Path | str) -> list[Row]:
    works: list[tuple[str, str, Shape, dict[str, int]]] = [
        (system, "ingest", plan.ingest, {})
        for system in in_turn((KVOLT, KVOLT_JSON, KVOLT_EVENTS, KVOLT_PYTHON, DYNAMO), number + 1)
    ]
    for shape, num_finds in plan.finds:
        num_pairs = shape.num_sessions * shape.num_blocks * (shape.num_workers if shape.is_shared else 1)
        systems = (KVOLT, *((KVOLT_PYTHON,) if num_pairs < _FEW_PAIRS else ()), DYNAMO)
        works += [(each, "find", shape, {"num_finds": num_finds}) for each in in_turn(systems, number + 1)]
    if number == 0:  # it is the same each time
        works += [(system, "memory", plan.memory, {}) for system in (KVOLT, DYNAMO)]
    rows = []
    for system, work, shape, more in works:
        say(f"round {number + 1}: {work} {system} {tuple(shape)}")
        job = {"system": system, "work": work, "shape": tuple(shape), **more}
        figures, error = side_or_error(python if system == DYNAMO else sys.executable, job)
        rows.append(Row(number, system, work, tuple(shape), figures, error))
    return rows


def side_or_error(
    python: Path | str, job: dict[str, Any], module: str = "benchmarks.router.sides"
) -> tuple[dict[str, Any], str]:
    """Figures, and the error in their place."""
    try:
        return run_side(python, job, module), ""
    except BrokenRun as error:
        return {}, str(error)


def run_side(
    python: Path | str, job: dict[str, Any], module: str = "benchmarks.router.sides"
) -> dict[str, Any]:
    """Run a job of a module in that interpreter and return its result; BrokenRun with the end of its output."""
    if not python:
        raise BrokenRun("it is not installed")
    try:
        done = subprocess.run(
            [str(python), "-m", module, "-"],
            input=msgspec.json.encode(job),
            capture_output=True,
            cwd=ROOT,
            env=clean_environ(),
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BrokenRun(str(error)) from None
    if done.returncode:
        raise BrokenRun(
            done.stderr.decode(errors="replace").strip()[-_TAIL_CHARACTERS:] or f"exit {done.returncode}"
        )
    answer: dict[str, Any] = msgspec.json.decode(done.stdout)
    return answer


# --- the report


def figure_of(name: str, title: str = "", form: str = ".1f", scale: float = 1.0) -> Figure:
    return Figure(title or name, lambda row: row.figures[name] * scale, form)


def missing(rows: Sequence[Any]) -> list[str]:
    """Systems that did not run, with the reason."""
    broken = {row.system: row.error for row in rows if row.error}
    return [f"missing: {system}: {error}" for system, error in broken.items()]


def text(rows: Sequence[Row]) -> str:
    works = dict(Rows([row for row in rows if not row.error]).each("work"))
    parts = [
        part(works.get(name, Rows[Row]([])))
        for name, part in (("ingest", _ingest), ("find", _finds), ("memory", _memory))
    ]
    return "\n\n".join([*parts, *missing(rows)])


def _ingest(rows: Rows[Row]) -> str:
    rate, peer = figure_of("blocks_per_s", form=".2f", scale=1e-6), rows.where(system=DYNAMO)
    body, goals = [], []
    for system, mine in rows.each("system"):
        ratio = mine.over(peer, rate)
        body.append((system, *mine.cells([rate]), ratio))
        if system in (KVOLT_JSON, KVOLT_EVENTS) and ratio:
            name = f"{GOAL_INGEST:g} times the peer's ingest rate ({system})"
            goals.append(goal(name, ratio.median >= GOAL_INGEST, ratio))
    return "\n".join([table(("ingest", "M blocks/s", f"x {DYNAMO}"), body), CITED, *goals])


def _finds(rows: Rows[Row]) -> str:
    p50, p99 = figure_of("p50_us"), figure_of("p99_us")
    body, ratios, slowest, num_same, num_cases = [], [], 0.0, 0, 0
    for shape, at in rows.each("shape"):
        num_workers, num_blocks, _, is_shared = Shape(*shape)
        where = f"{num_blocks} blocks, {num_workers} workers" + (", all hold all" if is_shared else "")
        num_cases += 1
        num_same += len({row.figures["answers"] for row in at.rows}) == 1
        for system, mine in at.each("system"):
            ratio = mine.over(at.where(system=DYNAMO), p50)
            body.append((where, system, *mine.cells((p50, p99)), ratio))
            if system == KVOLT:
                slowest = max(slowest, *mine.values(p99).values())
                ratios += [ratio.median] if ratio else []
    lines = [
        table(("find", "system", "p50 us", "p99 us", f"p50 / {DYNAMO}"), body),
        f"answers: the same from every index in {num_same} of {num_cases} cases",
    ]
    if ratios:
        worst = max(ratios)
        lines.append(
            goal("a third of the peer's find latency, p50", worst <= GOAL_FIND, f"at most {worst:.2f}")
        )
    if slowest:
        lines.append(
            goal("p99 of every find under 1 ms", slowest < GOAL_FIND_US, f"at most {slowest:.0f} us")
        )
    return "\n".join(lines)


def _memory(rows: Rows[Row]) -> str:
    figures = (
        figure_of("num_pairs", "pairs, M", ".2f", 1e-6),
        figure_of("resident_per_pair", "resident bytes/pair"),
        Figure("by its own gauge", lambda row: row.figures["said_per_pair"], ".1f"),
    )
    body, goals = [], []
    for row in rows.rows:
        body.append((row.system, *(cell(each.value(row), each.form) for each in figures)))
        if row.system == KVOLT:
            resident = max(row.figures["resident_per_pair"], row.figures["said_per_pair"])
            goals.append(goal(f"under {GOAL_BYTES:g} bytes a pair", resident < GOAL_BYTES, f"{resident:.1f}"))
    return "\n".join([table(("memory", *(each.title for each in figures)), body), *goals])


if __name__ == "__main__":
    run(main)
