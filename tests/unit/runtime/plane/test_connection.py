"""A connection and its transport: ticks, back-pressure, heartbeats, and every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from kvolt.core.delta import Delta
from kvolt.core.errors import Cancelled, KvoltError, ProtocolError, WorkerLost
from kvolt.runtime.plane.byte_budget import ByteBudget
from kvolt.runtime.plane.connection import Connection, ConnectionOptions
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.wire import FrameDecoder, FrameKind, Hello, Open, encode, frame
from kvolt.testing.virtual.loop import run_virtual

HELLO = Hello(
    versions=(1,), process="p", max_frame_bytes=1 << 20, max_message_bytes=64 << 20, heartbeat_s=1.0
)
PEERS_HELLO = frame(FrameKind.HELLO, 0, encode(HELLO))
MEGABYTE = 1 << 20


class FakeTransport(asyncio.Transport):
    """Takes everything at once until `room_bytes` is set; what does not fit waits for `drain`."""

    def __init__(self) -> None:
        super().__init__({"peername": ("10.0.0.2", 7), "sockname": ("10.0.0.1", 8), "socket": None})
        self.protocol: Any = None
        self.written: list[bytes] = []
        self.room_bytes: int | None = None
        self.buffer_bytes = 0
        self.closing = self.aborted = False
        self.awaits_close = False
        """As over TLS: `close` waits for the peer's close_notify."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 1

    def get_write_buffer_size(self) -> int:
        return self.buffer_bytes

    def write(self, data: Any) -> None:
        assert not self.closing
        self.written.append(bytes(data))
        if self.room_bytes is not None:
            before = self.buffer_bytes
            taken = min(self.room_bytes, len(data))
            self.room_bytes -= taken
            self.buffer_bytes += len(data) - taken
            if self.buffer_bytes and not before:
                self.protocol.pause_writing()

    def drain(self, num_bytes: int | None = None) -> None:
        before = self.buffer_bytes
        self.buffer_bytes = 0 if num_bytes is None else max(self.buffer_bytes - num_bytes, 0)
        if before and not self.buffer_bytes:
            self.room_bytes = None
            self.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True
        if not self.buffer_bytes and not self.awaits_close:
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)

    def abort(self) -> None:
        self.closing = self.aborted = True
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class World:
    def __init__(self, options: ConnectionOptions | None = None) -> None:
        self.stats = PlaneStats()
        self.streams: list[ServedStream] = []
        self.closed: list[KvoltError] = []
        self.silences: list[bool] = []
        self.num_ready = 0
        self.transport = FakeTransport()
        self.connection = Connection(
            dialer=False,
            hello=HELLO,
            options=options or ConnectionOptions(limits=SessionLimits(window_items=8)),
            on_made=lambda connection: None,
            on_open=lambda connection, stream: self.streams.append(stream),
            on_ready=lambda connection: self._ready(),
            on_closed=lambda connection, reason: self.closed.append(reason),
            on_silent=lambda connection: self.silences.append(connection.silent),
            stats=self.stats,
            budget=ByteBudget(1 << 30, 1 << 30),
        )
        self.transport.protocol = self.connection

    def _ready(self) -> None:
        self.num_ready += 1

    async def greet(self) -> None:
        self.connection.connection_made(self.transport)
        self.connection.data_received(PEERS_HELLO)
        await tick()
        self.transport.written.clear()

    def open(self, num_streams: int = 1, window: int = 8) -> list[ServedStream]:
        opening = encode(Open("ns.c.e", window, None, {}, False, msgspec.Raw(b"\xc0")))
        for _ in range(num_streams):
            self.connection.data_received(frame(FrameKind.OPEN, 2 * len(self.streams) + 1, opening))
        return self.streams

    def kinds(self) -> list[int]:
        """Of the frames written since the last look."""
        data = b"".join(self.transport.written)
        self.transport.written.clear()
        return [kind for kind, _, _ in FrameDecoder(1 << 24).feed(data)]


