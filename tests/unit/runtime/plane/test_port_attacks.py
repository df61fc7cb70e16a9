"""What a stranger who reaches a request plane port can do to a process: little."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import ErrorInfo, KvoltError
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.plane import open_gate, tcp_plane, wire
from kvolt.runtime.plane.connection import ConnectionOptions
from kvolt.runtime.plane.open_gate import OPENS_PER_TURN
from kvolt.runtime.plane.port import Destination, IncomingStream
from kvolt.runtime.plane.session import UNFINISHED_S, SessionLimits
from kvolt.runtime.plane.tcp_plane import TcpPlane
from kvolt.runtime.plane.wire import FrameKind
from kvolt.testing.virtual.loop import VirtualLoop, run_virtual
from kvolt.testing.virtual.network import VirtualNetwork

MB = 1 << 20
LIMITS = SessionLimits(max_message_bytes=8 * MB)
HELLO = wire.frame(
    FrameKind.HELLO,
    0,
    wire.encode(
        wire.Hello(
            versions=wire.VERSIONS,
            process="stranger",
            max_frame_bytes=1 << 20,
            max_message_bytes=64 << 20,
            heartbeat_s=1.0,
        )
    ),
)


class Stranger(asyncio.Protocol):
    """Says what it likes, and reads what it is answered."""

    def __init__(self) -> None:
        self.frames: list[wire.Frame] = []
        self.is_open = True
        self._decoder = wire.FrameDecoder(1 << 24)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.frames += self._decoder.feed(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False

    def say(self, *frames: bytes) -> None:
        self.transport.write(b"".join(frames))

    @property
    def refusals(self) -> list[str]:
        found = [
            info.code
            for kind, _, payload in self.frames
            if kind == FrameKind.ENDS
            for _, info in wire.decode_ends(payload)
            if info is not None
        ]
        return found + [
            str(msgspec.msgpack.decode(payload, type=ErrorInfo).fields.get("rule"))
            for kind, _, payload in self.frames
            if kind == FrameKind.REFUSE
        ]


def open_frame(stream_id: int, chunked: bool, target: str = "echo", body: bytes = wire.NIL) -> bytes:
    opening = wire.Open(target, 8, None, {}, chunked, msgspec.Raw(body))
    return wire.frame(FrameKind.OPEN, stream_id, wire.encode(opening))


class World:
    def __init__(self) -> None:
        self.network = VirtualNetwork(random.Random(1))
        self.received: list[int] = []
        self.started_in_turn: Counter[int] = Counter()
        self.server = self.process("server", self.serve)
        self.client = self.process("client", self.serve)

    def process(self, name: str, serve: Callable[[IncomingStream], None]) -> TcpPlane:
        return TcpPlane(self.network.host(name), ConnectionOptions(limits=LIMITS), name, serve)

    def serve(self, stream: IncomingStream) -> None:
        self.received.append(len(stream.decode_body(msgspec.msgpack.decode)))
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.started_in_turn[loop._num_iterations] += 1
        stream.end()

    async def stranger(self, host: str = "stranger") -> Stranger:
        made = Stranger()
        await self.network.host(host).connect("server:7000", lambda: made, 5.0)
        return made

    async def greeted(self, host: str = "stranger") -> Stranger:
        made = await self.stranger(host)
        made.say(HELLO)
        await asyncio.sleep(0.1)
        return made

    async def is_served(self, num_bytes: int = 10) -> bool:
        stream = await open_stream(
            self.client,
            Destination("server:7000", "echo"),
            b"x" * num_bytes,
            Deadlines(),
            msgspec.msgpack.decode,
        )
        try:
            async with stream:
                assert [item async for item in stream] == []
        except KvoltError:
            return False
        return self.received[-1] == num_bytes


def in_world(test: Callable[[World], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    async def main() -> None:
        world = World()
        await world.server.listen("server:7000")
        try:
            await test(world)
        finally:
            await world.client.close()
            await world.server.close()
            world.network.close()

    def run() -> None:
        run_virtual(main, until_s=600)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_world
async def test_unfinished_messages_of_strangers_are_bounded_and_a_normal_request_is_served(
    world: World,
) -> None:
    chunk = wire.frame(FrameKind.CHUNK, 0, b"\0" + b"x" * wire.CHUNK_BYTES)
    strangers = [await world.greeted(f"stranger{number}") for number in range(4)]
    budget = world.server.unfinished
    most = 0
    for stranger in strangers:
        stranger.say(*[open_frame(stream_id, True) for stream_id in (1, 3, 5, 7)])
    for _ in range(7 * MB // wire.CHUNK_BYTES):  # 4 x 4 messages of 7 MB: 112 MB, none with its last piece
        for stranger in strangers:
            for stream_id in (1, 3, 5, 7):
                stranger.say(chunk[:5] + stream_id.to_bytes(4, "little") + chunk[9:])
        await asyncio.sleep(0.01)
        most = max(most, budget.used_bytes)
        kept = sum(connection.session.unfinished_bytes for connection in world.server.all())
        assert kept <= budget.limit_bytes + MB
    assert budget.num_shed > 0
    assert most <= budget.limit_bytes == 4 * LIMITS.max_message_bytes
    assert any("overloaded" in stranger.refusals for stranger in strangers)
    assert await world.is_served()
    assert await world.is_served(8 * MB - 100)  # the largest request that there may be
    assert budget.num_shed > 0


@in_world
async def test_a_message_that_never_ends_is_refused_in_time(world: World) -> None:
    stranger = await world.greeted()
    stranger.say(open_frame(1, True), wire.frame(FrameKind.CHUNK, 1, b"\0" + b"x" * 60_000))
    for _ in range(int(UNFINISHED_S) + 5):
        stranger.say(wire.frame(FrameKind.CHUNK, 1, b"\0x"))
        await asyncio.sleep(1.0)
    assert stranger.refusals == ["deadline_exceeded"]
    assert stranger.is_open
    assert world.server.unfinished.used_bytes == 0


@in_world
async def test_an_open_whose_request_never_comes_is_refused_in_time(world: World) -> None:
    stranger = await world.greeted()
    stranger.say(*[open_frame(2 * number + 1, True) for number in range(50)])
    for second in range(int(UNFINISHED_S) + 5):
        if second == int(UNFINISHED_S) - 10:
            stranger.say(wire.frame(FrameKind.CHUNK, 3, b"\0" + msgspec.msgpack.encode(b"whole")[:3]))
            assert stranger.refusals == []
        stranger.say(wire.frame(FrameKind.PING, 0))
        await asyncio.sleep(1.0)
    assert stranger.refusals == ["deadline_exceeded"] * 49
    stranger.say(wire.frame(FrameKind.CHUNK, 3, b"\1" + msgspec.msgpack.encode(b"whole")[3:]))
    stranger.say(wire.frame(FrameKind.CHUNK, 1, b"\1" + msgspec.msgpack.encode(b"late")))
    await asyncio.sleep(0.1)
    assert world.received == [5], "a request that began to come in time is served"
    assert stranger.is_open
    assert world.server.unfinished.used_bytes == 0


@in_world
async def test_a_frame_that_never_ends_closes_its_connection(world: World) -> None:
    stranger = await world.greeted()
    stranger.say(wire.HEADER.pack(900_000, FrameKind.ITEMS, 0))
    for _ in range(int(UNFINISHED_S) + 5):
        if stranger.is_open:
            stranger.say(b"x" * 2000)
        await asyncio.sleep(1.0)
    assert not stranger.is_open
    assert stranger.refusals == ["slow"]
    assert world.server.unfinished.used_bytes == 0


@in_world
async def test_the_start_of_a_frame_counts_on_every_connection(world: World) -> None:
    """Many connections with a little each, before and after the hello, and with an open stream."""
    silent, greeted, opened = await world.stranger(), await world.greeted(), await world.greeted()
    opened.say(open_frame(1, True))
    budget = world.server.unfinished
    await asyncio.sleep(0.1)
    before = budget.used_bytes
    silent.say(wire.HEADER.pack(16_000, FrameKind.HELLO, 0), b"x" * 10_000)
    for stranger in (greeted, opened):
        stranger.say(wire.HEADER.pack(60_000, FrameKind.ITEMS, 0), b"x" * 50_000)
    await asyncio.sleep(0.1)
    assert budget.used_bytes - before == 110_000 + 3 * wire.HEADER.size
    assert await world.is_served()
    for stranger in (silent, greeted, opened):
        stranger.transport.close()
    await asyncio.sleep(0.1)
    assert budget.used_bytes == 0


@in_world
async def test_who_has_not_said_hello_gets_no_large_frame(world: World) -> None:
    stranger = await world.stranger()
    stranger.say(wire.HEADER.pack(wire.MAX_HELLO_BYTES + 1, FrameKind.HELLO, 0))
    await asyncio.sleep(0.1)
    assert stranger.refusals == ["frame_size"]
    assert not stranger.is_open


def test_connections_of_one_address_are_limited(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_plane, "MAX_CONNECTIONS_PER_PEER", 5)

    @in_world
    async def scenario(world: World) -> None:
        strangers = [await world.greeted() for _ in range(12)]
        assert sum(stranger.is_open for stranger in strangers) == 5
        assert [stranger.refusals for stranger in strangers[5:]] == [["connections"]] * 7
        assert world.server.stats.refused_connections == 7
        assert await world.is_served()  # another address
        strangers[0].transport.close()
        await asyncio.sleep(0.1)
        assert (await world.greeted()).is_open

    with caplog.at_level(logging.WARNING):
        scenario()
    assert "connection refused" in caplog.text


def test_connections_of_one_ipv6_network_share_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_plane, "MAX_CONNECTIONS_PER_PEER", 5)

    @in_world
    async def scenario(world: World) -> None:
        strangers = [await world.greeted(f"2001:db8::{number}") for number in range(1, 13)]
        assert sum(stranger.is_open for stranger in strangers) == 5
        assert (await world.greeted("2001:db8:0:1::1")).is_open  # another network
        strangers[0].transport.close()
        await asyncio.sleep(0.1)
        assert (await world.greeted("2001:db8::abcd")).is_open

    scenario()


def test_open_streams_of_one_address_are_limited_over_all_its_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(open_gate, "MAX_STREAMS_PER_PEER", 50)

    @in_world
    async def scenario(world: World) -> None:
        held: list[IncomingStream] = []
        server = world.process("server", held.append)
        await world.server.stop_listening()
        await server.listen("server:7000")
        strangers = [await world.greeted() for _ in range(4)]
        for stranger in strangers:
            stranger.say(*[open_frame(2 * number + 1, False) for number in range(20)])
            await asyncio.sleep(0.1)
        assert [len(stranger.refusals) for stranger in strangers] == [0, 0, 10, 20]
        assert {"overloaded"} == {code for stranger in strangers for code in stranger.refusals}
        assert server.gauges().num_refused_streams == 30
        other = await world.greeted("other")
        other.say(open_frame(1, False))
        await asyncio.sleep(0.1)
        assert len(held) == server._gate.num_open == 51
        held[0].end()
        held[1].on_cancel = lambda error: 1 // 0  # type: ignore[assignment,return-value]
        strangers[0].say(wire.frame(FrameKind.CANCEL, 5))
        await asyncio.sleep(0.1)
        assert server._gate.num_open == 49
        for stranger in (*strangers, other):
            stranger.transport.close()
        await asyncio.sleep(0.1)
        assert server._gate.num_open == 0
        assert (await world.greeted()).is_open
        await server.close()

    scenario()


@in_world
async def test_opens_whose_request_never_comes_count_as_unfinished(world: World) -> None:
    stranger = await world.greeted()
    budget = world.server.unfinished
    opening = wire.Open("echo", 8, None, {"k": "v" * 60_000}, True, msgspec.Raw(wire.NIL))
    payload = wire.encode(opening)
    stranger.say(*[wire.frame(FrameKind.OPEN, 2 * number + 1, payload) for number in range(100)])
    await asyncio.sleep(0.5)
    assert 100 * 60_000 < budget.used_bytes < 100 * 61_000
    stranger.say(wire.frame(FrameKind.CANCEL, 1))
    stranger.say(wire.frame(FrameKind.CHUNK, 3, b"\1" + msgspec.msgpack.encode(b"whole")))
    await asyncio.sleep(0.1)
    assert world.received == [5]
    assert budget.used_bytes < 98 * 61_000
    stranger.say(*[wire.frame(FrameKind.OPEN, 2 * number + 1, payload) for number in range(100, 400)])
    await asyncio.sleep(0.5)
    assert budget.num_shed == 1
    assert set(stranger.refusals) == {"overloaded"}
    assert stranger.is_open
    stranger.transport.close()
    await asyncio.sleep(0.1)
    assert budget.used_bytes == 0


@in_world
async def test_a_burst_of_opens_is_started_in_many_turns_of_the_loop(world: World) -> None:
    stranger = await world.greeted()
    body = msgspec.msgpack.encode(b"burst")
    stranger.say(*[open_frame(2 * number + 1, False, body=body) for number in range(15_000)])
    await asyncio.sleep(1.0)
    assert len(world.received) == 15_000
    assert max(world.started_in_turn.values()) <= OPENS_PER_TURN
    assert await world.is_served()
