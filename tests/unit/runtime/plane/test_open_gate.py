"""Opens of peers: bounded per turn of the loop, fair between connections, bounded in bytes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import KvoltError, Overloaded
from kvolt.runtime.plane import open_gate
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.open_gate import OPENS_PER_TURN, OpenGate
from kvolt.runtime.plane.served_stream import ServedStream


class Stream:
    def __init__(self, source: str, body: bytes = b"") -> None:
        self.source = source
        self.body = body
        self.closed = False
        self.error: KvoltError | None = None
        self.on_released: Callable[[], None] | None = None

    def end(self, error: KvoltError) -> None:
        self.error = error
        self.close()

    def close(self) -> None:
        self.closed = True
        release, self.on_released = self.on_released, None
        if release is not None:
            release()


class Lab:
    def __init__(self, limit_bytes: int = 1 << 30) -> None:
        self.started: list[Stream] = []
        self.budget = ByteBudget(limit_bytes, limit_bytes)
        self.gate = OpenGate(lambda stream: self.started.append(cast(Stream, stream)), self.budget)

    def open(self, source: str, body: bytes = b"", peer_host: str | None = None) -> Stream:
        stream = Stream(source, body)
        self.gate.start_stream(source, peer_host or source, cast(ServedStream, stream))
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
    lab.gate.drop_source("attacker")
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


async def test_a_real_host_is_far_below_the_limits() -> None:
    lab = Lab()
    streams = [lab.open(f"frontend{number % 4}", peer_host="10.0.0.1") for number in range(4 * 12_000)]
    assert lab.gate.num_refused == 0
    assert lab.gate.num_open == len(streams)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=80))
def test_open_streams_are_limited_in_all_and_per_address(steps: list[tuple[int, bool]]) -> None:
    """Admitted and not closed is what counts, however the streams end."""

    async def main() -> None:
        lab = Lab()
        kept: list[Stream] = []
        for number, closes in steps:
            if closes and kept:
                kept.pop(number % len(kept)).close()
                continue
            source = f"2001:db8:0:{number // 2}::{number}"  # two networks with two addresses each
            by_group = Counter(stream.source[:12] for stream in kept)
            stream = lab.open(source)
            if len(kept) < 8 and by_group[source[:12]] < 5:
                assert stream.error is None
                kept.append(stream)
            else:
                assert isinstance(stream.error, Overloaded)
                assert stream.error.retryable
            assert lab.gate.num_open == len(kept)
        for stream in kept:
            stream.close()
        assert lab.gate.num_open == 0
        assert not lab.gate._peers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_gate, "MAX_STREAMS", 8)
        patch.setattr(open_gate, "MAX_STREAMS_PER_PEER", 5)
        asyncio.run(main())
