"""The router's index beside Dynamo's RadixTree: blocks taken in per second, latency of a find, bytes per pair.

    python -m benchmarks.router.index              three rounds, some ten minutes; kept in results/index.{json,txt}

Run from the repository's root, on a machine that does nothing else. Both indexes get one history (`workload`) in
processes of their own (`sides`) that take turns; who comes first changes. The peer is installed at the first run
(--peer-dir, KVOLT_PEER). If it does not start its rows are missing, with the reason.

Ingest: the peer's binding takes JSON, so decoding is in its figure. Beside it kvolt with the very same bytes, decoded
by msgspec; kvolt with the bytes of its own events, as its router gets them; and the index alone, given the hashes.
Find: one call, hashes to the answer. Ours is an array with a number for each worker. The peer's is an object whose
dictionary is only made when it is asked for, which is not in its figure. That both answer alike is checked for every
prompt.
Bytes per pair: growth of the resident set over pairs of block and worker, and what the index itself says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.frontend.edges import dynamo_python
from benchmarks.harness import ROOT, BrokenRun, in_turn, parser_for, report, run, say
from benchmarks.processes import clean_environ
from benchmarks.router import index_report
from benchmarks.router.index_report import Row
from benchmarks.router.sides import DYNAMO, KVOLT, KVOLT_EVENTS, KVOLT_JSON, KVOLT_PYTHON
from benchmarks.router.workload import Shape

_PATIENCE_S = 900.0
_TAIL_CHARACTERS = 500
_FEW_PAIRS = 500_000
"""The index in Python is left out beyond: it would take the machine's memory and everybody's time."""


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    ingest: Shape
    finds: tuple[tuple[Shape, int], ...]
    """With how many finds of each."""
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


def main() -> None:
    options = parser_for(__file__, __doc__, peer="Dynamo").parse_args()
    plan = _SMOKE if options.smoke else _FULL
    pythons: dict[str, Path | str] = dict.fromkeys(
        (KVOLT, KVOLT_JSON, KVOLT_EVENTS, KVOLT_PYTHON), sys.executable
    )
    try:
        pythons[DYNAMO] = dynamo_python(options.peer_dir, may_install=not options.smoke)
    except BrokenRun as error:
        say(f"{DYNAMO} is missing: {error}")
        pythons[DYNAMO] = ""
    rows = [row for number in range(plan.rounds) for row in _round(plan, number, pythons)]
    report(options, index_report.text(rows), {"rows": rows})


def _round(plan: Plan, number: int, pythons: dict[str, Path | str]) -> list[Row]:
    rows: list[Row] = []
    for system in in_turn((KVOLT, KVOLT_JSON, KVOLT_EVENTS, KVOLT_PYTHON, DYNAMO), number + 1):
        rows.append(_measured(pythons, system, "ingest", plan.ingest, number))
    for shape, num_finds in plan.finds:
        is_small = (
            shape.num_sessions * shape.num_blocks * (shape.num_workers if shape.is_shared else 1) < _FEW_PAIRS
        )
        systems = (KVOLT, KVOLT_PYTHON, DYNAMO) if is_small else (KVOLT, DYNAMO)
        for system in in_turn(systems, number + 1):
            rows.append(_measured(pythons, system, "find", shape, number, num_finds=num_finds))
    if number == 0:  # it is the same each time
        rows.extend(_measured(pythons, system, "memory", plan.memory, number) for system in (KVOLT, DYNAMO))
    return rows


def _measured(
    pythons: dict[str, Path | str], system: str, work: str, shape: Shape, number: int, **more: Any
) -> Row:
    say(f"round {number + 1}: {work} {system} {tuple(shape)}")
    job = {"system": system, "work": work, "shape": tuple(shape), **more}
    try:
        figures = run_side(pythons[system], job)
    except BrokenRun as error:
        return Row(number, system, work, tuple(shape), {}, str(error))
    return Row(number, system, work, tuple(shape), figures)


def run_side(
    python: Path | str, job: dict[str, Any], module: str = "benchmarks.router.sides"
) -> dict[str, Any]:
    """What a module says to this job in that interpreter; BrokenRun with its last words otherwise."""
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


if __name__ == "__main__":
    run(main)
