"""One session: what it sends in which order, what it refuses, and what it holds. Random walks of two
sessions and hostile peers are in tests/property."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvolt.core.delta import Delta
from kvolt.core.errors import (
    Cancelled,
    ConnectFailed,
    EngineFailed,
    KvoltError,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    VersionMismatch,
    WorkerLost,
)
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.steps import StepSender
from kvolt.runtime.plane.streams import CallerStream
from kvolt.runtime.plane.wire import CHUNK_BYTES, FrameDecoder, FrameKind, Hello, encode, frame

decode = msgspec.msgpack.Decoder().decode


class Side:
    """A session and its host; streams that it serves wait in `streams`."""

    def __init__(self, dialer: bool, limits: SessionLimits | None = None, **hello: Any) -> None:
        self.limits = limits or SessionLimits(window_items=8)
        greeting = Hello(
            **{
                "versions": (1,),
                "process": "p",
                "max_frame_bytes": self.limits.max_frame_bytes,
                "max_message_bytes": self.limits.max_message_bytes,
                "heartbeat_s": 1.0,
                **hello,
            }
        )
        self.stats = PlaneStats()
        self.session = Session(dialer=dialer, hello=greeting, limits=self.limits, host=self, stats=self.stats)
        self.streams: list[ServedStream] = []
        self.num_wakes = 0
        self.faults: list[Exception] = []
        self.hellos: list[Hello] = []

    def wake(self) -> None:
        self.num_wakes += 1

    def on_hello(self, hello: Hello) -> None:
        self.hellos.append(hello)

    def on_open(self, stream: ServedStream) -> None:
        self.streams.append(stream)

    def report_callback_error(self, fault: Exception) -> None:
        self.faults.append(fault)


class Sink:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[KvoltError | None] = []

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)


def move(sender: Side, receiver: Side) -> list[int]:
    """All that the sender has to say, chunks included; the kinds of its frames."""
    data = b"".join(sender.session.drain_urgent())
    while (chunk := sender.session.next_chunk()) is not None:
        data += chunk
        data += b"".join(sender.session.drain_urgent())
    if data:
        receiver.session.receive(data)
    return [kind for kind, _, _ in FrameDecoder(1 << 24).feed(data)]


def pair(limits: SessionLimits | None = None, **hello: Any) -> tuple[Side, Side]:
    dialer, acceptor = Side(True, limits), Side(False, limits, **hello)
    move(dialer, acceptor)
    move(acceptor, dialer)
    return dialer, acceptor


def call(side: Side, body: Any = None, target: str = "ns.c.e") -> tuple[CallerStream, Sink]:
    sink = Sink()
    return side.session.open(target, encode(body), sink, decode, 5.0, {"request_id": "r"}), sink


def opened(
    num_streams: int, limits: SessionLimits | None = None
) -> tuple[Side, Side, list[Sink], list[ServedStream]]:
    dialer, acceptor = pair(limits)
    sinks = [call(dialer)[1] for _ in range(num_streams)]
    move(dialer, acceptor)
    return dialer, acceptor, sinks, acceptor.streams


# --- the beginning


def test_only_the_hello_leaves_before_the_peers() -> None:
    dialer, acceptor = Side(True), Side(False)
    call(dialer, b"x" * 100_000)
    dialer.session.ping()
    frames = dialer.session.drain_urgent()
    assert [kind for kind, _, _ in FrameDecoder(1 << 20).feed(b"".join(frames))] == [FrameKind.HELLO]
    assert dialer.session.drain_urgent() == []
    assert dialer.session.next_chunk() is None
    move(acceptor, dialer)
    assert dialer.session.version == 1
    acceptor.session.receive(b"".join(frames))
    assert move(dialer, acceptor)[:2] == [FrameKind.OPEN, FrameKind.PING]
    assert len(acceptor.streams) == 1


def test_versions_agree_on_the_best() -> None:
    dialer, acceptor = Side(True, versions=(3, 1)), Side(False, versions=(2, 1))
    move(dialer, acceptor)
    move(acceptor, dialer)
    assert dialer.session.version == acceptor.session.version == 1


def test_no_common_version() -> None:
    dialer, acceptor = Side(True, versions=(99,)), Side(False)
    with pytest.raises(VersionMismatch) as caught:
        move(dialer, acceptor)
    assert caught.value.fields == {"ours": "[1]", "theirs": "[99]"}
    assert acceptor.session.peer is None
    with pytest.raises(VersionMismatch):
        dialer.session.receive(acceptor.session.refusal(caught.value))


def test_a_refusal_of_a_later_kind_is_a_protocol_error() -> None:
    dialer, acceptor = pair()
    for error in (NotFound("whatever"), Overloaded("too many")):
        with pytest.raises(ProtocolError, match=error.message):
            Side(True).session.receive(acceptor.session.refusal(error))
    with pytest.raises(ProtocolError):
        dialer.session.receive(acceptor.session.refusal(ProtocolError("bad", rule="x")))


# --- what leaves, and in which order


def test_one_frame_for_all_deltas_of_a_tick() -> None:
    dialer, acceptor, sinks, streams = opened(50)
    for token in range(3):
        for stream in streams:
            stream.send(Delta((token,)))
    assert move(acceptor, dialer) == [FrameKind.DELTAS]
    assert all(sink.items == [Delta((0,)), Delta((1,)), Delta((2,))] for sink in sinks)


def test_one_frame_for_a_step() -> None:
    dialer, acceptor, sinks, streams = opened(3)
    StepSender(streams).send([7, 8, 9])
    assert move(acceptor, dialer) == [FrameKind.STEP]
    assert [sink.items for sink in sinks] == [[Delta((7,))], [Delta((8,))], [Delta((9,))]]


def test_the_order_of_kinds_in_one_go() -> None:
    dialer, acceptor, _, streams = opened(2)
    back, _ = call(acceptor)
    move(acceptor, dialer)
    dialer.streams[0].send(1)
    move(dialer, acceptor)
    back.mark_consumed(8)
    back.cancel()
    other, _ = call(acceptor)
    other.mark_consumed(8)
    streams[0].send(1)
    streams[0].send(Delta((1,)))
    streams[0].end()
    acceptor.session.ping()
    assert move(acceptor, dialer) == [
        FrameKind.CANCEL,
        FrameKind.OPEN,
        FrameKind.PING,
        FrameKind.ITEMS,
        FrameKind.DELTAS,
        FrameKind.ENDS,
        FrameKind.CREDIT,
    ]


def test_long_frames_are_cut() -> None:
    """Every frame but a chunk's stays within a chunk's length, however many streams share it."""
    dialer, acceptor, sinks, streams = opened(300)
    for stream in streams:
        stream.send(Delta(tuple(range(100, 200))))
        stream.send("x" * 1000)
        stream.end(EngineFailed("y" * 3000, engine="sim"))
    data = acceptor.session.drain_urgent()
    assert len(data) > 20
    assert max(len(each) for each in data) <= CHUNK_BYTES + 100
    dialer.session.receive(b"".join(data))
    assert all(len(sink.items) == 2 and len(sink.ends) == 1 for sink in sinks)


def test_credit_frames_are_cut() -> None:
    limits = SessionLimits(window_items=2)
    dialer, acceptor = pair(limits)
    calls = [call(dialer)[0] for _ in range(15_000)]
    move(dialer, acceptor)
    for each in calls:
        each.mark_consumed(1)
    data = dialer.session.drain_urgent()
    assert max(len(each) for each in data) <= CHUNK_BYTES + 100
    acceptor.session.receive(b"".join(data))
    assert all(stream.credit == 3 for stream in acceptor.streams)


def test_chunks_take_turns_with_deltas() -> None:
    dialer, acceptor, sinks, (long, short) = opened(2)
    long.send(b"x" * (5 * CHUNK_BYTES))
    for token in range(4):
        short.send(Delta((token,)))
        dialer.session.receive(b"".join(acceptor.session.drain_urgent()))
        chunk = acceptor.session.next_chunk()
        assert chunk is not None
        dialer.session.receive(chunk)
        assert len(sinks[1].items) == token + 1
        assert sinks[0].items == []
    chunk = acceptor.session.next_chunk()
    assert chunk is not None
    dialer.session.receive(chunk)
    assert sinks[0].items == [b"x" * (5 * CHUNK_BYTES)]


def test_a_long_byte_string_is_sent_as_it_is() -> None:
    """Nothing of its length is encoded, copied or decoded in one go."""
    dialer, acceptor, sinks, streams = opened(2)
    long = bytes(range(256)) * (CHUNK_BYTES // 256) * 3
    streams[0].send(long)
    streams[1].send({"bytes": long})
    assert acceptor.session.drain_urgent() == []
    chunks = []
    while (chunk := acceptor.session.next_chunk()) is not None:
        chunks.append(chunk)
        dialer.session.receive(chunk)
    own = [chunk for chunk in chunks if wire.HEADER.unpack_from(chunk)[2] == streams[0].id]
    assert b"".join(chunk[wire.HEADER.size + 1 :] for chunk in own) == long
    assert [type(sink.items[0]) for sink in sinks] == [bytes, dict]
    assert [sink.items for sink in sinks] == [[long], [{"bytes": long}]]


def test_a_long_byte_string_where_something_else_is_wanted() -> None:
    dialer, acceptor = pair()
    sinks = Sink(), Sink()
    dialer.session.open("t", encode(None), sinks[0], msgspec.msgpack.Decoder(dict[str, int]).decode)
    dialer.session.open("t", encode(None), sinks[1], decode)
    move(dialer, acceptor)
    streams = acceptor.streams
    streams[0].send(b"x" * (2 * CHUNK_BYTES))
    streams[1].send(1)
    move(acceptor, dialer)
    assert [type(error) for error in sinks[0].ends] == [ProtocolError]
    assert sinks[1].items == [1]


@pytest.mark.parametrize(
    "later", [1, Delta((1,)), "step", b"y" * CHUNK_BYTES * 2], ids=["item", "delta", "step", "long"]
)
@pytest.mark.parametrize("flush_between", [False, True])
def test_nothing_overtakes_a_long_item_of_its_stream(later: Any, flush_between: bool) -> None:
    dialer, acceptor, sinks, streams = opened(1)
    long = b"x" * (2 * CHUNK_BYTES)
    streams[0].send(long)
    if flush_between:
        dialer.session.receive(b"".join(acceptor.session.drain_urgent()))
    if later == "step":
        StepSender(streams).send([1])
        later = Delta((1,))
    else:
        streams[0].send(later)
    streams[0].end()
    move(acceptor, dialer)
    assert sinks[0].items == [long, later]
    assert sinks[0].ends == [None]


def test_a_long_item_in_a_crowd() -> None:
    """More items in one tick than one frame takes: those of the same stream still come after it."""
    dialer, acceptor, sinks, streams = opened(1000, SessionLimits(window_items=20))
    long = b"x" * (2 * CHUNK_BYTES)
    streams[0].send(long)
    for number in range(10):
        for stream in streams:
            stream.send(number)
    move(acceptor, dialer)
    assert sinks[0].items == [long, *range(10)]
    assert all(sink.items == list(range(10)) for sink in sinks[1:])


def test_short_items_behind_a_long_one_without_credit() -> None:
    dialer, acceptor, sinks, (stream,) = opened(1, SessionLimits(window_items=2))
    long = b"x" * (2 * CHUNK_BYTES)
    for item in (long, "sent", "kept back"):
        stream.send(item)
    move(acceptor, dialer)
    assert sinks[0].items == [long, "sent"]


# --- what cannot leave


@pytest.mark.parametrize(
    "bad", [object(), 2**70, "\ud800", {1: object()}], ids=["object", "int", "text", "map"]
)
@pytest.mark.parametrize("ended", [False, True])
def test_what_cannot_be_encoded_ends_its_stream(bad: Any, ended: bool) -> None:
    dialer, acceptor, sinks, (stream, beside) = opened(2)
    told: list[KvoltError] = []
    stream.on_cancel = told.append
    for item in (1, bad, 2, Delta((3,))):
        stream.send(item)
        beside.send(item if item is not bad else "fine")
    if ended:
        stream.end()
    move(acceptor, dialer)
    assert sinks[0].items == [1], "nothing after it"
    (error,) = sinks[0].ends
    assert type(error) is KvoltError
    assert "cannot be encoded" in error.message
    assert sinks[1].items == [1, "fine", 2, Delta((3,))]
    assert sinks[1].ends == []
    assert len(told) == (0 if ended else 1)
    assert acceptor.session.num_served == 1


def test_an_item_over_the_peers_limit_ends_its_stream() -> None:
    limits = SessionLimits(max_message_bytes=200_000)
    dialer, acceptor, sinks, (stream, beside) = opened(2, limits)
    stream.send(b"x" * 200_001)
    stream.end()
    beside.send(b"x" * 199_000)
    move(acceptor, dialer)
    (error,) = sinks[0].ends
    assert type(error) is PayloadTooLarge
    assert error.fields["limit_bytes"] == 200_000
    assert sinks[1].items == [b"x" * 199_000]


def test_a_request_over_the_peers_limit_is_not_sent() -> None:
    dialer, acceptor = pair(max_message_bytes=1000)
    with pytest.raises(PayloadTooLarge):
        call(dialer, b"x" * 1001)
    assert dialer.session.num_calls == 0
    assert move(dialer, acceptor) == []


def test_any_error_can_end_a_stream() -> None:
    dialer, acceptor, sinks, streams = opened(3)
    streams[0].end(EngineFailed("x" * 10_000_000, engine="\ud800"))
    streams[1].end(EngineFailed("y", engine=[1]))  # type: ignore[arg-type]
    streams[2].end(ValueError("secret"))
    move(acceptor, dialer)
    assert [type(sink.ends[0]) for sink in sinks] == [EngineFailed, EngineFailed, KvoltError]


# --- refusals and the end


def test_too_many_streams() -> None:
    limits = SessionLimits(max_streams=2)
    dialer, acceptor = pair(limits)
    for _ in range(2):
        call(dialer)
    with pytest.raises(Overloaded):
        call(dialer)
    dialer, acceptor = Side(True), Side(False, limits)
    move(dialer, acceptor)
    move(acceptor, dialer)
    sinks = [call(dialer, body)[1] for body in (1, b"x" * 100_000, b"y" * 100_000, 2)]
    move(dialer, acceptor)
    move(acceptor, dialer)
    assert len(acceptor.streams) == 2, "a request still on its way counts as well"
    assert [[type(error) for error in sink.ends] for sink in sinks] == [[], [], [Overloaded], [Overloaded]]
    assert acceptor.session._bulk_receiver.buffered_bytes == 0


def test_going_away_refuses_new_streams_only() -> None:
    dialer, acceptor, (running,), (stream,) = opened(1)
    acceptor.session.go_away()
    acceptor.session.go_away()
    _, refused = call(dialer)
    move(dialer, acceptor)
    assert move(acceptor, dialer) == [FrameKind.GOAWAY, FrameKind.ENDS]
    assert dialer.session.peer_going_away
    assert refused.ends[0] is not None
    assert refused.ends[0].fields["reason"] == "draining"
    stream.send(1)
    stream.end()
    move(acceptor, dialer)
    assert (running.items, running.ends) == ([1], [None])


def test_close_ends_every_stream_once() -> None:
    dialer, acceptor, sinks, streams = opened(3)
    told: list[KvoltError] = []
    for stream in streams:
        stream.on_cancel = told.append
    streams[0].send(b"x" * 200_000)
    acceptor.session.drain_urgent()
    error = WorkerLost("gone")
    for side in (dialer, acceptor):
        side.session.close(error)
        side.session.close(error)
        assert (side.session.num_calls, side.session.num_served, side.session.num_bulk) == (0, 0, 0)
    assert [sink.ends for sink in sinks] == [[error]] * 3
    assert told == [error] * 3
    assert dialer.stats.calls_ended == {"worker_lost": 3}
    assert acceptor.stats.served_ended == {"worker_lost": 3}


def test_a_closed_session_takes_no_streams() -> None:
    """Otherwise the call would wait for its first deadline without a server."""
    dialer, _ = pair()
    dialer.session.close(WorkerLost("gone"))
    with pytest.raises(ConnectFailed):
        call(dialer)
    assert dialer.session.num_calls == 0


def test_a_call_made_from_the_end_of_another_when_all_is_lost() -> None:
    dialer, _ = pair()
    errors: list[type[KvoltError]] = []

    class Again(Sink):
        def on_end(self, error: KvoltError | None) -> None:
            with pytest.raises(ConnectFailed):
                call(dialer)
            errors.append(type(error))  # type: ignore[arg-type]

    dialer.session.open("ns.c.e", encode(None), Again(), decode)
    dialer.session.close(WorkerLost("gone"))
    assert errors == [WorkerLost]
    assert dialer.session.num_calls == 0


def test_stream_ids_run_out() -> None:
    dialer, acceptor = pair()
    dialer.session._next_id = wire.MAX_STREAM_ID
    assert not dialer.session.exhausted
    call(dialer)
    assert dialer.session.exhausted
    with pytest.raises(ConnectFailed):
        call(dialer)
    move(dialer, acceptor)
    assert [stream.id for stream in acceptor.streams] == [wire.MAX_STREAM_ID]


# --- cancelling


def test_cancel_of_a_request_on_its_way() -> None:
    dialer, acceptor = pair()
    stream, sink = call(dialer, b"x" * 500_000)
    acceptor.session.receive(b"".join(dialer.session.drain_urgent()))
    chunk = dialer.session.next_chunk()
    assert chunk is not None
    acceptor.session.receive(chunk)
    assert acceptor.session._bulk_receiver.buffered_bytes > 0
    stream.cancel()
    assert not dialer.session.num_bulk
    move(dialer, acceptor)
    assert acceptor.session._bulk_receiver.buffered_bytes == 0
    assert acceptor.streams == []
    assert sink.ends == []


def test_cancel_of_a_long_answer_on_its_way() -> None:
    dialer, acceptor = pair()
    stream, sink = call(dialer)
    move(dialer, acceptor)
    acceptor.streams[0].send(b"x" * 500_000)
    acceptor.session.drain_urgent()
    chunk = acceptor.session.next_chunk()
    assert chunk is not None
    dialer.session.receive(chunk)
    stream.cancel()
    assert dialer.session._bulk_receiver.buffered_bytes == 0
    move(dialer, acceptor)
    assert not acceptor.session.num_bulk
    assert acceptor.streams[0].closed
    chunk_on_its_way = frame(FrameKind.CHUNK, stream.id, b"\x01rest")
    dialer.session.receive(chunk_on_its_way)
    assert (sink.items, sink.ends) == ([], [])


def test_many_cancelled_long_requests_never_exceed_the_bound() -> None:
    """What is dropped makes room for the next: the peer hears of the one before it sees the other."""
    dialer, acceptor = pair()
    calls = [call(dialer, b"x" * 300_000)[0] for _ in range(12)]
    acceptor.session.receive(b"".join(dialer.session.drain_urgent()))
    for number in range(40):
        acceptor.session.receive(b"".join(dialer.session.drain_urgent()))
        chunk = dialer.session.next_chunk()
        if chunk is not None:
            acceptor.session.receive(chunk)
        if number % 3 == 0 and calls:
            calls.pop(0).cancel()
    move(dialer, acceptor)
    assert acceptor.session._bulk_receiver.buffered_bytes == 0


def test_counts() -> None:
    dialer, acceptor, _sinks, (one, two, three) = opened(3)
    for stream in (one, two):
        for token in range(5):
            stream.send(Delta((token,)))
    one.send(b"x" * 200_000)
    one.send("after")
    one.end()
    two.end(NotFound("x"))
    three.send(1)
    move(acceptor, dialer)
    assert acceptor.stats.items_out == dialer.stats.items_in == 5 + 5 + 1 + 1 + 1
    assert acceptor.stats.frames_out == dialer.stats.frames_in
    assert dialer.stats.calls_ended == {"ok": 1, "not_found": 1}
    assert acceptor.stats.served_ended == {"ok": 1, "not_found": 1}


def test_a_sink_that_raises_does_not_keep_the_end_from_others() -> None:
    dialer, _, sinks, _ = opened(3)

    def raises(error: KvoltError | None) -> None:
        raise ZeroDivisionError

    dialer.session._calls[1]._finish = raises
    dialer.session.close(Cancelled("gone"))
    assert [len(sink.ends) for sink in sinks] == [0, 1, 1]
    assert [type(fault) for fault in dialer.faults] == [ZeroDivisionError]


def test_a_delta_of_a_newer_version_ends_its_stream_only() -> None:
    dialer, acceptor, sinks, streams = opened(2)
    streams[0].send(Delta((1,)))
    streams[1].send(Delta((2,)))
    (data,) = acceptor.session.drain_urgent()
    newer = wire.encode([(1, {"t": [1], "f": "repetition"}), (3, {"t": [2]})])
    dialer.session.receive(wire.frame(FrameKind.DELTAS, 0, newer))
    assert [type(error) for error in sinks[0].ends] == [ProtocolError]
    assert sinks[1].items == [Delta((2,))]
    assert data


def test_choices_merge_apart_for_a_slow_reader() -> None:
    dialer, acceptor, (sink,), (stream,) = opened(1)
    for number in range(3000):
        stream.send(Delta((number,), index=number % 2))
    stream.end()
    for _ in range(20):
        move(acceptor, dialer)
        for call_ in list(dialer.session._calls.values()):
            call_.mark_consumed(8)
        move(dialer, acceptor)
    assert sink.ends == [None]
    for index in (0, 1):
        tokens = [token for delta in sink.items if delta.index == index for token in delta.token_ids]
        assert tokens == list(range(index, 3000, 2))
