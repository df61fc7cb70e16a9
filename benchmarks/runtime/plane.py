"""What the request plane costs per item, beside a bare socket and grpc.aio.

Run from the repository's root: `python -m benchmarks.runtime.plane`. All systems run in every round,
one after the other, each as two fresh processes; CPU is user and system time of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.runtime import report
from benchmarks.runtime.over_kvolt import GENERATORS, ITERATOR, SINK, STEP, WHOLE
from benchmarks.runtime.over_socket import BARE
from benchmarks.runtime.pair import BrokenRun, Done, Pair, open_pair
from benchmarks.runtime.report import Row
from benchmarks.runtime.side_figures import BulkRow, MemoryRow, measure_bulk, measure_memory
from benchmarks.runtime.workload import Work

_FIRST_ITEMS = 2000
_WARM_UP_S = 0.3
_STEP_MULTIPLE = 16


def main() -> None:
    options = _options()
    try:
        results = asyncio.run(_run(options))
    except BrokenRun as error:
        sys.exit(f"no figures: {error}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if any(row.merged for row in results.get("rows", [])):
        sys.exit("items were merged: these are not figures for single items")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.runtime.plane", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--streams", type=_numbers, default=(1, 64, 1024), help="concurrent streams (default 1,64,1024)")
    add("--rounds", type=int, help="rounds of all systems (default 5)")
    add("--seconds", type=float, help="length of a measured window, about (default 2)")
    add("--items", type=int, help="items in a measured window, in place of --seconds")
    add(
        "--systems",
        type=lambda text: tuple(text.split(",")),
        default=report.SYSTEMS,
        help="some of them, by commas (default all): " + ", ".join(report.SYSTEMS),
    )
    add("--quick", action="store_true", help="two rounds of half a second: for a look, not for a claim")
    add("--memory", action="store_true", help="instead: memory of 10,000 idle streams on one connection")
    add("--memory-streams", type=int, default=10_000, help="how many (default %(default)s)")
    add(
        "--bulk", action="store_true", help="instead: delay of deltas beside 10 MB messages on one connection"
    )
    add("--bulk-bytes", type=int, default=10_000_000, help="size of those messages (default %(default)s)")
    add("--profile", action="store_true", help="instead: where the time goes, kvolt step and sink")
    add("--out", type=Path, help="write all figures as JSON to this file")
    options = parser.parse_args()
    rounds, seconds = (2, 0.5) if options.quick else (5, 2.0)
    options.rounds = rounds if options.rounds is None else options.rounds
    options.seconds = seconds if options.seconds is None else options.seconds
    unknown = [name for name in options.systems if name not in report.SYSTEMS]
    if unknown:
        parser.error(f"unknown systems {unknown}; known: {', '.join(report.SYSTEMS)}")
    if BARE in options.systems and WHOLE not in options.systems:
        parser.error(f"{BARE!r} repeats what {WHOLE!r} wrote: name both")
    if min(options.streams) < 1 or options.rounds < 1 or options.seconds <= 0:
        parser.error("streams, rounds and seconds are positive")
    return options


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {
        "machine": report.machine(),
        "options": {"rounds": options.rounds, "seconds": options.seconds, "items": options.items},
    }
    if options.profile:
        await _profile(options)
    elif options.memory:
        results["memory"] = await _memory(options)
    elif options.bulk:
        results["bulk"] = await _bulk(options)
    else:
        results["rows"] = rows = await _plane(options)
        results["lines"] = lines = report.lines(rows)
        print(report.plane_table(lines), *report.plane_goals(lines), sep="\n")
    results["load_1min_after"] = round(os.getloadavg()[0], 2)  # ours, and of others if it is above two
    return results


async def _plane(options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        for streams in options.streams:
            written: Row | None = None
            for system in (name for name in report.SYSTEMS if name in options.systems):
                if system == BARE:
                    assert written is not None
                    row = await _measure_limit(number, written, options.seconds)
                else:
                    row = await _measure(number, system, streams, options)
                if system == WHOLE:
                    written = row
                rows.append(row)
                print(
                    f"round {number}  {streams:>5} streams  {system:<17} {row.items_per_s:>11,.0f} items/s "
                    f"{row.cpu_us:>8.2f} us/item",
                    file=sys.stderr,
                )
    return rows


async def _measure(number: int, system: str, streams: int, options: argparse.Namespace) -> Row:
    async with open_pair(system, streams) as pair:
        done, steps = await _timed(pair, streams, options)
    items = steps * streams
    arrived = done.client.get("tokens", 0)
    if arrived != items:
        raise BrokenRun(f"{system}: {arrived} tokens arrived, {items} were sent")
    return _row(number, system, streams, items, done)


async def _timed(pair: Pair, streams: int, options: argparse.Namespace) -> tuple[Done, int]:
    """Warm up twice, the second time for long enough to know how many steps fill the window."""
    steps = _whole_steps(_FIRST_ITEMS, streams)
    first = await pair.work(Work(steps))
    steps = _whole_steps(_WARM_UP_S * steps * streams / first.wall_s, streams)
    second = await pair.work(Work(steps))
    items = options.items or options.seconds * steps * streams / second.wall_s
    steps = _whole_steps(items, streams)
    return await pair.work(Work(steps, measured=True)), steps


def _whole_steps(items: float, streams: int) -> int:
    """Whole windows of credit are whole multiples of this many steps."""
    return max(round(items / streams / _STEP_MULTIPLE), 1) * _STEP_MULTIPLE


async def _measure_limit(number: int, written: Row, seconds: float) -> Row:
    """As many writes and bytes in each direction as kvolt made in this round, repeated to fill the window."""
    size = written.num_bytes // written.writes
    async with open_pair(BARE, written.streams) as pair:
        first = await pair.work(Work(_FIRST_ITEMS, num_bytes=_FIRST_ITEMS * size))
        expected_s = first.wall_s / _FIRST_ITEMS * written.writes
        times = max(round(seconds / expected_s), 1)
        work = Work(
            written.writes * times,
            measured=True,
            num_bytes=written.num_bytes * times,
            replies=written.replies * times,
            reply_bytes=written.reply_bytes * times,
        )
        done = await pair.work(work)
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


async def _memory(options: argparse.Namespace) -> list[MemoryRow]:
    rows = [
        await measure_memory(system, options.memory_streams)
        for system in (SINK, ITERATOR, GENERATORS)
        if system in options.systems
    ]
    print(report.memory_table(rows))
    return rows


async def _bulk(options: argparse.Namespace) -> list[BulkRow]:
    rows = [
        await measure_bulk(number, report.GOAL_STREAMS, options.seconds, options.bulk_bytes)
        for number in range(1, options.rounds + 1)
    ]
    print(report.bulk_table(rows))
    return rows


async def _profile(options: argparse.Namespace) -> None:
    for streams in options.streams:
        for system in (name for name in (WHOLE, STEP, SINK) if name in options.systems):
            async with open_pair(system, streams, profile=True) as pair:
                done, _ = await _timed(pair, streams, options)
            for side, text in zip(("server", "client"), done.profiles, strict=True):
                print(f"=== {system}, {streams} streams, {side}", text, sep="\n")


if __name__ == "__main__":
    main()
