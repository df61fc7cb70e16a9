"""Cost of the request plane per item, compared to a plain socket and grpc.aio.

Run from the repository's root: `python -m benchmarks.runtime.plane`. All systems run in every round,
one after the other, each as two fresh processes; CPU is user and system time of both.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from benchmarks.harness import (
    BrokenRun,
    Figure,
    Rows,
    goal,
    names,
    numbers,
    parser_for,
    report,
    run,
    say,
    spread,
    table,
)
from benchmarks.processes import Child, clean_environ
from benchmarks.runtime.over_kvolt import SINK, STEP, TLS, WHOLE
from benchmarks.runtime.over_kvolt_bulk import BULK
from benchmarks.runtime.over_socket import BARE
from benchmarks.runtime.workload import Job, Mark, Work

from kvolt.runtime.security.authority import ClusterAuthority

GRPC = "grpc.aio"
SYSTEMS = (WHOLE, BARE, TLS, STEP, SINK, GRPC)

GOAL_STREAMS = 64
GOAL_OF_LIMIT = 2.0
GOAL_GRPC_OVER_KVOLT = 8.0
GOAL_TLS = 1.5
GOAL_MEMORY_BYTES = 1 << 30
GOAL_ADDED_MS = 20.0

_FIRST_ITEMS = 2000
_WARM_UP_S = 0.3
_STEP_MULTIPLE = 16
_MIB = 1 << 20


def main() -> None:
    options = _options()
    seconds = 0.05 if options.smoke else 2.0
    if options.memory:
        memory = _measure_memory(10 if options.smoke else 10_000)
        report(options, memory_text(memory), {"memory": memory})
    elif options.bulk:
        bulk = [_measure_bulk(number, seconds) for number in range(1, options.rounds + 1)]
        report(options, bulk_text(bulk), {"bulk": bulk})
    else:
        rows = _plane(options, seconds)
        report(options, plane_text(rows), {"options": {"rounds": options.rounds}, "rows": rows})
        if any(row.merged for row in rows):
            raise BrokenRun("items were merged: the results are not those of single items")


def _options() -> argparse.Namespace:
    parser = parser_for(__file__, __doc__, results=None)
    add = parser.add_argument
    add("--streams", type=numbers, default=(1, 64, 1024), help="concurrent streams (default 1,64,1024)")
    add("--rounds", type=int, default=5, help="rounds of all systems (default %(default)s)")
    add("--systems", type=names, default=SYSTEMS, help=f"of {', '.join(SYSTEMS)} (default: all)")
    add("--memory", action="store_true", help="instead: memory of 10,000 idle streams on one connection")
    add("--bulk", action="store_true", help="instead: delay of deltas beside 10 MB messages")
    options = parser.parse_args()
    if options.smoke:
        has_grpc = importlib.util.find_spec("grpc") is not None
        options.streams, options.rounds = (4,), 1
        options.systems = (WHOLE, BARE, TLS, SINK, *((GRPC,) if has_grpc else ()))
    if unknown := [name for name in options.systems if name not in SYSTEMS]:
        parser.error(f"unknown systems {unknown}; known: {', '.join(SYSTEMS)}")
    if {BARE, TLS} & set(options.systems) and WHOLE not in options.systems:
        parser.error(f"{BARE!r} and {TLS!r} are compared with {WHOLE!r}: name it too")
    if min(options.streams) < 1 or options.rounds < 1:
        parser.error("streams and rounds must be positive")
    return options


# --- a server and a client as two processes, fresh for each measurement


def _start(job: Job) -> Child:
    command = [sys.executable, "-m", "benchmarks.runtime.child", msgspec.json.encode(job).decode()]
    return Child(f"{job.system} {job.side}", command, clean_environ())


def _mark(child: Child) -> Mark:
    child.send(None)
    return msgspec.convert(child.receive()["mark"], Mark)


class Done(msgspec.Struct, frozen=True):
    """Result of one stretch of work."""

    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    server: dict[str, int]
    """Counters of the server, over the work."""
    client: dict[str, int]
    server_rss_bytes: int
    client_rss_bytes: int
    found: dict[str, Any]
    """Measured by the client, besides its counters."""


class Pair:
    """A server and a client with all streams open."""

    def __init__(self, server: Child, client: Child) -> None:
        self._server = server
        self._client = client
        self.idle_rss_bytes: tuple[int, int] = (0, 0)
        """Resident sets of server and client before the first stream."""

    def work(self, work: Work) -> Done:
        before = _mark(self._server), _mark(self._client)
        self._client.send(work)
        self._server.send(work)
        produced, consumed = self._server.receive(), self._client.receive()
        after = _mark(self._server), _mark(self._client)
        started, ended = produced.pop("started"), consumed.pop("ended")
        return Done(
            wall_s=ended - started,
            server_cpu_s=after[0].cpu_s - before[0].cpu_s,
            client_cpu_s=after[1].cpu_s - before[1].cpu_s,
            server=_difference(before[0], after[0]),
            client=_difference(before[1], after[1]),
            server_rss_bytes=after[0].rss_bytes,
            client_rss_bytes=after[1].rss_bytes,
            found=consumed,
        )


def _difference(before: Mark, after: Mark) -> dict[str, int]:
    return {name: value - before.counters.get(name, 0) for name, value in after.counters.items()}


@contextmanager
def open_pair(system: str, streams: int) -> Iterator[Pair]:
    children: list[Child] = []
    with TemporaryDirectory() as folder:
        try:
            key = _new_key(Path(folder)) if system == TLS else ""
            yield _opened(system, streams, key, children)
        finally:
            for child in reversed(children):
                child.stop()


def _new_key(folder: Path) -> str:
    path = folder / "cluster.key"
    path.touch(0o600)
    path.write_bytes(ClusterAuthority.create(time.time()).to_pem())
    return str(path)


def _opened(system: str, streams: int, key: str, children: list[Child]) -> Pair:
    """Start both processes, added to `children`, and open all streams."""
    children.append(_start(Job(system, "server", streams, key=key)))
    hello = children[0].receive()
    children.append(_start(Job(system, "client", streams, hello["address"], key)))
    pair = Pair(children[0], children[1])
    greeting = children[1].receive()
    pair.idle_rss_bytes = hello["mark"]["rss_bytes"], greeting["mark"]["rss_bytes"]
    for child in children:
        child.receive()
    return pair


# --- throughput


class Row(msgspec.Struct, frozen=True):
    """One system at one number of streams in one round."""

    round: int
    system: str
    streams: int
    items: int
    wall_s: float
    server_cpu_s: float
    client_cpu_s: float
    writes: int
    """Writes of the server; `replies` are those of the client."""
    num_bytes: int
    replies: int
    reply_bytes: int
    merged: int


def _plane(options: argparse.Namespace, seconds: float) -> list[Row]:
    rows: list[Row] = []
    for number in range(1, options.rounds + 1):
        for streams in options.streams:
            written: Row | None = None
            for system in (name for name in SYSTEMS if name in options.systems):
                if system == BARE:
                    assert written is not None
                    row = _measure_limit(number, written, seconds)
                else:
                    row = _measure(number, system, streams, seconds)
                if system == WHOLE:
                    written = row
                rows.append(row)
                say(f"round {number}  {streams:>5} streams  {system:<17} {_CPU.value(row):>8.2f} us/item")
    return rows


def _measure(number: int, system: str, streams: int, seconds: float) -> Row:
    with open_pair(system, streams) as pair:
        done, steps = _timed(pair, streams, seconds)
    items = steps * streams
    arrived = done.client.get("tokens", 0)
    if arrived != items:
        raise BrokenRun(f"{system}: {arrived} tokens arrived, {items} were sent")
    return _row(number, system, streams, items, done)


def _timed(pair: Pair, streams: int, seconds: float) -> tuple[Done, int]:
    """Warm up twice, the second time for long enough to know how many steps fill the window."""
    steps = _whole_steps(_FIRST_ITEMS, streams)
    first = pair.work(Work(steps))
    steps = _whole_steps(_WARM_UP_S * steps * streams / first.wall_s, streams)
    second = pair.work(Work(steps))
    steps = _whole_steps(seconds * steps * streams / second.wall_s, streams)
    return pair.work(Work(steps)), steps


def _whole_steps(items: float, streams: int) -> int:
    """Whole windows of credit are whole multiples of this many steps."""
    return max(round(items / streams / _STEP_MULTIPLE), 1) * _STEP_MULTIPLE


def _measure_limit(number: int, written: Row, seconds: float) -> Row:
    """Measure a plain socket with as many writes and bytes per direction as kvolt made in this round, repeated to fill
    the window."""
    size = written.num_bytes // written.writes
    with open_pair(BARE, written.streams) as pair:
        first = pair.work(Work(_FIRST_ITEMS, num_bytes=_FIRST_ITEMS * size))
        times = max(round(seconds / (first.wall_s / _FIRST_ITEMS * written.writes)), 1)
        work = Work(
            written.writes * times,
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


_CPU = Figure("CPU us/item", lambda row: (row.server_cpu_s + row.client_cpu_s) / row.items * 1e6)
_FIGURES = (
    Figure("items/s", lambda row: row.items / row.wall_s, ",.0f"),
    _CPU,
    Figure("server", lambda row: row.server_cpu_s / row.items * 1e6),
    Figure("client", lambda row: row.client_cpu_s / row.items * 1e6),
)


def plane_text(rows: Sequence[Row]) -> str:
    body, goals = [], []
    for streams, mine in Rows(rows).each("streams"):
        limit, grpc = mine.where(system=BARE), mine.where(system=GRPC)
        for system, each in mine.each("system"):
            of_limit, gain = each.over(limit, _CPU), grpc.over(each, _CPU)
            merged = sum(row.merged for row in each.rows)
            body.append((str(streams), system, *each.cells(_FIGURES), of_limit, gain, str(merged)))
            if streams == GOAL_STREAMS and system == TLS:
                ratio = each.over(mine.where(system=WHOLE), _CPU)
                name = f"{TLS}, {GOAL_STREAMS} streams: CPU/item at most {GOAL_TLS:g} x {WHOLE}"
                goals.append(goal(name, ratio.median <= GOAL_TLS, ratio))
            if streams != GOAL_STREAMS or system not in (WHOLE, STEP):
                continue
            name = f"{system}, {GOAL_STREAMS} streams: CPU/item at most"
            if of_limit:
                is_met = of_limit.median <= GOAL_OF_LIMIT
                goals.append(goal(f"{name} {GOAL_OF_LIMIT:g} x the limit", is_met, of_limit))
            if gain:
                is_met = gain.median >= GOAL_GRPC_OVER_KVOLT
                goals.append(
                    goal(f"{name} 1/{GOAL_GRPC_OVER_KVOLT:g} of grpc.aio", is_met, f"1/{gain.median:.1f}")
                )
    head = ("streams", "system", *(each.title for each in _FIGURES), "x limit", "grpc.aio x", "merged")
    return "\n".join([table(head, body), *goals])


# --- memory of many idle streams


class MemoryRow(msgspec.Struct, frozen=True):
    """Resident bytes of both processes, before the first stream and with all of them open."""

    system: str
    streams: int
    server_idle_bytes: int
    client_idle_bytes: int
    server_bytes: int
    client_bytes: int


def _measure_memory(streams: int) -> MemoryRow:
    """All streams on one connection; each gets an item now and then, so that every stream is in use."""
    with open_pair(SINK, streams) as pair:
        done = pair.work(Work(steps=1))
        for _ in range(5):
            time.sleep(0.5)
            done = pair.work(Work(steps=1))
        return MemoryRow(SINK, streams, *pair.idle_rss_bytes, done.server_rss_bytes, done.client_rss_bytes)


def memory_text(row: MemoryRow) -> str:
    idle, total = row.server_idle_bytes + row.client_idle_bytes, row.server_bytes + row.client_bytes
    sizes = [f"{each / _MIB:.0f}" for each in (row.server_bytes, row.client_bytes, total, idle)]
    body = [(str(row.streams), row.system, *sizes, f"{(total - idle) / row.streams / 1024:.1f}")]
    head = "streams | system | server MiB | client MiB | together MiB | before MiB | KiB/stream"
    name = f"both processes within {GOAL_MEMORY_BYTES / _MIB:.0f} MiB"
    return f"{table(head, body)}\n{goal(name, total <= GOAL_MEMORY_BYTES, f'{total / _MIB:.0f} MiB')}"


# --- what a long message adds to the delay of others


class Delays(msgspec.Struct, frozen=True):
    """Milliseconds from the time a delta was due to its arrival."""

    p50_ms: float
    p99_ms: float
    max_ms: float
    payloads: int


class BulkRow(msgspec.Struct, frozen=True):
    """One round: the same deltas alone, then beside long messages sent back to back."""

    round: int
    streams: int
    payload_bytes: int
    merged: int
    alone: Delays
    beside: Delays


def _measure_bulk(number: int, seconds: float) -> BulkRow:
    interval_s, payload_bytes = 0.002, 10_000_000
    steps = max(int(seconds / interval_s), 50)
    with open_pair(BULK, GOAL_STREAMS) as pair:
        pair.work(Work(steps=50, interval_s=interval_s))
        alone = pair.work(Work(steps=steps, interval_s=interval_s))
        beside = pair.work(Work(steps=steps, interval_s=interval_s, payload_bytes=payload_bytes))
        delays = [msgspec.convert(each.found, Delays) for each in (alone, beside)]
        return BulkRow(number, GOAL_STREAMS, payload_bytes, beside.server["merged"], *delays)


def bulk_text(rows: Sequence[BulkRow]) -> str:
    names = ("p50", "p99", "max")
    alone, beside = (
        [[getattr(getattr(row, side), f"{name}_ms") for row in rows] for name in names]
        for side in ("alone", "beside")
    )
    added = [[late - base for late, base in zip(each, alone[0], strict=True)] for each in beside]
    lines = {"deltas alone": alone, "beside long messages": beside, "added (over the median alone)": added}
    body = [(name, *map(spread, each)) for name, each in lines.items()]
    about = (
        f"{rows[0].streams} streams, a delta each every 2 ms; {rows[0].payload_bytes / 1e6:g} MB messages in turn, "
        f"{sum(row.beside.payloads for row in rows)} in {len(rows)} rounds; {sum(row.merged for row in rows)} merged"
    )
    worst = max(added[2])
    name = f"a long message adds less than {GOAL_ADDED_MS:g} ms to others, at most"
    return "\n".join(
        [about, table(("delay ms", *names), body), goal(name, worst < GOAL_ADDED_MS, f"{worst:.1f} ms")]
    )


if __name__ == "__main__":
    run(main)
