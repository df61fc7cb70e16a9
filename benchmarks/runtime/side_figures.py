"""The two figures beside throughput: memory of many idle streams, and what a long message adds to others' delay."""

from __future__ import annotations

import time

import msgspec
from benchmarks.runtime.over_kvolt_bulk import BULK
from benchmarks.runtime.pair import open_pair
from benchmarks.runtime.workload import Work

_MEMORY_STEPS = 5
_MEMORY_PAUSE_S = 0.5


class MemoryRow(msgspec.Struct, frozen=True):
    """Resident bytes of both processes, before the first stream and with all of them open."""

    system: str
    streams: int
    server_idle_bytes: int
    client_idle_bytes: int
    server_bytes: int
    client_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.server_bytes + self.client_bytes

    @property
    def bytes_per_stream(self) -> float:
        return (self.total_bytes - self.server_idle_bytes - self.client_idle_bytes) / self.streams


def measure_memory(system: str, streams: int) -> MemoryRow:
    """All streams on one connection; each gets an item now and then, so that none is a mere promise."""
    with open_pair(system, streams) as pair:
        done = pair.work(Work(steps=1))
        for _ in range(_MEMORY_STEPS):
            time.sleep(_MEMORY_PAUSE_S)
            done = pair.work(Work(steps=1))
        return MemoryRow(system, streams, *pair.idle_rss_bytes, done.server_rss_bytes, done.client_rss_bytes)


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

    @property
    def added_ms(self) -> tuple[float, float, float]:
        """p50, p99 and max over the median without long messages."""
        base = self.alone.p50_ms
        return self.beside.p50_ms - base, self.beside.p99_ms - base, self.beside.max_ms - base


def measure_bulk(number: int, streams: int, seconds: float, payload_bytes: int) -> BulkRow:
    interval_s = 0.002
    steps = max(int(seconds / interval_s), 50)
    with open_pair(BULK, streams) as pair:
        pair.work(Work(steps=50, interval_s=interval_s))
        alone = pair.work(Work(steps=steps, interval_s=interval_s))
        beside = pair.work(Work(steps=steps, interval_s=interval_s, payload_bytes=payload_bytes))
        return BulkRow(
            number,
            streams,
            payload_bytes,
            beside.server["merged"],
            msgspec.convert(alone.found, Delays),
            msgspec.convert(beside.found, Delays),
        )
