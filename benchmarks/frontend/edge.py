"""What a request and a streamed token cost at the edge, kvolt's beside Dynamo's.

Run from the repository's root: `python -m benchmarks.frontend.edge`. Both systems are up at the same time,
with the same model, the same number of mock workers at the same speed, and round-robin routing, or with
`--router kv` each with its own KV router, fed by the events of its workers (blocks of 16 tokens on both
sides); they are loaded in turn, in every round, with the same prompts. CPU is user and system time of the
edge: the frontend with all its threads and children, not the mock workers. Both start anew for each number of
connections, so that memory is that of this load, and once for each speed of the mock, so that an edge
serves one model. What is measured, and how, is told in `measure`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
from benchmarks.frontend import report
from benchmarks.frontend.delays import DelayRow
from benchmarks.frontend.edges import (
    DYNAMO_NAME,
    NUM_WORKERS,
    Dynamo,
    Edge,
    installed_dynamo,
    model_in,
    serve_dynamo,
    serve_kvolt,
)
from benchmarks.frontend.measure import Bench, Edges, Row, busy_step_s, light_step_s
from benchmarks.frontend.profile_table import profile_text
from benchmarks.frontend.wrk import wrk_command, wrk_round
from benchmarks.harness import in_turn, names, numbers, parser_for, run, say
from benchmarks.harness import report as write_report

_SYSTEMS = ("kvolt", "dynamo")
ROUTERS = {"round-robin": ("round-robin", "round-robin"), "kv": ("latency", "kv")}
"""Router of kvolt and of Dynamo by name."""
_MIN_DELAY_S = 2.0


def main() -> None:
    options = _options()
    if options.profile:
        _profile(options)
        return
    if options.wrk:
        wrk_command()  # an error now, not after minutes
    dynamo = installed_dynamo(options.peer_dir) if "dynamo" in options.systems else None
    rows: list[Row] = []
    delays: list[DelayRow] = []
    for connections in options.connections:
        with _benches(options, connections, dynamo) as benches:
            for bench in benches:
                bench.warm_up()
            rows += _rounds(benches, connections, options)
            if connections == options.connections[0]:
                delays = _delays(benches, options)
    lines = report.lines(rows)
    parts = [report.edge_table(lines), "", report.delay_table(delays, options.rate), ""]
    settings = {name: getattr(options, name) for name in ("rounds", "seconds", "rate", "router")}
    results = {"peer": DYNAMO_NAME, "options": settings, "lines": lines, "rows": rows, "delays": delays}
    write_report(options, "\n".join([*parts, *report.edge_goals(lines), *report.strict_goals(rows)]), results)


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None, peer=DYNAMO_NAME)
    add = parser.add_argument
    add("--connections", type=numbers, default=(64, 512), help="concurrent clients (default 64,512)")
    add("--rounds", type=int, default=5, help="rounds of both systems (default %(default)s)")
    add("--seconds", type=float, default=5.0, help="approximate window for requests (default %(default)s)")
    add("--rate", type=float, default=20.0, help="requests/s when delays are measured (default %(default)s)")
    add("--systems", type=names, default=_SYSTEMS, help="default kvolt,dynamo")
    add("--router", choices=list(ROUTERS), default=next(iter(ROUTERS)), help="of both (default %(default)s)")
    add("--processes", type=int, default=1, help="processes of kvolt's frontend (default 1)")
    add("--wrk", action="store_true", help="in addition: the same loads from wrk, as a second opinion")
    add("--profile", action="store_true", help="instead: profile of kvolt's frontend under each load")
    options = parser.parse_args()
    if options.smoke:
        options.connections, options.rounds, options.seconds, options.systems = (16,), 1, 0.1, ("kvolt",)
    if unknown := [name for name in options.systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    if min(options.connections) < 1 or options.rounds < 1 or options.seconds <= 0 or options.rate <= 0:
        parser.error("connections, rounds, seconds and rate must be positive")
    return options


@contextmanager
def _benches(
    options: argparse.Namespace,
    connections: int,
    dynamo: Dynamo | None = None,
    profile_path: Path | None = None,
) -> Iterator[list[Bench]]:
    """The systems, each once for each kind of mock."""
    steps = (None, light_step_s(connections), busy_step_s(connections))
    with ExitStack() as stack:
        systems = []
        if "kvolt" in options.systems:
            model = model_in(options.peer_dir)
            arguments = ["--router", ROUTERS[options.router][0]]
            if options.processes > 1:
                arguments += ["--processes", str(options.processes)]

            def served(step_s: float | None) -> Edge:
                edge = serve_kvolt(
                    model,
                    step_s,
                    frontend_arguments=arguments,
                    profile_path=profile_path,
                    num_workers=1 if options.smoke else NUM_WORKERS,
                )
                return stack.enter_context(edge)

            systems.append(Edges(*map(served, steps)))
        if dynamo is not None:
            mode = ROUTERS[options.router][1]
            edges = (stack.enter_context(serve_dynamo(dynamo, step_s, router_mode=mode)) for step_s in steps)
            systems.append(Edges(*edges))
        lead_s = 1.0 if options.smoke else 4.0
        yield [Bench(edges, connections, options.seconds, lead_s) for edges in systems]


def _rounds(benches: Sequence[Bench], connections: int, options: argparse.Namespace) -> list[Row]:
    rows = []
    for number in range(1, options.rounds + 1):
        for bench in in_turn(benches, number):
            row = bench.round(number)
            if options.wrk:
                figures = wrk_round(bench.edges.flat, connections, options.seconds)
                row = msgspec.structs.replace(row, wrk=figures)
            rows.append(row)
            say(
                f"round {number}  {connections:>4} connections  {row.system:<12} "
                f"{row.cpu_us_per_request:>7.0f} us/request  {row.light_cpu_us_per_token:>6.2f} us/token light  "
                f"{row.busy_cpu_us_per_token:>6.2f} busy  {row.flat_cpu_us_per_token:>6.2f} flat out  "
                f"{row.rss_bytes >> 20:>4} MiB"
            )
    return rows


def _delays(benches: Sequence[Bench], options: argparse.Namespace) -> list[DelayRow]:
    seconds = max(options.seconds * 0.75, _MIN_DELAY_S)
    return [
        row
        for number in range(1, options.rounds + 1)
        for bench in in_turn(benches, number)
        for row in bench.delays(number, options.rate, seconds)
    ]


def _profile(options: argparse.Namespace) -> None:
    options.systems = ("kvolt",)
    for connections in options.connections:
        with (
            TemporaryDirectory() as folder,
            _benches(options, connections, profile_path=Path(folder) / "found") as (bench,),
        ):
            bench.warm_up()
            for title, load in (
                ("requests of one token", bench.requests),
                ("tokens, light", bench.light),
                ("tokens, busy", bench.busy),
                ("tokens flat out", bench.flat),
            ):
                text = profile_text(Path(folder) / "found", load)
                print(f"=== {connections} connections, {title}", text, "", sep="\n")


if __name__ == "__main__":
    run(main)
