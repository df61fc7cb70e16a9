"""Opens of peers: bounded per turn of the loop, fair between connections, bounded in bytes."""

from __future__ import annotations

import asyncio
from typing import cast

from kvolt.core.errors import KvoltError, Overloaded
from kvolt.runtime.byte_budget import ByteBudget
from kvolt.runtime.open_gate import OPENS_PER_TURN, OpenGate
from kvolt.runtime.streams import ServedStream


class Stream:
    def __init__(self, source: str, body: bytes = b"") -> None:
        self.source = source
        self.body = body
        self.closed = False
        self.error: KvoltError | None = None

    def end(self, error: KvoltError) -> None:
        self.error = error
        self.closed = True


class Lab:
    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.started: list[Stream] = []
        self.budget = ByteBudget(limit_bytes, limit_bytes)
        self.gate = OpenGate(lambda stream: self.started.append(cast(Stream, stream)), self.budget)

    def open(self, source: str, body: bytes = b"") -> Stream:
        stream = Stream(source, body)
        self.gate.start(source, source, cast(ServedStream, stream))
        return stream


async def test_one_open_starts_at_once_and_a_burst_over_many_turns() -> None:
    lab = Lab()
    lab.open("a")
    assert len(lab.started) == 1
    for _ in range(10 * OPENS_PER_TURN):
        lab.open("a")
    assert len(lab.started) == OPENS_PER_TURN
    for turn in range(2, 6):
        await asyncio.sleep(0)
        assert len(lab.started) == turn * OPENS_PER_TURN
    while lab.gate.num_waiting:
        await asyncio.sleep(0)
    assert len(lab.started) == 10 * OPENS_PER_TURN + 1
    assert lab.budget.used_bytes == 0


async def test_another_connection_does_not_wait_behind_a_burst() -> None:
    lab = Lab()
    for _ in range(100 * OPENS_PER_TURN):
        lab.open("attacker")
    lab.open("normal")
    await asyncio.sleep(0)
    assert "normal" in [stream.source for stream in lab.started[:-OPENS_PER_TURN:-1]]
    lab.gate.forget("attacker")
    assert lab.budget.used_bytes == 0


async def test_a_cancelled_open_is_not_started() -> None:
    lab = Lab()
    for _ in range(OPENS_PER_TURN):
        lab.open("a")
    cancelled, kept = lab.open("a"), lab.open("a")
    cancelled.closed = True
    await asyncio.sleep(0)
    assert cancelled not in lab.started
    assert kept in lab.started


async def test_waiting_requests_are_refused_over_the_budget() -> None:
    lab = Lab(limit_bytes=1_000_000)
    streams = [lab.open("a", b"x" * 60_000) for _ in range(OPENS_PER_TURN + 30)]
    refused = [stream for stream in streams if stream.error is not None]
    assert refused
    assert all(isinstance(stream.error, Overloaded) for stream in refused)
    assert lab.budget.used_bytes <= 1_000_000
    while lab.gate.num_waiting:
        await asyncio.sleep(0)
    assert len(lab.started) + len(refused) == len(streams)
    lab.open("a")  # and goes on
    assert len(lab.started) + len(refused) == len(streams) + 1
