"""CPU cost of a request and of a streamed token at the edge, kvolt compared to Dynamo.

Run from the repository's root: `python -m benchmarks.frontend.edge`. Both systems are up at the same time,
with the same model, the same number of mock workers at the same speed, and round-robin routing, or with
`--router kv` each with its own KV router, fed by the events of its workers (blocks of 16 tokens on both
sides); they are loaded in turn, in every round, with the same prompts. CPU is user and system time of the
edge: the frontend with all its threads and children, not the mock workers. Both start anew for each number of
connections, so that memory is that of this load, and once for each speed of the mock, so that an edge
serves one model. `measure` describes what is measured, and how.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from benchmarks import harness
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    KVOLT_NAME,
    NUM_WORKERS,
    Dynamo,
    installed_dynamo,
    model_in,
    serve_dynamo,
    serve_kvolt,
)
from benchmarks.frontend.measure import FLAT_TOKENS, Bench, Edges, Row, light_step_s
from benchmarks.harness import Figure, Rows, cell, comparison, goal, in_turn, run, say

_SYSTEMS = ("kvolt", "dynamo")
ROUTERS = {"round-robin": ("round-robin", "round-robin"), "kv": ("latency", "kv")}
"""Router of kvolt and of Dynamo by name."""
_SECONDS = 5.0
"""Approximate window for requests."""


def main() -> None:
    options = _options()
    seconds = 0.1 if options.smoke else _SECONDS
    dynamo = installed_dynamo(options.peer_dir) if "dynamo" in options.systems else None
    rows: list[Row] = []
    for connections in options.connections:
        with _benches(options, connections, seconds, dynamo) as benches:
            for bench in benches:
                bench.warm_up()
            for number in range(1, options.rounds + 1):
                for bench in in_turn(benches, number):
                    rows.append(bench.round(number))
                    shown = (f"{each.title} {cell(each.value(rows[-1]), each.form)}" for each in FIGURES)
                    say(f"round {number}  {connections:>4} connections  {bench.name}  {'  '.join(shown)}")
    settings = {name: getattr(options, name) for name in ("rounds", "router")}
    results = {"peer": DYNAMO_NAME, "options": settings, "rows": rows}
    harness.report(options, f"{edge_text(rows)}\n\n{goals_text(rows)}", results)


def _options() -> argparse.Namespace:
    parser = harness.parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    add = parser.add_argument
    add("--connections", type=harness.numbers, default=(64, 512), help="concurrent clients (default 64,512)")
    add("--rounds", type=int, default=5, help="rounds of both systems (default %(default)s)")
    add("--systems", type=harness.names, default=_SYSTEMS, help="default kvolt,dynamo")
    add("--router", choices=list(ROUTERS), default=next(iter(ROUTERS)), help="of both (default %(default)s)")
    options = parser.parse_args()
    if options.smoke:
        options.connections, options.rounds, options.systems = (16,), 1, ("kvolt",)
    if unknown := [name for name in options.systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    if min(options.connections) < 1 or options.rounds < 1:
        parser.error("connections and rounds must be positive")
    return options


@contextmanager
def _benches(
    options: argparse.Namespace, connections: int, seconds: float, dynamo: Dynamo | None
) -> Iterator[list[Bench]]:
    """The systems, each once for each kind of mock."""
    steps = (None, light_step_s(connections))
    ours, theirs = ROUTERS[options.router]
    with ExitStack() as stack:
        systems = []
        if "kvolt" in options.systems:
            model, num_workers = model_in(options.peer_dir), 1 if options.smoke else NUM_WORKERS
            flags = ("--router", ours)
            kvolts = (
                serve_kvolt(model, step_s, frontend_arguments=flags, num_workers=num_workers)
                for step_s in steps
            )
            systems.append(Edges(*map(stack.enter_context, kvolts)))
        if dynamo is not None:
            dynamos = (serve_dynamo(dynamo, step_s, router_mode=theirs) for step_s in steps)
            systems.append(Edges(*map(stack.enter_context, dynamos)))
        yield [Bench(edges, connections, seconds, 1.0 if options.smoke else 4.0) for edges in systems]


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
        comparison(f"{connections} connections", FIGURES, dict(mine.each("system")), KVOLT_NAME, DYNAMO_NAME)
        for connections, mine in Rows(rows).each("connections")
    )


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
