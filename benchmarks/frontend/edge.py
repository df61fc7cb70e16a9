"""CPU cost of a request and of a streamed token at the edge, kvolt compared to Dynamo.

Run from the repository's root: `python -m benchmarks.frontend.edge`. Both systems are up at the same time,
with the same model, the same number of mock workers at the same speed, and round-robin routing, or with
`--router kv` each with its own KV router, fed by the events of its workers (blocks of 16 tokens on both
sides); they are loaded in turn, in every round, with the same prompts. CPU is user and system time of the
edge: the frontend with all its threads and children, not the mock workers. Both start anew for each number of
connections, so that memory is that of this load, and once for each speed of the mock, so that an edge
serves one model. `measure` describes what is measured, and how.

kvolt can be compared to itself instead. `--systems kvolt,before --before FOLDER` runs another commit's `src`, with its
compiled modules; `--systems keys,kvolt` has requests with the API key of a tenant with all limits beside requests
without. The report gives the upper 95 % bound of the median of the rounds' ratios and differences: take at least ten
rounds. `--https` has all systems serve HTTPS.
"""

from __future__ import annotations

import argparse
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    KVOLT_NAME,
    NUM_WORKERS,
    Dynamo,
    Edge,
    installed_dynamo,
    model_in,
    serve_dynamo,
    serve_kvolt,
)
from benchmarks.frontend.measure import FLAT_TOKENS, Bench, Edges, Row, light_step_s
from benchmarks.harness import Figure, Rows, cell, comparison, goal, in_turn, median_bound, run, say

_SYSTEMS = ("kvolt", "dynamo")
_OF_KVOLT = ("kvolt", "keys", "before")
ROUTERS = {"round-robin": ("round-robin", "round-robin"), "kv": ("latency", "kv")}
"""Router of kvolt and of Dynamo by name."""
_SECONDS = 5.0
"""Approximate window for requests."""


def main() -> None:
    options = _options()
    dynamo = installed_dynamo(options.peer_dir) if "dynamo" in options.systems else None
    rows: list[Row] = []
    for connections in options.connections:
        with _benches(options, connections, dynamo) as benches:
            for bench in benches:
                bench.warm_up()
            for number in range(1, options.rounds + 1):
                for bench in in_turn(benches, number):
                    rows.append(bench.round(number))
                    shown = (f"{each.title} {cell(each.value(rows[-1]), each.form)}" for each in FIGURES)
                    say(f"round {number}  {connections:>4} connections  {bench.name}  {'  '.join(shown)}")
    settings = {name: getattr(options, name) for name in ("rounds", "router", "https")}
    results = {"peer": DYNAMO_NAME, "options": settings, "rows": rows}
    judged = goals_text(rows) if dynamo is not None else bounds_text(rows)
    harness.report(options, f"{edge_text(rows)}\n\n{judged}", results)


def _options() -> argparse.Namespace:
    parser = harness.parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    add = parser.add_argument
    add("--connections", type=harness.numbers, default=(64, 512), help="concurrent clients (default 64,512)")
    add("--rounds", type=int, default=5, help="rounds of both systems (default %(default)s)")
    add(
        "--systems",
        type=harness.names,
        default=_SYSTEMS,
        help="kvolt, dynamo, keys, before (default kvolt,dynamo)",
    )
    add("--before", type=Path, metavar="FOLDER", help="checkout of the kvolt that `before` runs")
    add("--seconds", type=float, default=_SECONDS, help="window of a load of requests (default %(default)g)")
    add("--https", action="store_true", help="all systems serve HTTPS")
    add("--router", choices=list(ROUTERS), default=next(iter(ROUTERS)), help="of both (default %(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.connections, options.rounds, options.systems = (16,), 1, ("keys",)
        options.https, options.seconds = True, 0.1
    if unknown := [name for name in options.systems if name not in (*_OF_KVOLT, "dynamo")]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_OF_KVOLT)}, dynamo")
    if ("before" in options.systems) != (options.before is not None):
        parser.error("--before FOLDER and the system before need each other")
    if min(options.connections) < 1 or options.rounds < 1:
        parser.error("connections and rounds must be positive")
    return options


@contextmanager
def _benches(options: argparse.Namespace, connections: int, dynamo: Dynamo | None) -> Iterator[list[Bench]]:
    """The systems, each once for each kind of mock."""
    steps = (None, light_step_s(connections))
    ours, theirs = ROUTERS[options.router]
    with ExitStack() as stack:
        num_workers = 1 if options.smoke else NUM_WORKERS

        def serve(system: str, step_s: float | None) -> Edge:
            if dynamo is not None and system == "dynamo":
                return stack.enter_context(
                    serve_dynamo(dynamo, step_s, router_mode=theirs, https=options.https)
                )
            more = {"PYTHONPATH": str(options.before.resolve() / "src")} if system == "before" else {}
            return stack.enter_context(
                serve_kvolt(
                    model_in(options.peer_dir),
                    step_s,
                    system,
                    frontend_arguments=("--router", ours),
                    num_workers=num_workers,
                    https=options.https,
                    keys=system == "keys",
                    **more,
                )
            )

        systems = [Edges(*(serve(system, step_s) for step_s in steps)) for system in options.systems]
        lead_s = 1.0 if options.smoke else 4.0
        yield [Bench(edges, connections, options.seconds, lead_s) for edges in systems]


