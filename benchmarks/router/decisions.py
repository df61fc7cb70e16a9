"""Time of a routing decision: index lookup, costs, choice and reservation, without hashing.

    python -m benchmarks.router.decisions              three rounds, some ten minutes; results/decisions.{json,txt}

Run from the repository's root, on a machine that does nothing else. A decision is `Selector.choose` and `reserve` for a
prompt whose hashes are known, with requests under way at every worker (`decision_side`). Beside it, in the same
round and on the same history, what Dynamo's RadixTree takes for its find alone, without costs and choice, and what
ours does. If the peer does not start its column is missing, with the reason.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.harness import Rows, goal, in_turn, parser_for, report, run, say, table
from benchmarks.router.index import dynamo_or_nothing, figure_of, missing, side_or_error
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
    """Factor of the default number of decisions."""


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
    python = dynamo_or_nothing(options)
    rows = [row for number in range(plan.rounds) for row in _round(plan, number, python)]
    report(options, report_text(rows), {"rows": rows})


def _round(plan: Plan, number: int, python: Path | str) -> list[Row]:
    rows = []
    for num_blocks in plan.blocks:
        for num_workers in plan.workers:
            shape = tuple(Shape(num_workers, num_blocks, num_workers * _SESSIONS[num_blocks]))
            num = max(int(_NUM_ASKED[num_blocks] * plan.share), 100)
            for system in in_turn((*POLICIES, DYNAMO), number + 1):
                say(f"round {number + 1}: {system}, {num_workers} workers, {num_blocks} blocks")
                job: dict[str, Any] = {"policy": system, "shape": shape, "num": num}
                if system == DYNAMO:
                    job = {"system": DYNAMO, "work": "find", "shape": shape, "num_finds": num}
                    figures, error = side_or_error(python, job)
                else:
                    figures, error = side_or_error(sys.executable, job, "benchmarks.router.decision_side")
                rows.append(Row(number, system, num_workers, num_blocks, figures, error))
    return rows


_FIGURES = (
    figure_of("decision_p50_us", "decision p50 us"),
    figure_of("decision_p99_us", "p99 us"),
    figure_of("choose_p50_us", "without reservation p50"),
    figure_of("find_p50_us", "find alone p50"),
)
_PEER = figure_of("p50_us", f"{DYNAMO}, find alone p50")


def report_text(rows: Sequence[Row]) -> str:
    body, goals = [], []
    for (num_workers, num_blocks), mine in Rows([row for row in rows if not row.error]).each(
        "num_workers", "num_blocks"
    ):
        theirs = mine.where(system=DYNAMO)
        for policy, done in mine.only(lambda row: row.system != DYNAMO).each("system"):
            ratio = done.over(theirs, _FIGURES[0], _PEER)
            place = (str(num_workers), str(num_blocks), policy)
            body.append((*place, *done.cells(_FIGURES), *theirs.cells([_PEER]), ratio))
            limit = GOALS_US.get((num_workers, num_blocks))
            if limit is not None:
                name = f"{policy}, {num_workers} workers, {num_blocks} blocks: p99 under {limit:g} us"
                tail = done.fold(_FIGURES[1])
                goals.append(goal(name, tail.median < limit, tail.text(".0f")))
    titles = (each.title for each in (*_FIGURES, _PEER))
    head = ("workers", "blocks", "policy", *titles, "decision / its find")
    return "\n".join([table(head, body), *goals, *missing(rows)])


if __name__ == "__main__":
    run(main)
