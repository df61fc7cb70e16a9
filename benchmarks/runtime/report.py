"""Figures as people and later runs read them: rows to spreads, ratios, tables, goals and JSON.

A ratio is taken within a round, where both sides met the same machine, and only then spread.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
import psutil
from benchmarks.runtime.over_kvolt import GENERATORS, ITERATOR, SINK, STEP, WHOLE
from benchmarks.runtime.over_socket import BARE, CODEC
from benchmarks.runtime.side_figures import BulkRow, MemoryRow

GRPC = "grpc.aio"
"""Named here, and not where it runs: the other reports that use this one need no grpcio."""
SYSTEMS = (WHOLE, BARE, STEP, SINK, CODEC, GRPC, ITERATOR, GENERATORS)

GOAL_STREAMS = 64
GOAL_OF_LIMIT = 2.0
GOAL_GRPC_OVER_KVOLT = 8.0
GOAL_MEMORY_BYTES = 1 << 30
GOAL_ADDED_MS = 20.0


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
    """Of the server; `replies` are the client's."""
    num_bytes: int
    replies: int
    reply_bytes: int
    merged: int

    @property
    def items_per_s(self) -> float:
        return self.items / self.wall_s

    @property
    def cpu_us(self) -> float:
        return (self.server_cpu_s + self.client_cpu_s) / self.items * 1e6


class Spread(msgspec.Struct, frozen=True):
    median: float
    low: float
    high: float

    def text(self, form: str = ".2f") -> str:
        return f"{self.median:{form}} ({self.low:{form}}..{self.high:{form}})"


class Line(msgspec.Struct, frozen=True):
    """A row of the table: one system at one number of streams, over all rounds."""

    system: str
    streams: int
    items_per_s: Spread
    cpu_us: Spread
    server_cpu_us: Spread
    client_cpu_us: Spread
    of_limit: Spread | None
    """CPU per item over that of the bare socket: smaller is better."""
    grpc_over_this: Spread | None
    """grpc.aio's CPU per item over that of this system: larger is better."""
    merged: int


