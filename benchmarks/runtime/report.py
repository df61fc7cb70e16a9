"""Report of the request plane: spreads over rounds, ratios within a round, tables and goals."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
from benchmarks.harness import Spread, goal, spread, table
from benchmarks.runtime.over_kvolt import GENERATORS, ITERATOR, SINK, STEP, WHOLE
from benchmarks.runtime.over_socket import BARE, CODEC
from benchmarks.runtime.side_figures import BulkRow, MemoryRow

GRPC = "grpc.aio"
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
    head = "streams | system | items/s | CPU us/item | server | client | x limit | grpc.aio x | merged"
    body = [
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
    ]
    return table(head, body)


def plane_goals(found: Sequence[Line]) -> list[str]:
    texts = []
    for line in found:
        if line.streams != GOAL_STREAMS or line.system not in (WHOLE, STEP):
            continue
        name = f"{line.system}, {GOAL_STREAMS} streams: CPU/item at most"
        if line.of_limit is not None:
            ratio = line.of_limit.median
            texts.append(
                goal(f"{name} {GOAL_OF_LIMIT:g} x the limit", ratio <= GOAL_OF_LIMIT, f"{ratio:.2f}")
            )
        if line.grpc_over_this is not None:
            ratio = line.grpc_over_this.median
            is_met = ratio >= GOAL_GRPC_OVER_KVOLT
            texts.append(goal(f"{name} 1/{GOAL_GRPC_OVER_KVOLT:g} of grpc.aio", is_met, f"1/{ratio:.1f}"))
    return texts


def memory_table(rows: Sequence[MemoryRow]) -> str:
    mib = 1 << 20
    text = table(
        "streams | system | server MiB | client MiB | together MiB | before MiB | KiB/stream",
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
        goal(
            f"{row.system}: both processes within {GOAL_MEMORY_BYTES / mib:.0f} MiB",
            row.total_bytes <= GOAL_MEMORY_BYTES,
            f"{row.total_bytes / mib:.0f} MiB",
        )
        for row in rows
    ]
    return "\n".join([text, *goals])


def bulk_table(rows: Sequence[BulkRow]) -> str:
    names = ("p50", "p99", "max")
    alone = [spread([getattr(row.alone, f"{name}_ms") for row in rows]) for name in names]
    beside = [spread([getattr(row.beside, f"{name}_ms") for row in rows]) for name in names]
    added = [spread([row.added_ms[at] for row in rows]) for at in range(len(names))]
    text = table(
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
    met = goal(
        f"a long message adds less than {GOAL_ADDED_MS:g} ms to others, at most",
        added[2].high < GOAL_ADDED_MS,
        f"{added[2].high:.1f} ms",
    )
    return "\n".join([about, text, met])
