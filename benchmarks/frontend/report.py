"""Report of the edge: spreads over rounds, ratios within a round, tables and goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from benchmarks.frontend.delays import DelayRow
from benchmarks.frontend.edges import DYNAMO_NAME as _PEER
from benchmarks.frontend.edges import KVOLT_NAME as _KVOLT
from benchmarks.frontend.measure import Row
from benchmarks.harness import Spread, goal, ratios, spread, table

GOAL_REQUEST = 0.5
GOAL_SINGLE_TOKEN = 0.7
GOAL_FLAT_TOKEN = 0.5
GOAL_MEMORY = 0.5

_MIB = 1 << 20


class Figure(msgspec.Struct, frozen=True):
    """A line of the table: what is told of a row, and the goal for kvolt over the peer, if there is one."""

    name: str
    of: Callable[[Row], float]
    form: str
    goal: float | None = None
    compared: bool = True


FIGURES = (
    Figure("CPU us per request", lambda row: row.cpu_us_per_request, ",.0f", GOAL_REQUEST),
    Figure("CPU us per request, text", lambda row: row.cpu_us_per_text_request, ",.0f", GOAL_REQUEST),
    Figure("requests/s", lambda row: row.requests_per_s, ",.0f"),
    Figure("CPU us per token, light", lambda row: row.light_cpu_us_per_token, ".2f", GOAL_SINGLE_TOKEN),
    Figure("  tokens/s", lambda row: row.light.events / row.light.wall_s, ",.0f", compared=False),
    Figure("  events per read", lambda row: row.light.events / row.light.reads, ".2f", compared=False),
    Figure("CPU us per token, busy", lambda row: row.busy_cpu_us_per_token, ".2f"),
    Figure("  tokens/s", lambda row: row.busy.events / row.busy.wall_s, ",.0f"),
    Figure("  events per read", lambda row: row.busy.events / row.busy.reads, ".2f", compared=False),
    Figure("CPU us per token, flat out", lambda row: row.flat_cpu_us_per_token, ".2f", GOAL_FLAT_TOKEN),
    Figure("  tokens/s", lambda row: row.flat_tokens_per_s, ",.0f"),
    Figure("  events per read", lambda row: row.flat.events / row.flat.reads, ".2f", compared=False),
    Figure("  events per token", lambda row: row.flat_events_per_token, ".3f", compared=False),
    Figure("  bytes per event", lambda row: row.flat.num_bytes / row.flat.events, ".0f", compared=False),
    Figure("  cores: edge", lambda row: row.flat.edge_cpu_s / row.flat.wall_s, ".2f", compared=False),
    Figure("  cores: mock", lambda row: row.flat.mock_cpu_s / row.flat.wall_s, ".2f", compared=False),
    Figure("  cores: client", lambda row: row.flat.client_cpu_s / row.flat.wall_s, ".2f", compared=False),
    Figure("RSS MiB", lambda row: row.rss_bytes / _MIB, ".0f", GOAL_MEMORY),
)


class Line(msgspec.Struct, frozen=True):
    connections: int
    figure: str
    systems: dict[str, Spread]
    ratio: Spread | None
    """kvolt over the peer: smaller is better, but for rates."""
    form: str
    goal: float | None


def lines(rows: Sequence[Row]) -> list[Line]:
    found = []
    for connections in sorted({row.connections for row in rows}):
        mine = [row for row in rows if row.connections == connections]
        found += [_line(connections, mine, figure) for figure in (*FIGURES, *_wrk_figures(mine))]
    return found


def _wrk_figures(rows: Sequence[Row]) -> list[Figure]:
    if any(row.wrk is None for row in rows):
        return []

    def of(name: str) -> Callable[[Row], float]:
        return lambda row: float(getattr(row.wrk, name))

    return [
        Figure("wrk: CPU us per request", of("cpu_us_per_request"), ",.0f"),
        Figure("wrk: requests/s", of("requests_per_s"), ",.0f"),
        Figure("wrk: CPU us per token", of("cpu_us_per_token"), ".2f"),
        Figure("wrk: tokens/s", of("tokens_per_s"), ",.0f"),
    ]


def _line(connections: int, rows: Sequence[Row], figure: Figure) -> Line:
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        values.setdefault(row.system, {})[row.round] = figure.of(row)
    ratio = None
    if figure.compared and _KVOLT in values and _PEER in values:
        ratio = spread(ratios(values[_KVOLT], values[_PEER]))
    systems = {system: spread(list(found.values())) for system, found in values.items()}
    return Line(connections, figure.name, systems, ratio, figure.form, figure.goal)


def edge_table(found: Sequence[Line]) -> str:
    parts = []
    for connections in sorted({line.connections for line in found}):
        mine = [line for line in found if line.connections == connections]
        systems = list(mine[0].systems)
        ratio = (f"{_KVOLT} / {_PEER}",) if len(systems) > 1 else ()
        head = (f"{connections} connections", *systems, *ratio)
        body = [
            (
                line.figure,
                *(line.systems[system].text(line.form) for system in systems),
                *(line.ratio.text() if line.ratio else "" for _ in ratio),
            )
            for line in mine
        ]
        parts.append(table(head, body))
    return "\n\n".join(parts)


def edge_goals(found: Sequence[Line]) -> list[str]:
    return [
        goal(
            f"{line.connections} connections: {line.figure.strip()} at most {line.goal:g} of {_PEER}",
            line.ratio.median <= line.goal,
            line.ratio.text(),
        )
        for line in found
        if line.goal is not None and line.ratio is not None
    ]


def strict_goals(rows: Sequence[Row]) -> list[str]:
    """kvolt's dearest token, which has a write to itself, over the peer's cheapest, which has not."""
    told = []
    for connections in sorted({row.connections for row in rows}):
        mine = [row for row in rows if row.connections == connections]
        ours = {row.round: row.light_cpu_us_per_token for row in mine if row.system == _KVOLT}
        theirs = {row.round: row.flat_cpu_us_per_token for row in mine if row.system == _PEER}
        if ours and theirs:
            ratio = spread(ratios(ours, theirs))
            text = f"{connections} connections: a token, light, at most {GOAL_SINGLE_TOKEN:g} of {_PEER}'s flat out"
            told.append(goal(text, ratio.median <= GOAL_SINGLE_TOKEN, ratio.text()))
    return told


def delay_table(rows: Sequence[DelayRow], rate_per_s: float) -> str:
    systems = list(dict.fromkeys(row.system for row in rows))
    names = ("first_p50_ms", "first_p99_ms", "gap_p50_ms", "gap_p99_ms")
    labels = ("first token p50", "first token p99", "between tokens p50", "between tokens p99")
    body = []
    for step_ms in sorted({row.step_ms for row in rows}):
        for name, label in zip(names, labels, strict=True):
            if not step_ms and name.startswith("gap"):
                continue  # all tokens are there at once
            mine = [row for row in rows if row.step_ms == step_ms]
            told = [
                spread([getattr(row, name) for row in mine if row.system == system]).text()
                for system in systems
            ]
            body.append((f"{step_ms:.2f}", label, *told))
    head = (f"mock step ms ({rate_per_s:g} requests/s)", "delay ms", *systems)
    return table(head, body)
