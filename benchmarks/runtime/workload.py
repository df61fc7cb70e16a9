"""Job of a pair of processes: the work in it, and the pace of its steps.

The step loop stands for an engine: each step gives one item to every open stream, then lets the loop
run. Items are made before the clock starts: making them is the engine's cost, carrying them the
plane's. Knows no transport.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import accumulate, islice
from typing import Any

import msgspec

from kvolt.core.delta import Delta, plain_delta

WAIT_S = 120.0
"""No wait in a benchmark is longer: a pair that hangs must fail, not stay."""

_MAX_LAG_STEPS = 64
_VOCABULARY = 150_000
_SAMPLE_TOKENS = 1 << 14


class Job(msgspec.Struct, frozen=True):
    """Job of one process of a pair, from start to end."""

    system: str
    side: str
    streams: int
    address: str = ""
    """Address of the server, for the client."""
    key: str = ""
    """Path of the cluster key, for TLS."""


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of work, sent to both sides; each reads its own part."""

    steps: int
    num_bytes: int = 0
    """Bare socket: bytes of all writes together; steps are writes there."""
    replies: int = 0
    reply_bytes: int = 0
    interval_s: float = 0.0
    """Bulk: time between two steps."""
    payload_bytes: int = 0
    """Bulk: size of the long messages beside the deltas; 0 for none."""


class Mark(msgspec.Struct, frozen=True):
    """A process's meters at one moment, all counted from its start."""

    cpu_s: float
    rss_bytes: int
    counters: dict[str, int] = {}


def sample_steps(num_streams: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Tokens of a few steps (a power of two), one per stream; ids are as frequent as words are."""
    rng = random.Random(seed)
    vocabulary = list(range(_VOCABULARY))
    rng.shuffle(vocabulary)
    weights = list(accumulate(1 / (rank + 3) for rank in range(_VOCABULARY)))
    num_steps = 1 << max((_SAMPLE_TOKENS // num_streams).bit_length() - 1, 1)
    drawn = iter(rng.choices(vocabulary, cum_weights=weights, k=num_steps * num_streams))
    return [tuple(islice(drawn, num_streams)) for _ in range(num_steps)]


class Tally:
    """Counts tokens on arrival; `consume` ends when as many came as were expected."""

    __slots__ = ("_done", "_failure", "_streams", "expected", "tokens")

    def __init__(self, num_streams: int) -> None:
        self.tokens = 0
        self.expected = 0
        self._streams = num_streams
        self._done: asyncio.Event = asyncio.Event()
        self._failure: BaseException | None = None

    def add(self, num_tokens: int) -> None:
        self.tokens += num_tokens
        if self.tokens >= self.expected:
            self.reach()

    def reach(self) -> None:
        self._done.set()

    def fail(self, error: BaseException | None) -> None:
        """A stream ended: no more will come of it."""
        self._failure = error
        self._done.set()

    async def consume(self, work: Work) -> dict[str, Any]:
        """Wait until all items of the work have arrived."""
        self.expected += work.num_bytes or work.steps * self._streams
        self._done.clear()
        if self.tokens < self.expected:
            async with asyncio.timeout(WAIT_S):
                await self._done.wait()
        if self.tokens < self.expected:
            raise RuntimeError(f"a stream ended early: {self._failure!r}")
        return {}


class Arrivals:
    """Counts streams as they are opened."""

    def __init__(self, num_expected: int) -> None:
        self._left = num_expected
        self._all = asyncio.Event()

    def add(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._all.set()

    async def wait(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self._all.wait()


class SteppedHandlers:
    """A server whose handlers are tasks of their own: each writes one item per step.

    The loop of steps runs ahead of slow handlers, but not without bound.
    """

    def __init__(self, job: Job) -> None:
        self._num_streams = job.streams
        self._arrivals = Arrivals(job.streams)
        self._deltas = [plain_delta(token_id) for (token_id,) in sample_steps(1)[:1024]]
        self._outstanding = 0
        self._step = 0
        self._tick = asyncio.Event()
        self._room = asyncio.Event()

    async def wait_open(self) -> None:
        await self._arrivals.wait()

    async def produce(self, work: Work) -> dict[str, Any]:
        for _ in range(work.steps):
            self._step += 1
            self._outstanding += self._num_streams
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()
            if self._outstanding > _MAX_LAG_STEPS * self._num_streams:
                self._room.clear()
                async with asyncio.timeout(WAIT_S):
                    await self._room.wait()
            await asyncio.sleep(0)
        return {}

    async def deltas(self) -> AsyncIterator[Delta]:
        """Items of one stream, one for each step."""
        self._arrivals.add()
        num_written = 0
        while True:
            while self._step <= num_written:
                await self._tick.wait()
            num_written += 1
            yield self._deltas[num_written & 1023]
            self._outstanding -= 1
            if self._outstanding <= _MAX_LAG_STEPS * self._num_streams:
                self._room.set()
