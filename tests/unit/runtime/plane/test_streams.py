"""The two ends of a stream alone, with a session that only writes down what they ask of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvolt.core.delta import Delta, FinishReason
from kvolt.core.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
)
from kvolt.runtime.plane.served_stream import BACKLOG_ITEMS, ServedStream
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.streams import CallerStream
from kvolt.runtime.plane.wire import NIL, Open


class FakeSession:
    def __init__(self) -> None:
        self.paused = False
        self.open_deltas: list[tuple[int, Any]] | None = None
        self.step_owner: object | None = None
        self.items: list[Any] = []
        self.num_ends = self.num_settled = 0
        self.stats = PlaneStats()
        self.held: dict[int, ServedStream] = {}
        self.granted: list[int] = []
        self.cancelled: list[int] = []

    def queue_item(self, stream: ServedStream, item: Any) -> None:
        self.items.append(item)

    def queue_end(self, stream: ServedStream) -> None:
        self.num_ends += 1

    def mark_backlogged(self, stream: ServedStream) -> None:
        self.held[stream.id] = stream

    def settle_step(self) -> None:
        self.num_settled += 1

    def settle_steps_read(self) -> None: ...

    def grant(self, stream_id: int, num_items: int) -> None:
        self.granted.append(num_items)

    def cancel_call(self, stream_id: int) -> None:
        self.cancelled.append(stream_id)


class FakeSink:
    def __init__(self) -> None:
        self.items: list[Any] = []
        self.ends: list[KvoltError | None] = []

    def on_item(self, item: Any) -> None:
        self.items.append(item)

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)


def served(window: int = 4) -> tuple[ServedStream, FakeSession]:
    session = FakeSession()
    opening = Open("ns.c.e", window, 1.5, {"request_id": "r"}, False, msgspec.Raw(NIL))
    return ServedStream(session, 2, opening, msgspec.msgpack.encode([1])), session


def caller(window: int = 4, automatic: bool = False) -> tuple[CallerStream, FakeSession, FakeSink]:
    session, sink = FakeSession(), FakeSink()
    decode = msgspec.msgpack.Decoder(int).decode
    return CallerStream(session, 1, sink, decode, window, automatic), session, sink


# --- serving


def test_items_go_while_there_is_credit() -> None:
    stream, session = served(window=3)
    for item in range(5):
        stream.send(item)
    assert session.items == [0, 1, 2]
    assert not stream.writable
    assert session.held == {2: stream}
    stream.add_credit(1)
    assert session.items == [0, 1, 2, 3]
    stream.add_credit(5)
    assert session.items == [0, 1, 2, 3, 4]
    assert stream.writable


def test_deltas_merge_while_there_is_no_credit() -> None:
    stream, session = served(window=1)
    for token in range(4):
        stream.send(Delta((token,)))
    stream.send("other")
    stream.send(Delta((4,)))
    stream.send(Delta((5,), finish=FinishReason.STOP))
    stream.send(Delta((6,)))
    stream.add_credit(9)
    assert session.items == [
        Delta((0,)),
        Delta((1, 2, 3)),
        "other",
        Delta((4, 5), finish=FinishReason.STOP),
        Delta((6,)),
    ]
    assert session.stats.merged == 3


def test_a_full_transport_keeps_items_back() -> None:
    stream, session = served()
    session.paused = True
    stream.send(1)
    assert session.items == []
    session.paused = False
    stream.flush_backlog()
    assert session.items == [1]


def test_credit_in_a_pause_is_returned_when_the_pause_ends() -> None:
    stream, session = served(window=1)
    told: list[int] = []
    stream.on_writable = lambda: told.append(1)
    stream.send(1)
    session.paused = True
    stream.add_credit(1)
    assert told == []
    assert session.held == {2: stream}, "it will be asked again"
    session.paused = False
    stream.flush_backlog()
    assert told == [1]


def test_the_end_waits_for_what_is_kept_back() -> None:
    stream, session = served(window=1)
    stream.send(1)
    stream.send(2)
    stream.end()
    assert session.num_ends == 0
    stream.send(3)
    stream.add_credit(1)
    assert (session.items, session.num_ends) == ([1, 2], 1)


def test_the_first_end_counts() -> None:
    stream, session = served()
    stream.end(NotFound("first"))
    stream.end(EngineFailed("second"))
    stream.fail(EngineFailed("third"))
    assert session.num_ends == 1
    assert stream.end_info is not None
    assert stream.end_info.message == "first"


def test_fail_replaces_what_is_kept_back() -> None:
    stream, session = served(window=1)
    told: list[KvoltError] = []
    stream.on_cancel = told.append
    error = EngineFailed("died")
    stream.send(1)
    stream.send(2)
    stream.fail(error)
    assert (session.items, session.num_ends, told) == ([1], 1, [error])
    stream.abort(Cancelled("gone"))
    assert told == [error], "told once"


def test_an_item_that_cannot_leave_replaces_the_end() -> None:
    stream, session = served()
    stream.send(1)
    stream.end()
    stream.force_fail(KvoltError("cannot be encoded"))
    assert stream.end_info is not None
    assert stream.end_info.message == "cannot be encoded"
    assert session.num_ends == 2, "the session sends the end of a stream once"


def test_backlog_has_a_bound() -> None:
    stream, session = served(window=1)
    told: list[KvoltError] = []
    stream.on_cancel = told.append
    for item in range(BACKLOG_ITEMS + 2):
        stream.send(item)
    assert [type(error) for error in told] == [Overloaded]
    assert told[0].fields == {"queue": "stream_backlog", "limit": BACKLOG_ITEMS}
    assert stream.end_info is not None
    stream.send("more")
    stream.add_credit(9)
    assert session.items == [0]


def test_put_back_goes_before_what_was_kept_back() -> None:
    stream, session = served(window=3)
    for item in range(5):
        stream.send(item)
    stream.bulk = True
    stream.requeue([1, 2])
    stream.bulk = False
    stream.add_credit(9)
    assert session.items == [0, 1, 2, 1, 2, 3, 4]


def test_abort_notifies_once_and_frees_the_backlog() -> None:
    stream, session = served(window=1)
    told: list[KvoltError] = []
    closed: list[int] = []
    stream.on_cancel = told.append
    stream.on_closed = lambda: closed.append(1)
    stream.send(1)
    stream.send(2)
    error = Cancelled("gone")
    stream.abort(error)
    stream.abort(error)
    assert (told, closed, stream.closed, stream.body) == ([error], [1], True, b"")
    stream.send(3)
    stream.end()
    stream.force_fail(KvoltError("late"))
    stream.add_credit(1)
    assert session.items == [1]


def test_an_ended_producer_is_not_notified() -> None:
    stream, _ = served(window=1)
    told: list[KvoltError] = []
    stream.on_cancel = told.append
    stream.send(1)
    stream.send(2)
    stream.end()
    stream.abort(Cancelled("gone"))
    assert told == []


def test_decode_body() -> None:
    stream, _ = served()
    assert stream.decode_body(msgspec.msgpack.Decoder(list[int]).decode) == [1]
    assert stream.body == b"", "its bytes are let go"


@pytest.mark.parametrize("body", [b"\xc1", b"\xa2\xff\xff", b"\x91" * 5000, b"\xa1x"])
def test_a_body_that_does_not_decode(body: bytes) -> None:
    stream, _ = served()
    stream.body = body
    with pytest.raises(InvalidRequest) as caught:
        stream.decode_body(msgspec.msgpack.Decoder(list[Any]).decode)
    assert caught.value.fields == {"param": "body"}


# --- calling


def raw(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def test_credit_goes_back_half_a_window_at_a_time() -> None:
    stream, session, _ = caller(window=4)
    stream.mark_consumed(1)
    assert session.granted == []
    stream.mark_consumed(1)
    assert session.granted == [2]
    stream.mark_consumed(5)
    assert session.granted == [2, 5]


def test_more_than_the_credit_is_refused() -> None:
    stream, _, sink = caller(window=2)
    stream.accept_raw(raw(1), 0.0)
    stream.accept_raw(raw(2), 0.0)
    with pytest.raises(ProtocolError) as caught:
        stream.accept_raw(raw(3), 0.0)
    assert caught.value.fields["rule"] == "credit"
    assert sink.items == [1, 2]


@pytest.mark.parametrize("window", [1, 2, 3, 256])
def test_automatic_credit_never_runs_dry(window: int) -> None:
    stream, session, sink = caller(window, automatic=True)
    for number in range(1000):
        stream.accept_raw(raw(number), 0.0)
        assert stream.window_left > 0
    assert len(sink.items) == 1000
    assert sum(session.granted) + window == 1000 + stream.window_left
    assert len(session.granted) <= 2 * 1000 / window + 1, "not for every item"


def test_a_sink_that_holds_stops_the_credit() -> None:
    stream, session, _ = caller(window=4, automatic=True)
    stream.pause_reading()
    for number in range(4):
        stream.accept_raw(raw(number), 0.0)
    assert session.granted == []
    with pytest.raises(ProtocolError):
        stream.accept_raw(raw(4), 0.0)
    stream, session, _ = caller(window=4, automatic=True)
    stream.pause_reading()
    for number in range(4):
        stream.accept_raw(raw(number), 0.0)
    stream.resume_reading()
    assert session.granted == [4]


def test_release_without_automatic_credit_grants_nothing() -> None:
    stream, session, _ = caller(window=4)
    stream.accept_raw(raw(1), 0.0)
    stream.resume_reading()
    assert session.granted == []


def test_no_credit_after_the_end() -> None:
    stream, session, sink = caller(window=2)
    stream.accept_raw(raw(1), 0.0)
    stream.finish(None)
    stream.mark_consumed(2)
    assert (session.granted, sink.ends) == ([], [None])
    stream.cancel()
    assert session.cancelled == []


def test_cancel_once() -> None:
    stream, session, sink = caller()
    stream.cancel()
    stream.cancel()
    assert (session.cancelled, sink.ends) == ([1], [])


@pytest.mark.parametrize("data", [b"\xc1", b"\xa1x", b"\xa2\xff\xff", b"\x91" * 5000])
def test_an_item_of_another_type_ends_the_stream_alone(data: bytes) -> None:
    stream, session, sink = caller()
    stream.accept_raw(data, 0.0)
    assert session.cancelled == [1], "the peer is told"
    (error,) = sink.ends
    assert isinstance(error, ProtocolError)
    assert error.fields["rule"] == "item"
    assert stream.ended


def test_an_item_that_our_own_check_refuses_ends_the_stream_alone() -> None:
    def refuse(data: Any) -> Any:
        raise InvalidRequest("not in the prompt", param="media")

    session, sink = FakeSession(), FakeSink()
    stream = CallerStream(session, 1, sink, refuse, 4)
    stream.accept_raw(raw(1), 0.0)
    assert (session.cancelled, len(sink.ends)) == ([1], 1)


def test_arrivals_are_noted() -> None:
    stream, _, _ = caller()
    assert stream.last_item_at() is None
    stream.accept_raw(raw(1), 7.5)
    assert stream.last_item_at() == 7.5