def keep_results(out: Path, module: str, found: object, text: str, results: Mapping[str, object]) -> None:
    """`out`.txt as people read it, and `out`.json with the command, the machine as it was found, and all rows."""
    whole = {
        "command": shlex.join(["python", "-m", module, *sys.argv[1:]]),
        "machine": found,
        "load_1min_after": round(os.getloadavg()[0], 2),
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n")
    out.with_suffix(".txt").write_text(text + "\n")


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def lines(rows: Sequence[Row]) -> list[Line]:
    found = []
    for streams in sorted({row.streams for row in rows}):
        for system in SYSTEMS:
            mine = [row for row in rows if (row.system, row.streams) == (system, streams)]
            if mine:
                found.append(_line(mine, rows))
    return found


def _line(mine: Sequence[Row], rows: Sequence[Row]) -> Line:
    system, streams = mine[0].system, mine[0].streams
    cpu_us = {(row.round, row.system): row.cpu_us for row in rows if row.streams == streams}

    def ratio(of: Callable[[Row], float | None]) -> Spread | None:
        values = [value for row in mine if (value := of(row)) is not None]
        return spread(values) if values else None

    def of_limit(row: Row) -> float | None:
        limit = cpu_us.get((row.round, BARE))
        return None if limit is None else row.cpu_us / limit

    def grpc_over_this(row: Row) -> float | None:
        grpc = cpu_us.get((row.round, GRPC))
        return None if grpc is None else grpc / row.cpu_us

    return Line(
        system=system,
        streams=streams,
        items_per_s=spread([row.items_per_s for row in mine]),
        cpu_us=spread([row.cpu_us for row in mine]),
        server_cpu_us=spread([row.server_cpu_s / row.items * 1e6 for row in mine]),
        client_cpu_us=spread([row.client_cpu_s / row.items * 1e6 for row in mine]),
        of_limit=ratio(of_limit),
        grpc_over_this=ratio(grpc_over_this),
        merged=sum(row.merged for row in mine),
    )


# --- tables


def plane_table(found: Sequence[Line]) -> str:
    return _table(
        (
            "streams",
            "system",
            "items/s",
            "CPU us/item",
            "server",
            "client",
            "x limit",
            "grpc.aio x",
            "merged",
        ),
        [
            (
                str(line.streams),
                line.system,
                line.items_per_s.text(",.0f"),
                line.cpu_us.text(),
                f"{line.server_cpu_us.median:.2f}",
                f"{line.client_cpu_us.median:.2f}",
                line.of_limit.text() if line.of_limit else "-",
                line.grpc_over_this.text(".1f") if line.grpc_over_this else "-",
                str(line.merged),
            )
            for line in found
        ],
    )


def plane_goals(found: Sequence[Line]) -> list[str]:
    told = []
    for line in found:
        if line.streams != GOAL_STREAMS or line.system not in (WHOLE, STEP):
            continue
        if line.of_limit is not None:
            told.append(
                _goal(
                    f"{line.system}, {GOAL_STREAMS} streams: CPU/item at most {GOAL_OF_LIMIT:g} x the limit",
                    line.of_limit.median <= GOAL_OF_LIMIT,
                    f"{line.of_limit.median:.2f}",
                )
            )
        if line.grpc_over_this is not None:
            told.append(
                _goal(
                    f"{line.system}, {GOAL_STREAMS} streams: CPU/item at most 1/{GOAL_GRPC_OVER_KVOLT:g} of grpc.aio",
                    line.grpc_over_this.median >= GOAL_GRPC_OVER_KVOLT,
                    f"1/{line.grpc_over_this.median:.1f}",
                )
            )
    return told


def memory_table(rows: Sequence[MemoryRow]) -> str:
    mib = 1 << 20
    table = _table(
        ("streams", "system", "server MiB", "client MiB", "together MiB", "before MiB", "KiB/stream"),
        [
            (
                str(row.streams),
                row.system,
                f"{row.server_bytes / mib:.0f}",
                f"{row.client_bytes / mib:.0f}",
                f"{row.total_bytes / mib:.0f}",
                f"{(row.server_idle_bytes + row.client_idle_bytes) / mib:.0f}",
                f"{row.bytes_per_stream / 1024:.1f}",
            )
            for row in rows
        ],
    )
    goals = [
        _goal(
            f"{row.system}: both processes within {GOAL_MEMORY_BYTES / mib:.0f} MiB",
            row.total_bytes <= GOAL_MEMORY_BYTES,
            f"{row.total_bytes / mib:.0f} MiB",
        )
        for row in rows
    ]
    return "\n".join([table, *goals])


def bulk_table(rows: Sequence[BulkRow]) -> str:
    names = ("p50", "p99", "max")
    alone = [spread([getattr(row.alone, f"{name}_ms") for row in rows]) for name in names]
    beside = [spread([getattr(row.beside, f"{name}_ms") for row in rows]) for name in names]
    added = [spread([row.added_ms[at] for row in rows]) for at in range(len(names))]
    table = _table(
        ("delay ms", *names),
        [
            ("deltas alone", *(each.text() for each in alone)),
            ("beside long messages", *(each.text() for each in beside)),
            ("added (over the median alone)", *(each.text() for each in added)),
        ],
    )
    first = rows[0]
    about = (
        f"{first.streams} streams, a delta each every 2 ms; {first.payload_bytes / 1e6:g} MB messages back to back, "
        f"{sum(row.beside.payloads for row in rows)} in {len(rows)} rounds; {sum(row.merged for row in rows)} merged"
    )
    goal = _goal(
        f"a long message adds less than {GOAL_ADDED_MS:g} ms to others, at most",
        added[2].high < GOAL_ADDED_MS,
        f"{added[2].high:.1f} ms",
    )
    return "\n".join([about, table, goal])


def _goal(text: str, met: bool, value: str) -> str:
    return f"goal {'met   ' if met else 'missed'}  {text}: {value}"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in (head, *body)) for at in range(len(head))]
    rows = [head, ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


# --- results


def machine() -> dict[str, object]:
    """What a reader needs to compare figures; nothing that names the machine."""
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cores": os.cpu_count(),
        "cpu": _cpu_name(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.machine()}",
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {
            name: version for name in ("kvolt", "uvloop", "msgspec", "grpcio") if (version := _version(name))
        },
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()