# --- the report


def _us_per(load: str, count: str) -> Callable[[Row], float]:
    return lambda row: 1e6 * getattr(row, load).edge_cpu_s / getattr(getattr(row, load), count)


def _over(load: str, name: str, other: str) -> Callable[[Row], float]:
    return lambda row: float(getattr(getattr(row, load), name) / getattr(getattr(row, load), other))


def _flat_us(row: Row) -> float:
    return (_us_per("flat", "responses")(row) - _us_per("requests", "responses")(row)) / (FLAT_TOKENS - 1)


_LIGHT = Figure("CPU us per token, light", _us_per("light", "events"))
_FLAT = Figure("CPU us per token, flat out", _flat_us)
FIGURES = (
    Figure("CPU us per request", _us_per("requests", "responses"), ",.0f"),
    Figure("CPU us per request, text", _us_per("text", "responses"), ",.0f"),
    Figure("requests/s", _over("requests", "responses", "wall_s"), ",.0f"),
    _LIGHT,
    Figure("  tokens/s", _over("light", "events", "wall_s"), ",.0f"),
    Figure("  events per read", _over("light", "events", "reads")),
    _FLAT,
    Figure("  tokens/s", lambda row: row.flat.responses * FLAT_TOKENS / row.flat.wall_s, ",.0f"),
    Figure("  events per read", _over("flat", "events", "reads")),
    Figure("  events per token", "flat_events_per_token", ".3f"),
    Figure("  bytes per event", _over("flat", "num_bytes", "events"), ".0f"),
    Figure("  cores: edge", _over("flat", "edge_cpu_s", "wall_s")),
    Figure("  cores: mock", _over("flat", "mock_cpu_s", "wall_s")),
    Figure("  cores: client", _over("flat", "client_cpu_s", "wall_s")),
    Figure("RSS MiB", lambda row: row.rss_bytes / (1 << 20), ".0f"),
)
GOALS = {FIGURES[0]: 0.5, FIGURES[1]: 0.5, _LIGHT: 0.7, _FLAT: 0.5, FIGURES[-1]: 0.5}
"""Of the peer, at most."""


def edge_text(rows: Sequence[Row]) -> str:
    return "\n\n".join(
        comparison(f"{connections} connections", FIGURES, dict(mine.each("system")), *_sides(mine))
        for connections, mine in Rows(rows).each("connections")
    )


def _sides(rows: Rows[Any]) -> tuple[str, str]:
    """The first system and the one that it is compared to."""
    names = [*dict(rows.each("system")), ""]
    return names[0], names[1]


def bounds_text(rows: Sequence[Row]) -> str:
    """CPU of the first system beside the second: upper 95 % bounds of the median ratio and difference."""
    lines = []
    for connections, mine in Rows(rows).each("connections"):
        sides = dict(mine.each("system"))
        for figure in GOALS if len(sides) == 2 else ():
            ours, theirs = sides.values()
            pairs = ours.pairs(theirs, figure)
            ratio, more = (
                median_bound([work(*pair) for pair in pairs]) for work in (operator.truediv, operator.sub)
            )
            bound = "not resolved" if ratio is None else f"at most {ratio:.3f}, difference at most {more:.1f}"
            lines.append(
                f"{connections} connections, {figure.title}, {' / '.join(sides)}: median ratio {bound}"
            )
    return "\n".join(lines)


def goals_text(rows: Sequence[Row]) -> str:
    """With the strictest: kvolt's dearest token, which has a write to itself, over the peer's cheapest."""
    lines = []
    for connections, mine in Rows(rows).each("connections"):
        ours, theirs = mine.where(system=KVOLT_NAME), mine.where(system=DYNAMO_NAME)
        for figure, limit in GOALS.items():
            if ratio := ours.over(theirs, figure):
                name = f"{connections} connections: {figure.title} at most {limit:g} of {DYNAMO_NAME}"
                lines.append(goal(name, ratio.median <= limit, ratio))
        if strict := ours.over(theirs, _LIGHT, _FLAT):
            name = f"{connections} connections: a token, light, at most {GOALS[_LIGHT]:g} of {DYNAMO_NAME}'s flat out"
            lines.append(goal(name, strict.median <= GOALS[_LIGHT], strict))
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
