"""What the two processes of a pair agree on: the job, the work in it, and how steps are paced.

The step loop stands for an engine: each step gives one item to every open stream, then lets the loop
run. Items are made before the clock starts: making them is the engine's cost, carrying them the
plane's. Knows no transport.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any, Protocol

import msgspec

from kvolt.core.delta import Delta

WAIT_S = 120.0
"""No wait in a benchmark is longer: a pair that hangs must fail, not stay."""

_MAX_LAG_STEPS = 64


class Job(msgspec.Struct, frozen=True):
    """What one process of a pair is to be, from its start to its end."""

    system: str
    side: str
    streams: int
    address: str = ""
    """Of the server; the client is told."""
    profile: bool = False


class Work(msgspec.Struct, frozen=True, omit_defaults=True):
    """One stretch of work, sent to both sides; each takes from it what concerns it."""

    steps: int
    measured: bool = False
    num_bytes: int = 0
    """Bare socket: bytes of all writes together; steps are writes there."""
    replies: int = 0
    reply_bytes: int = 0
    interval_s: float = 0.0
    """Bulk: time between two steps."""
    payload_bytes: int = 0
    """Bulk: size of the long messages beside the deltas; 0 for none."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process is told: to work, or, without work, to read its meters."""

    work: Work | None = None


class Mark(msgspec.Struct, frozen=True):
    """A process's meters at one moment, all counted from its start."""

    cpu_s: float
    rss_bytes: int
    counters: dict[str, int] = {}


class Server(Protocol):
    """The producing side of a system under test."""

    address: str

    async def wait_open(self) -> None:
        """Until all streams of the job are there."""
        ...

    async def produce(self, work: Work) -> dict[str, Any]: ...

    def counters(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


class Client(Protocol):
    """The reading side of a system under test."""

    async def open(self) -> None: ...

    async def consume(self, work: Work) -> dict[str, Any]:
        """Until all that the work makes has arrived."""
        ...

    def counters(self) -> dict[str, int]: ...

    async def close(self) -> None: ...


def sample_deltas(num: int = 1024, seed: int = 0) -> list[Delta]:
    """One-token deltas with ids as a large vocabulary has them; `num` is a power of two."""
    rng = random.Random(seed)
    return [Delta(token_ids=(rng.randrange(150_000),)) for _ in range(num)]


class Tally:
    """Counts tokens on arrival; `reached` ends when as many came as were expected."""

    __slots__ = ("_done", "_failure", "expected", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        self.expected = 0
        self._done: asyncio.Event = asyncio.Event()
        self._failure: BaseException | None = None

    def reach(self) -> None:
        self._done.set()

    def fail(self, error: BaseException | None) -> None:
        """A stream ended: no more will come of it."""
        self._failure = error
        self._done.set()

    async def reached(self, more: int) -> None:
        self._done.clear()
        self.expected += more
        if self.tokens < self.expected:
            async with asyncio.timeout(WAIT_S):
                await self._done.wait()
        if self.tokens < self.expected:
            raise RuntimeError(f"a stream ended early: {self._failure!r}")


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


class StepClock:
    """Paces handlers that run in tasks of their own: each writes one item per step.

    The loop of steps runs ahead of slow handlers, but not without bound.
    """

    def __init__(self, num_streams: int) -> None:
        self._num_streams = num_streams
        self._max_lag = _MAX_LAG_STEPS * num_streams
        self._outstanding = 0
        self._step = 0
        self._tick = asyncio.Event()
        self._room = asyncio.Event()

    async def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step += 1
            self._outstanding += self._num_streams
            tick, self._tick = self._tick, asyncio.Event()
            tick.set()
            if self._outstanding > self._max_lag:
                self._room.clear()
                async with asyncio.timeout(WAIT_S):
                    await self._room.wait()
            await asyncio.sleep(0)

    async def after(self, num_written: int) -> None:
        """Until there is a step that the caller, who has written so many items, has not served."""
        while self._step <= num_written:
            await self._tick.wait()

    def written(self) -> None:
        self._outstanding -= 1
        if self._outstanding <= self._max_lag:
            self._room.set()