async def tick() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        run_virtual(test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@virtual
async def test_hello_then_ready() -> None:
    world = World()
    assert not world.connection.ready
    world.connection.connection_made(world.transport)
    await tick()
    assert world.kinds() == [FrameKind.HELLO]
    world.connection.data_received(PEERS_HELLO)
    assert world.connection.ready
    assert world.num_ready == 1
    assert world.connection.peer_name == "10.0.0.2:7"
    world.connection.close(Cancelled("done"))


@virtual
async def test_one_write_per_tick() -> None:
    world = World()
    await world.greet()
    for stream in world.open(20):
        stream.send(Delta((1,)))
    world.connection.session.ping()
    await tick()
    assert len(world.transport.written) == 1
    assert world.kinds() == [FrameKind.PING, FrameKind.DELTAS]
    world.connection.close(Cancelled("done"))


@virtual
async def test_a_full_transport_stops_chunks_not_deltas() -> None:
    world = World()
    await world.greet()
    long, short = world.open(2)
    world.transport.room_bytes = 1000
    long.send(b"x" * 500_000)
    await tick()
    assert world.kinds() == [FrameKind.CHUNK]
    for token in range(3):
        short.send(Delta((token,)))
        await tick()
        assert world.kinds() == [FrameKind.DELTAS]
    world.transport.drain()
    await asyncio.sleep(0.01)
    assert world.kinds() == [FrameKind.CHUNK] * 7
    world.connection.close(Cancelled("done"))


@virtual
async def test_too_much_unsent_keeps_items_back() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open(window=1000)
    world.transport.room_bytes = 0
    for _ in range(40):
        stream.send(b"x" * 60_000)
        await tick()
    assert MEGABYTE < world.transport.buffer_bytes < MEGABYTE + 200_000
    assert not stream.writable
    world.transport.drain()
    await tick()
    assert sum(len(data) for data in world.transport.written) > 40 * 60_000
    world.connection.close(Cancelled("done"))


@virtual
async def test_the_pause_ends_when_the_buffer_is_empty_and_not_before() -> None:
    """A write into a half empty buffer must not end the pause unheard: held streams would stay held."""
    world = World()
    await world.greet()
    (stream,) = world.open(window=1000)
    told: list[int] = []
    stream.on_writable = lambda: told.append(1)
    world.transport.room_bytes = 0
    while stream.writable:
        stream.send(b"x" * 60_000)
        await tick()
    stream.send("kept back")
    world.transport.drain(MEGABYTE)
    world.connection.session.ping()
    await tick()
    assert told == []
    assert not stream.writable
    world.transport.drain()
    await tick()
    assert told == [1]
    assert stream.writable
    world.connection.close(Cancelled("done"))


@virtual
async def test_heartbeat_only_when_idle() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open(window=1000)
    for _ in range(20):
        await asyncio.sleep(0.3)
        world.connection.data_received(frame(FrameKind.PING, 0))
        stream.send(1)
    await tick()
    assert world.kinds() == [FrameKind.ITEMS] * 20, "what is sent anyway is beat enough"
    for _ in range(20):
        await asyncio.sleep(0.3)
        world.connection.data_received(frame(FrameKind.PING, 0))
    assert 5 <= len(world.kinds()) <= 7
    world.connection.close(Cancelled("done"))


@virtual
async def test_a_silent_peer_gets_no_calls_and_keeps_its_streams_for_the_grace() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open()
    errors: list[KvoltError] = []
    stream.on_cancel = errors.append
    await asyncio.sleep(2.9)
    assert world.connection.ready
    await asyncio.sleep(1.2)
    assert world.silences == [True]
    assert not world.connection.ready
    assert world.stats.heartbeat_timeouts == 1
    await asyncio.sleep(25.0)
    assert world.closed == errors == []
    await asyncio.sleep(2.5)
    assert [type(reason) for reason in world.closed] == [WorkerLost]
    assert world.closed[0].fields["reason"] == "heartbeat"
    assert world.transport.aborted
    assert errors == world.closed
    assert world.stats.losses == {"heartbeat": 1}


@virtual
async def test_a_silent_peer_that_answers_again_is_called_again() -> None:
    world = World()
    await world.greet()
    world.open()
    for _ in range(3):
        await asyncio.sleep(20.0)
        assert not world.connection.ready
        world.connection.data_received(frame(FrameKind.PING, 0))
        assert world.connection.ready
    assert world.silences == [True, False] * 3
    assert world.closed == []
    world.connection.close(Cancelled("done"))


@virtual
async def test_a_silent_peer_that_answers_elsewhere_has_lost_this_connection() -> None:
    world = World()
    await world.greet()
    world.connection.mark_replaced()
    await asyncio.sleep(4.1)
    assert world.silences == [True]
    world.connection.mark_replaced()
    await asyncio.sleep(2.0)
    assert world.closed == []
    await asyncio.sleep(2.0)
    assert [reason.fields["reason"] for reason in world.closed] == ["heartbeat"]


@virtual
async def test_without_a_grace_a_silent_peer_is_lost_at_once() -> None:
    world = World(ConnectionOptions(stall_grace_s=0.0))
    await world.greet()
    await asyncio.sleep(4.1)
    assert [reason.fields["reason"] for reason in world.closed] == ["heartbeat"]


def stall(seconds: float) -> None:
    """As if the whole loop had stood still."""
    asyncio.get_running_loop()._now += seconds  # type: ignore[attr-defined]


@virtual
async def test_our_own_stall_is_not_the_peers_silence() -> None:
    """Whatever its length, and even though nothing of the peer waits in the socket: it may be stalled as well."""
    world = World()
    await world.greet()
    for seconds in (3.0, 6.0, 25.0, 300.0):
        stall(seconds)
        await asyncio.sleep(1.5)
        assert world.connection.ready
        world.connection.data_received(frame(FrameKind.PING, 0))
    assert world.silences == []
    assert world.closed == []
    world.connection.close(Cancelled("done"))


@virtual
async def test_a_peer_that_stays_silent_after_our_own_stalls_is_noticed() -> None:
    """Only the stalled time is forgiven: a loop that is late at every beat still notices a lost peer."""
    world = World()
    await world.greet()
    for _ in range(5):
        stall(0.8)
        await asyncio.sleep(1.0)
    assert world.silences == [True]
    world.connection.close(Cancelled("done"))


@virtual
async def test_no_deadline_counts_the_time_of_a_stall() -> None:
    world = World()
    await world.greet()
    session = world.connection.session
    await asyncio.sleep(1.5)
    assert session.stalls.seconds_since(0.0) == 0.0
    stall(40.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time()
    assert session.stalls.seconds_since(0.0) == world.stats.stalled_s, "our own"
    assert world.stats.stalls == 1
    assert 39.0 < world.stats.stalled_s <= 40.0
    assert not world.stats.record_stall(now, 39.5), "another connection of the process saw the same one"
    await asyncio.sleep(10.0)
    assert session.peer_silent
    world.connection.data_received(frame(FrameKind.PING, 0))
    assert session.stalls.seconds_since(now) == pytest.approx(10.0), "the peer's"
    assert session.stalls.seconds_since(now + 10.0) == 0.0
    assert not session.peer_silent
    world.connection.close(Cancelled("done"))


@virtual
async def test_a_peer_that_says_no_hello_is_lost() -> None:
    world = World(ConnectionOptions(heartbeat_s=1.0, dead_after_s=100.0))
    world.connection.connection_made(world.transport)
    await asyncio.sleep(4.5)
    assert world.closed == []
    await asyncio.sleep(2.0)
    assert [type(reason) for reason in world.closed] == [ProtocolError]


@virtual
async def test_a_hello_may_come_late_after_our_own_stall() -> None:
    world = World()
    world.connection.connection_made(world.transport)
    await asyncio.sleep(0.5)
    stall(20.0)
    await asyncio.sleep(1.5)
    assert world.closed == []
    world.connection.data_received(PEERS_HELLO)
    assert world.num_ready == 1
    world.connection.close(Cancelled("done"))


@virtual
async def test_bad_bytes_are_refused_and_closed() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open()
    errors: list[KvoltError] = []
    stream.on_cancel = errors.append
    world.connection.data_received(b"\xff" * 100)
    assert world.kinds()[-1] == FrameKind.REFUSE
    assert world.transport.closing
    assert [type(error) for error in (*world.closed, *errors)] == [ProtocolError] * 2
    world.connection.data_received(b"more")
    await tick()
    assert len(world.closed) == 1


@pytest.mark.parametrize("end", ["lost", "close", "abort"])
def test_every_end_is_reported_once(end: str) -> None:
    async def main() -> None:
        world = World()
        await world.greet()
        (stream,) = world.open()
        errors: list[KvoltError] = []
        stream.on_cancel = errors.append
        reason = Cancelled("stopping")
        match end:
            case "lost":
                world.connection.connection_lost(None)
            case "close":
                world.connection.close(reason)
            case _:
                world.connection.abort(reason)
        await tick()
        world.connection.close(reason)
        world.connection.abort(reason)
        world.connection.wake()
        await tick()
        assert len(world.closed) == 1
        assert [type(error) for error in errors] == [WorkerLost], "our own stop is a loss for a stream"
        assert not world.connection.ready

    run_virtual(main)


@virtual
async def test_those_who_choose_hear_of_the_loss_first() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open()
    seen: list[int] = []
    stream.on_cancel = lambda error: seen.append(len(world.closed))
    world.connection.connection_lost(None)
    assert seen == [1]


@virtual
async def test_a_transport_that_comes_too_late_is_dropped() -> None:
    """Given up while it was being made: no heartbeat may be left on the loop."""
    world = World()
    world.connection.close(Cancelled("stopping"))
    world.connection.connection_made(world.transport)
    assert world.transport.aborted
    await tick()


@virtual
async def test_closing_does_not_wait_for_ever_for_a_peer_that_does_not_read() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open()
    world.transport.room_bytes = 0
    stream.send(b"x" * 10_000)
    await tick()
    world.connection.close(Cancelled("stopping"))
    assert not world.transport.aborted
    await asyncio.sleep(5)
    assert world.transport.aborted


@virtual
async def test_closing_does_not_wait_for_ever_for_a_peer_that_does_not_close() -> None:
    world = World(ConnectionOptions(dead_after_s=3.0))
    await world.greet()
    world.transport.awaits_close = True
    world.connection.close(Cancelled("done"))
    await asyncio.sleep(2.9)
    assert not world.transport.aborted
    await asyncio.sleep(0.2)
    assert world.transport.aborted


@virtual
async def test_closing_leaves_nothing_when_the_peer_reads() -> None:
    world = World()
    await world.greet()
    (stream,) = world.open()
    world.transport.room_bytes = 0
    stream.send(b"x" * 10_000)
    await tick()
    world.connection.close(Cancelled("stopping"))
    world.transport.buffer_bytes = 0
    world.connection.connection_lost(None)


@virtual
async def test_a_peer_going_away_gets_no_new_calls() -> None:
    world = World()
    await world.greet()
    world.connection.data_received(frame(FrameKind.GOAWAY, 0))
    assert not world.connection.ready
    assert world.closed == []
    world.connection.close(Cancelled("done"))


@virtual
async def test_used_up_ids_mean_a_new_connection() -> None:
    world = World()
    await world.greet()
    world.connection.session._next_id = 2**32
    assert not world.connection.ready
    world.connection.close(Cancelled("done"))
