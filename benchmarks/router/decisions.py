"""How long a decision of the router takes: index, costs, choice and booking; hashing apart.

    python -m benchmarks.router.decisions              three rounds, some ten minutes; results/decisions.{json,txt}

Run from the repository's root, on a machine that does nothing else. A decision is `Selector.choose` and `Selector.book`
for a prompt whose hashes are known, with requests under way at every worker (`decision_side`). Beside it, in the same
round and on the same history, what Dynamo's RadixTree takes for its find alone, without costs and choice, and what
ours does. If the peer does not start its column is missing, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.frontend.edges import dynamo_python
from benchmarks.harness import BrokenRun, goal, in_turn, parser_for, report, run, say, spread, table
from benchmarks.router.index import run_side
from benchmarks.router.sides import DYNAMO
from benchmarks.router.workload import Shape

POLICIES = ("latency", "classic")
GOALS_US = {(256, 512): 100.0, (1024, 8192): 1000.0}
"""p99, by workers and blocks."""

_SESSIONS = {64: 16, 512: 4, 8192: 1}
"""Per worker."""
_NUM_ASKED = {64: 5000, 512: 3000, 8192: 1000}


class Plan(msgspec.Struct, frozen=True):
    rounds: int
    workers: tuple[int, ...]
    blocks: tuple[int, ...]
    share: float
    """Of the usual number of decisions."""


_FULL = Plan(3, (8, 64, 256, 1024), (64, 512, 8192), 1.0)
_SMOKE = Plan(1, (8,), (64,), 0.01)


class Row(msgspec.Struct, frozen=True):
    """One system on one shape in one round."""

    round: int
    system: str
    num_workers: int
    num_blocks: int
    figures: dict[str, Any]
    error: str = ""


def main() -> None:
    options = parser_for(__file__, __doc__, peer="Dynamo").parse_args()
    plan = _SMOKE if options.smoke else _FULL
    try:
        python: Path | str = dynamo_python(options.peer_dir, may_install=not options.smoke)
    except BrokenRun as error:
        say(f"{DYNAMO} is missing: {error}")
        python = ""
    rows = [row for number in range(plan.rounds) for row in _round(plan, number, python)]
    report(options, report_text(rows), {"rows": rows})


def _round(plan: Plan, number: int, python: Path | str) -> list[Row]:
    rows = []
    for num_blocks in plan.blocks:
        for num_workers in plan.workers:
            shape = tuple(Shape(num_workers, num_blocks, num_workers * _SESSIONS[num_blocks]))
            num = max(int(_NUM_ASKED[num_blocks] * plan.share), 100)
            theirs = {"system": DYNAMO, "work": "find", "shape": shape, "num_finds": num}
            turns = [(policy, {"policy": policy, "shape": shape, "num": num}) for policy in POLICIES]
            turns.append((DYNAMO, theirs))
            for system, job in in_turn(turns, number + 1):
                say(f"round {number + 1}: {system}, {num_workers} workers, {num_blocks} blocks")
                rows.append(_row(number, system, num_workers, num_blocks, python, job))
    return rows


def _row(
    number: int, system: str, num_workers: int, num_blocks: int, python: Path | str, job: dict[str, Any]
) -> Row:
    is_peer = system == DYNAMO
    module = "benchmarks.router.sides" if is_peer else "benchmarks.router.decision_side"
    try:
        figures = run_side(python if is_peer else sys.executable, job, module)
    except BrokenRun as error:
        return Row(number, system, num_workers, num_blocks, {}, str(error))
    return Row(number, system, num_workers, num_blocks, figures)


def report_text(rows: Sequence[Row]) -> str:
    body, goals = [], []
    for num_workers, num_blocks in dict.fromkeys((row.num_workers, row.num_blocks) for row in rows):
        mine = [row for row in rows if (row.num_workers, row.num_blocks) == (num_workers, num_blocks)]
        theirs = {row.round: row.figures["p50_us"] for row in mine if row.system == DYNAMO and not row.error}
        for policy in POLICIES:
            done = [row for row in mine if row.system == policy and not row.error]
            if not done:
                continue
            ratios = [
                row.figures["decision_p50_us"] / theirs[row.round] for row in done if row.round in theirs
            ]
            names = ("decision_p50_us", "decision_p99_us", "choose_p50_us", "find_p50_us")
            spreads = {name: spread([row.figures[name] for row in done]) for name in names}
            body.append(
                (
                    str(num_workers),
                    str(num_blocks),
                    policy,
                    *(each.text(".1f") for each in spreads.values()),
                    spread(list(theirs.values())).text(".1f") if theirs else "-",
                    spread(ratios).text(".2f") if ratios else "-",
                )
            )
            limit = GOALS_US.get((num_workers, num_blocks))
            if limit is not None:
                name = f"{policy}, {num_workers} workers, {num_blocks} blocks: p99 under {limit:g} us"
                tail = spreads["decision_p99_us"]
                goals.append(goal(name, tail.median < limit, tail.text(".0f")))
    head = (
        "workers | blocks | policy | decision p50 us | "
        f"p99 us | without booking p50 | find alone p50 | {DYNAMO}, find alone p50 | decision / its find"
    )
    broken = {row.system: row.error for row in rows if row.error}
    return "\n".join(
        [
            table(head, body),
            *goals,
            *(f"missing: {system}: {error}" for system, error in broken.items()),
        ]
    )


if __name__ == "__main__":
    run(main)
