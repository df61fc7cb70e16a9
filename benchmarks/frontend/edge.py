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
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from benchmarks.frontend import kvolt_side, peer, report
from benchmarks.frontend.delays import DelayRow
from benchmarks.frontend.measure import Bench, Edges, Row, busy_step_s, light_step_s
from benchmarks.frontend.profile_table import profile_text
from benchmarks.frontend.system import Edge
from benchmarks.frontend.wrk import wrk_command, wrk_round
from benchmarks.runtime.pair import BrokenRun

_SYSTEMS = ("kvolt", "dynamo")
ROUTERS = {"round-robin": ("round-robin", "round-robin"), "kv": ("latency", "kv")}
"""What it is called here, at kvolt and at the peer."""
_MIN_DELAY_S = 2.0


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the processes we started end too
    try:
        if options.profile:
            _profile(options)
            return
        results = _run(options)
    except BrokenRun as error:
        sys.exit(f"no figures: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontend.edge", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--connections", type=_numbers, default=(64, 512), help="concurrent clients (default 64,512)")
    add("--rounds", type=int, help="rounds of both systems (default 5)")
    add(
        "--seconds",
        type=float,
        help="length of the window for requests, about; others are shorter (default 5)",
    )
    add("--rate", type=float, default=20.0, help="requests/s when delays are measured (default %(default)s)")
    add("--quick", action="store_true", help="two rounds of two seconds: for a look, not for a claim")
    add("--systems", type=lambda text: tuple(text.split(",")), default=_SYSTEMS, help="default kvolt,dynamo")
    add("--router", choices=list(ROUTERS), default=next(iter(ROUTERS)), help="of both (default %(default)s)")
    add("--processes", type=int, default=1, help="of kvolt's frontend (default 1)")
    add("--wrk", action="store_true", help="in addition: the same loads from wrk, as a second opinion")
    add("--profile", action="store_true", help="instead: where the time of kvolt's frontend goes")
    add("--peer-dir", type=Path, default=peer.default_folder(), help="where Dynamo is or will be installed")
    add("--out", type=Path, help="write all figures as JSON to this file")
    options = parser.parse_args()
    rounds, seconds = (2, 2.0) if options.quick else (5, 5.0)
    options.rounds = rounds if options.rounds is None else options.rounds
    options.seconds = seconds if options.seconds is None else options.seconds
    if unknown := [name for name in options.systems if name not in _SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(_SYSTEMS)}")
    if min(options.connections) < 1 or options.rounds < 1 or options.seconds <= 0 or options.rate <= 0:
        parser.error("connections, rounds, seconds and rate are positive")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _run(options: argparse.Namespace) -> dict[str, Any]:
    if options.wrk:
        wrk_command()  # an error now, not after minutes
    dynamo = peer.installed(options.peer_dir) if "dynamo" in options.systems else None
    results = report.run_facts(shlex.join(["python", "-m", "benchmarks.frontend.edge", *sys.argv[1:]]))
    rows: list[Row] = []
    delays: list[DelayRow] = []
    for connections in options.connections:
        with _benches(options, connections, dynamo) as benches:
            for bench in benches:
                bench.warm_up()
            rows += _rounds(benches, connections, options)
            if connections == options.connections[0]:
                delays = _delays(benches, options)
    found = report.lines(rows)
    print(report.edge_table(found), "", report.delay_table(delays, options.rate), "", sep="\n")
    print(*report.edge_goals(found), *report.strict_goals(rows), sep="\n")
    return {
        **results,
        "options": {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "rate": options.rate,
            "router": options.router,
        },
        "lines": found,
        "rows": rows,
        "delays": delays,
        "load_1min_after": round(os.getloadavg()[0], 2),
    }


@contextmanager
def _benches(
    options: argparse.Namespace,
    connections: int,
    dynamo: peer.Peer | None = None,
    profile_path: Path | None = None,
) -> Iterator[list[Bench]]:
    """The systems, each once for each kind of mock."""
    steps = (None, light_step_s(connections), busy_step_s(connections))
    with ExitStack() as stack:
        systems = []
        if "kvolt" in options.systems:
            model = peer.model_beside(options.peer_dir)
            arguments = ["--router", ROUTERS[options.router][0]]
            if options.processes > 1:
                arguments += ["--processes", str(options.processes)]

            def serve_kvolt(step_s: float | None) -> Edge:
                served = kvolt_side.serve(
                    model, step_s, frontend_arguments=arguments, profile_path=profile_path
                )
                return stack.enter_context(served)

            systems.append(Edges(*map(serve_kvolt, steps)))
        if dynamo is not None:
            mode = ROUTERS[options.router][1]
            edges = (stack.enter_context(peer.serve(dynamo, step_s, router_mode=mode)) for step_s in steps)
            systems.append(Edges(*edges))
        yield [Bench(edges, connections, options.seconds) for edges in systems]


def _rounds(benches: Sequence[Bench], connections: int, options: argparse.Namespace) -> list[Row]:
    rows = []
    for number in range(1, options.rounds + 1):
        for bench in _in_turn(benches, number):
            row = bench.round(number)
            if options.wrk:
                figures = wrk_round(bench.edges.flat, connections, options.seconds)
                row = msgspec.structs.replace(row, wrk=figures)
            rows.append(row)
            print(
                f"round {number}  {connections:>4} connections  {row.system:<12} "
                f"{row.cpu_us_per_request:>7.0f} us/request  {row.light_cpu_us_per_token:>6.2f} us/token light  "
                f"{row.busy_cpu_us_per_token:>6.2f} busy  {row.flat_cpu_us_per_token:>6.2f} flat out  "
                f"{row.rss_bytes >> 20:>4} MiB",
                file=sys.stderr,
            )
    return rows


def _delays(benches: Sequence[Bench], options: argparse.Namespace) -> list[DelayRow]:
    seconds = max(options.seconds * 0.75, _MIN_DELAY_S)
    return [
        row
        for number in range(1, options.rounds + 1)
        for bench in _in_turn(benches, number)
        for row in bench.delays(number, options.rate, seconds)
    ]


def _in_turn(benches: Sequence[Bench], number: int) -> Sequence[Bench]:
    """Who comes first changes from round to round."""
    return benches if number % 2 else benches[::-1]


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
    main()
