"""Figures of the index and its peer as people read them: tables, ratios within a round, goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from benchmarks.harness import goal, spread, table
from benchmarks.router.sides import DYNAMO, KVOLT, KVOLT_EVENTS, KVOLT_JSON, KVOLT_PYTHON
from benchmarks.router.workload import Shape

GOAL_INGEST = 3.0
GOAL_FIND = 1 / 3
GOAL_FIND_US = 1000.0
GOAL_BYTES = 100.0
CITED = "published for Dynamo's index in Rust with many threads: 9 to 13 M block operations/s (its INDEXER_BENCH.md)"


class Row(msgspec.Struct, frozen=True):
    """One system under one piece of work in one round."""

    round: int
    system: str
    work: str
    shape: tuple[int, int, int, bool]
    figures: dict[str, Any]
    error: str = ""


def text(rows: Sequence[Row]) -> str:
    parts = [_ingest(rows), _finds(rows), _memory(rows)]
    broken = {row.system: row.error for row in rows if row.error}
    parts.extend(f"missing: {system}: {error}" for system, error in broken.items())
    return "\n\n".join(parts)


def _ingest(rows: Sequence[Row]) -> str:
    body, ratios = [], {}
    for system in (KVOLT, KVOLT_EVENTS, KVOLT_JSON, KVOLT_PYTHON, DYNAMO):
        mine = _values(rows, "ingest", system, None, "blocks_per_s")
        ratios[system] = _ratio(rows, "ingest", system, None, "blocks_per_s")
        millions = [value / 1e6 for value in mine.values()]
        body.append((system, spread(millions).text(".2f") if millions else "-", ratios[system] or "-"))
    lines = [table(("ingest", "M blocks/s", f"x {DYNAMO}"), body), CITED]
    for system in (KVOLT_JSON, KVOLT_EVENTS):
        median = _median_ratio(rows, "ingest", system, None, "blocks_per_s")
        if median is not None:
            name = f"{GOAL_INGEST:g} times the peer's ingest rate ({system})"
            lines.append(goal(name, median >= GOAL_INGEST, ratios[system]))
    return "\n".join(lines)


def _finds(rows: Sequence[Row]) -> str:
    body, worst, slowest = [], [], 0.0
    shapes = list(dict.fromkeys(row.shape for row in rows if row.work == "find"))
    for shape in shapes:
        num_workers, num_blocks, _, is_shared = Shape(*shape)
        where = f"{num_blocks} blocks, {num_workers} workers" + (", all hold all" if is_shared else "")
        for system in (KVOLT, KVOLT_PYTHON, DYNAMO):
            halves, tails = (_values(rows, "find", system, shape, name) for name in ("p50_us", "p99_us"))
            if not halves:
                continue
            ratio = _ratio(rows, "find", system, shape, "p50_us")
            body.append(
                (where, system, *(spread(list(each.values())).text(".1f") for each in (halves, tails)), ratio)
            )
            if system == KVOLT:
                slowest = max(slowest, *tails.values())
        median = _median_ratio(rows, "find", KVOLT, shape, "p50_us")
        if median is not None:
            worst.append(median)
    lines = [table(("find", "system", "p50 us", "p99 us", f"p50 / {DYNAMO}"), body), _same_answers(rows)]
    if worst:
        lines.append(
            goal(
                "a third of the peer's find latency, p50",
                max(worst) <= GOAL_FIND,
                f"at most {max(worst):.2f}",
            )
        )
    if slowest:
        lines.append(
            goal("p99 of every find under 1 ms", slowest < GOAL_FIND_US, f"at most {slowest:.0f} us")
        )
    return "\n".join(lines)


def _same_answers(rows: Sequence[Row]) -> str:
    finds = [row for row in rows if row.work == "find" and not row.error]
    answers: dict[tuple[Any, ...], set[str]] = {}
    for row in finds:
        answers.setdefault(row.shape, set()).add(row.figures["answers"])
    same = sum(len(each) == 1 for each in answers.values())
    return f"answers: the same from every index in {same} of {len(answers)} cases"


def _memory(rows: Sequence[Row]) -> str:
    body, resident = [], None
    for row in rows:
        if row.work != "memory" or row.error:
            continue
        figures = row.figures
        said = figures["said_per_pair"]
        body.append(
            (
                row.system,
                f"{figures['num_pairs'] / 1e6:.2f} M",
                f"{figures['resident_per_pair']:.1f}",
                "-" if said is None else f"{said:.1f}",
            )
        )
        if row.system == KVOLT:
            resident = max(figures["resident_per_pair"], said)
    lines = [table("memory | pairs | resident bytes/pair | by its own gauge", body)]
    if resident is not None:
        lines.append(goal(f"under {GOAL_BYTES:g} bytes a pair", resident < GOAL_BYTES, f"{resident:.1f}"))
    return "\n".join(lines)


def _values(rows: Sequence[Row], work: str, system: str, shape: Any, name: str) -> dict[int, float]:
    """By round."""
    is_meant: Callable[[Row], bool] = lambda row: (  # noqa: E731
        row.work == work and row.system == system and not row.error and shape in (None, row.shape)
    )
    return {row.round: float(row.figures[name]) for row in rows if is_meant(row)}


def _ratios(rows: Sequence[Row], work: str, system: str, shape: Any, name: str) -> list[float]:
    mine, theirs = (_values(rows, work, each, shape, name) for each in (system, DYNAMO))
    return [mine[number] / theirs[number] for number in mine if number in theirs]


def _ratio(rows: Sequence[Row], work: str, system: str, shape: Any, name: str) -> str:
    ratios = _ratios(rows, work, system, shape, name)
    return spread(ratios).text(".2f") if ratios and system != DYNAMO else ""


def _median_ratio(rows: Sequence[Row], work: str, system: str, shape: Any, name: str) -> float | None:
    ratios = _ratios(rows, work, system, shape, name)
    return spread(ratios).median if ratios else None
