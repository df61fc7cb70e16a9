"""How long a client waits for tokens when requests come at a low rate."""

from __future__ import annotations

import bisect
import random
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
from benchmarks.frontend.client import WAIT_S, Connection, Load
from benchmarks.frontend.edges import Edge
from benchmarks.harness import BrokenRun

_CONTENT = re.compile(rb'"content": *"[^"]')
_MAX_UNDER_WAY = 64


class DelayRow(msgspec.Struct, frozen=True):
    """Milliseconds that a client waits at a low rate, in one round."""

    round: int
    system: str
    step_ms: float
    """Of the mock; 0 for one that takes no time."""
    requests: int
    first_p50_ms: float
    """From a request to its first token."""
    first_p99_ms: float
    gap_p50_ms: float
    """Between a stream's tokens."""
    gap_p99_ms: float


class Waits:
    """What the clients of a run have waited for, in milliseconds."""

    def __init__(self) -> None:
        self.first_ms: list[float] = []
        self.gaps_ms: list[float] = []

    def add(self, asked: float, token_times: Sequence[float]) -> None:
        self.first_ms.append((token_times[0] - asked) * 1e3)
        self.gaps_ms.extend((after - before) * 1e3 for before, after in pairwise(token_times))

    def row(self, number: int, edge: Edge) -> DelayRow:
        first, gaps = _percentiles(self.first_ms), _percentiles(self.gaps_ms)
        step_ms = (edge.step_s or 0.0) * 1e3
        return DelayRow(number, edge.name, step_ms, len(self.first_ms), *first, *gaps)


async def arrivals(edge: Edge, requests: Sequence[bytes], rate_per_s: float, seed: int) -> Waits:
    """Requests at random times, on connections that are open already."""
    rng = random.Random(seed)
    waits = Waits()
    async with Load(edge.port, _MAX_UNDER_WAY) as load:
        free = list(load.connections)
        due = time.perf_counter()
        for request in requests:
            due += rng.expovariate(rate_per_s)
            await load.sleep(max(due - time.perf_counter(), 0.0))
            if not free:
                raise BrokenRun(
                    f"{edge.name} has {_MAX_UNDER_WAY} answers under way: the rate is not low for it"
                )
            _ask(free.pop(), request, waits, free)
        deadline = time.monotonic() + WAIT_S
        while len(free) < _MAX_UNDER_WAY:
            await load.sleep(0.02)
            if time.monotonic() > deadline:
                raise BrokenRun(f"{edge.name}: answers did not end within {WAIT_S:.0f} s")
    return waits


def _ask(connection: Connection, request: bytes, waits: Waits, free: list[Connection]) -> None:
    reads = _Reads()

    def end(ended: Connection) -> None:
        waits.add(asked, reads.token_times())
        free.append(ended)

    connection.on_read = reads.add
    connection.on_end = end
    asked = time.perf_counter()
    connection.ask(request)


def _percentiles(values: Sequence[float]) -> tuple[float, float]:
    """The 50th and the 99th."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return cuts[49], cuts[98]


@dataclass(slots=True)
class _Reads:
    """A response as it came: bytes, and when each part was there."""

    body: bytearray = field(default_factory=bytearray)
    ends: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, data: bytes) -> None:
        self.times.append(time.perf_counter())
        self.body += data
        self.ends.append(len(self.body))

    def token_times(self) -> list[float]:
        """When each event that has text in it was there."""
        found = _CONTENT.finditer(self.body)
        return [self.times[bisect.bisect_left(self.ends, match.end())] for match in found]
