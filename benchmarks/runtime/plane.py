"""What the request plane costs per item, beside a bare socket and grpc.aio.

Run from the repository's root: `python -m benchmarks.runtime.plane`. All systems run in every round,
one after the other, each as two fresh processes; CPU is user and system time of both.
"""

from __future__ import annotations

import argparse
import importlib.util

import msgspec
from benchmarks.harness import BrokenRun, names, numbers, parser_for, run, say
from benchmarks.harness import report as write_report
from benchmarks.runtime import report
from benchmarks.runtime.over_kvolt import GENERATORS, ITERATOR, SINK, STEP, WHOLE
from benchmarks.runtime.over_socket import BARE
from benchmarks.runtime.pair import Done, Pair, open_pair
from benchmarks.runtime.report import GRPC, Row
from benchmarks.runtime.side_figures import BulkRow, MemoryRow, measure_bulk, measure_memory
from benchmarks.runtime.workload import Work

_FIRST_ITEMS = 2000
_WARM_UP_S = 0.3
_STEP_MULTIPLE = 16


def main() -> None:
    options = _options()
    if options.profile:
        _profile(options)
        return
    if options.memory:
        memory = _memory(options)
        write_report(options, report.memory_table(memory), {"memory": memory})
        return
    if options.bulk:
        bulk = _bulk(options)
        write_report(options, report.bulk_table(bulk), {"bulk": bulk})
        return
    rows = _plane(options)
    lines = report.lines(rows)
    text = "\n".join([report.plane_table(lines), *report.plane_goals(lines)])
    settings = {"rounds": options.rounds, "seconds": options.seconds, "items": options.items}
    write_report(options, text, {"options": settings, "rows": rows, "lines": lines})
    if any(row.merged for row in rows):
        raise BrokenRun("items were merged: the results are not those of single items")


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None)
    add = parser.add_argument
    add("--streams", type=numbers, default=(1, 64, 1024), help="concurrent streams (default 1,64,1024)")
    add("--rounds", type=int, default=5, help="rounds of all systems (default %(default)s)")
    add("--seconds", type=float, default=2.0, help="approximate measured window (default %(default)s)")
    add("--items", type=int, help="items in a measured window, instead of --seconds")
    add(
        "--systems", type=names, default=report.SYSTEMS, help=f"of {', '.join(report.SYSTEMS)} (default: all)"
    )
    add("--memory", action="store_true", help="instead: memory of 10,000 idle streams on one connection")
    add("--memory-streams", type=int, default=10_000, help="number of them (default %(default)s)")
    add(
        "--bulk", action="store_true", help="instead: delay of deltas beside 10 MB messages on one connection"
    )
    add("--bulk-bytes", type=int, default=10_000_000, help="size of those messages (default %(default)s)")
    add("--profile", action="store_true", help="instead: profile of kvolt step and sink")
    options = parser.parse_args()
    if options.smoke:
        options.streams, options.rounds, options.seconds = (4,), 1, 0.05
        options.systems, options.memory_streams = (WHOLE, BARE, SINK), 10
        if importlib.util.find_spec("grpc") is not None:
            options.systems += (GRPC,)
    unknown = [name for name in options.systems if name not in report.SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {unknown}; known: {', '.join(report.SYSTEMS)}")
    if BARE in options.systems and WHOLE not in options.systems:
        parser.error(f"{BARE!r} repeats the writes of {WHOLE!r}: name both")
    if min(options.streams) < 1 or options.rounds < 1 or options.seconds <= 0:
        parser.error("streams, rounds and seconds must be positive")
    return options


def _plane(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        for streams in options.streams:
            written: Row | None = None
            for system in (name for name in report.SYSTEMS if name in options.systems):
                if system == BARE:
                    assert written is not None
                    row = _measure_limit(number, written, options.seconds)
                else:
                    row = _measure(number, system, streams, options)
                if system == WHOLE:
                    written = row
                rows.append(row)
                say(
                    f"round {number}  {streams:>5} streams  {system:<17} {row.items_per_s:>11,.0f} items/s "
                    f"{row.cpu_us:>8.2f} us/item"
                )
    return rows


def _measure(number: int, system: str, streams: int, options: argparse.Namespace) -> Row:
    with open_pair(system, streams) as pair:
        done, steps = _timed(pair, streams, options)
    items = steps * streams
    arrived = done.client.get("tokens", 0)
    if arrived != items:
        raise BrokenRun(f"{system}: {arrived} tokens arrived, {items} were sent")
    return _row(number, system, streams, items, done)


def _timed(pair: Pair, streams: int, options: argparse.Namespace) -> tuple[Done, int]:
    """Warm up twice, the second time for long enough to know how many steps fill the window."""
    steps = _whole_steps(_FIRST_ITEMS, streams)
    first = pair.work(Work(steps))
    steps = _whole_steps(_WARM_UP_S * steps * streams / first.wall_s, streams)
    second = pair.work(Work(steps))
    items = options.items or options.seconds * steps * streams / second.wall_s
    steps = _whole_steps(items, streams)
    return pair.work(Work(steps, measured=True)), steps


def _whole_steps(items: float, streams: int) -> int:
    """Whole windows of credit are whole multiples of this many steps."""
    return max(round(items / streams / _STEP_MULTIPLE), 1) * _STEP_MULTIPLE


def _measure_limit(number: int, written: Row, seconds: float) -> Row:
    """As many writes and bytes in each direction as kvolt made in this round, repeated to fill the window."""
    size = written.num_bytes // written.writes
    with open_pair(BARE, written.streams) as pair:
        first = pair.work(Work(_FIRST_ITEMS, num_bytes=_FIRST_ITEMS * size))
        expected_s = first.wall_s / _FIRST_ITEMS * written.writes
        times = max(round(seconds / expected_s), 1)
        work = Work(
            written.writes * times,
            measured=True,
            num_bytes=written.num_bytes * times,
            replies=written.replies * times,
            reply_bytes=written.reply_bytes * times,
        )
        done = pair.work(work)
    row = _row(number, BARE, written.streams, written.items * times, done)
    return msgspec.structs.replace(
        row,
        writes=work.steps,
        num_bytes=done.client["bytes_in"],
        replies=work.replies,
        reply_bytes=done.server["bytes_in"],
    )


def _row(number: int, system: str, streams: int, items: int, done: Done) -> Row:
    return Row(
        round=number,
        system=system,
        streams=streams,
        items=items,
        wall_s=done.wall_s,
        server_cpu_s=done.server_cpu_s,
        client_cpu_s=done.client_cpu_s,
        writes=done.server.get("writes", 0),
        num_bytes=done.server.get("bytes_out", 0),
        replies=done.client.get("writes", 0),
        reply_bytes=done.client.get("bytes_out", 0),
        merged=done.server.get("merged", 0),
    )


def _memory(options: argparse.Namespace) -> list[MemoryRow]:
    systems = (system for system in (SINK, ITERATOR, GENERATORS) if system in options.systems)
    return [measure_memory(system, options.memory_streams) for system in systems]


def _bulk(options: argparse.Namespace) -> list[BulkRow]:
    return [
        measure_bulk(number, report.GOAL_STREAMS, options.seconds, options.bulk_bytes)
        for number in range(1, options.rounds + 1)
    ]


def _profile(options: argparse.Namespace) -> None:
    for streams in options.streams:
        for system in (name for name in (WHOLE, STEP, SINK) if name in options.systems):
            with open_pair(system, streams, profile=True) as pair:
                done, _ = _timed(pair, streams, options)
            for side, text in zip(("server", "client"), done.profiles, strict=True):
                print(f"=== {system}, {streams} streams, {side}", text, sep="\n")


if __name__ == "__main__":
    run(main)
