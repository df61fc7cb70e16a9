"""Whatever bytes a peer sends: they are understood, or they are a ProtocolError. Nothing else is raised,
nothing hangs, and what is held stays within its bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.delta import Delta
from kvolt.core.errors import ErrorInfo, KvoltError, ProtocolError
from kvolt.runtime.plane import wire
from kvolt.runtime.plane.bulk import BULK_STREAMS
from kvolt.runtime.plane.served_stream import ServedStream
from kvolt.runtime.plane.session import Session, SessionLimits
from kvolt.runtime.plane.stats import PlaneStats
from kvolt.runtime.plane.wire import HEADER, FrameDecoder, FrameKind, Hello, Open, encode, frame

MAX_FRAME_BYTES = 4096
MAX_MESSAGE_BYTES = 16384
LIMITS = SessionLimits(
    max_frame_bytes=MAX_FRAME_BYTES, max_message_bytes=MAX_MESSAGE_BYTES, window_items=8, max_streams=16
)
HELLO = Hello(
    versions=(1,),
    process="peer",
    max_frame_bytes=wire.MIN_FRAME_LIMIT_BYTES,
    max_message_bytes=1 << 20,
    heartbeat_s=1.0,
)
NIL = msgspec.Raw(wire.NIL)
DEEP = b"\x91" * 3000 + b"\xc1"
"""Too deep for some versions of Python; the others find the byte at its end."""

decode = msgspec.msgpack.Decoder().decode


class Victim:
    """A session in the middle of its life: three calls out, and it answers what the peer asks."""

    def __init__(self, dialer: bool = True, greeted: bool = True) -> None:
        self.session = Session(dialer=dialer, hello=HELLO, limits=LIMITS, host=self, stats=PlaneStats())
        self.items: list[tuple[int, Any]] = []
        self.ends: list[int] = []
        self.served: list[ServedStream] = []
        self.cancelled: list[int] = []
        self.num_calls = 0
        if greeted:
            self.session.receive(frame(FrameKind.HELLO, 0, encode(HELLO)))
            self._call()

    def _call(self) -> None:
        for number in range(3):
            self.num_calls += 1
            self.session.open("ns.c.e", encode(None), _Sink(self, number), decode)
        self.session.drain_urgent()

    def wake(self) -> None: ...

    def on_hello(self, hello: Hello) -> None: ...

    def report_callback_error(self, fault: Exception) -> None:
        raise fault

    def on_open(self, stream: ServedStream) -> None:
        self.served.append(stream)
        stream.on_cancel = lambda error: self.cancelled.append(stream.id)
        try:
            stream.send(stream.decode_body(decode))
        except KvoltError as error:
            stream.end(error)

    def feed(self, pieces: Iterable[bytes]) -> ProtocolError | None:
        """As a connection does; the error that closed it, if one did."""
        try:
            for piece in pieces:
                self.session.receive(piece)
                self.check_bounds()
                self.session.drain_urgent()
                self.session.next_chunk()
        except ProtocolError as error:
            self.close(error)
            return error
        return None

    def check_bounds(self) -> None:
        session = self.session
        assert session._decoder.buffered_bytes <= MAX_FRAME_BYTES + HEADER.size
        assert session._bulk_receiver.buffered_bytes <= BULK_STREAMS * MAX_MESSAGE_BYTES
        assert len(session._bulk_receiver._messages) <= BULK_STREAMS
        assert session.num_served + len(session._pending_opens) <= LIMITS.max_streams
        assert not any(session._backlogged.get(stream.id) for stream in self.served if stream.closed)

    def close(self, error: ProtocolError) -> None:
        refusal = self.session.refusal(error)
        ((kind, _, payload),) = FrameDecoder(1 << 20).feed(refusal)
        assert (kind, wire.decode_error(payload).code) == (FrameKind.REFUSE, error.code)
        self.session.close(error)
        assert sorted(self.ends) == list(range(self.num_calls)), "each call ends exactly once"
        assert all(stream.closed for stream in self.served)
        assert (self.session.num_calls, self.session.num_served, self.session.num_bulk) == (0, 0, 0)
        assert self.session._bulk_receiver.buffered_bytes == 0


class _Sink:
    def __init__(self, victim: Victim, number: int) -> None:
        self._victim = victim
        self._number = number

    def on_item(self, item: Any) -> None:
        assert self._number not in self._victim.ends
        self._victim.items.append((self._number, item))

    def on_end(self, error: KvoltError | None) -> None:
        self._victim.ends.append(self._number)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def open_frame(stream_id: int, body: Any = None, *, chunked: bool = False, window: int = 4) -> bytes:
    opening = Open("ns.c.e", window, 5.0, {"request_id": "r"}, chunked, NIL if chunked else raw(body))
    return frame(FrameKind.OPEN, stream_id, encode(opening))


def chunk(stream_id: int, piece: bytes, flags: int) -> bytes:
    return frame(FrameKind.CHUNK, stream_id, bytes((flags,)) + piece)


BODY = encode(b"a long request" * 4)
ANSWER = encode(["a long answer"] * 4)
LONG_DELTA = encode(Delta((7, 8, 9)))

TRAFFIC = b"".join(
    (
        frame(FrameKind.DELTAS, 0, encode([(1, Delta((5,))), (3, Delta((6,), index=1))])),
        frame(FrameKind.ITEMS, 0, encode([(1, {"a": [1.5, None]}), (3, "text"), (99, b"nobody's")])),
        open_frame(2, [1, 2, 3]),
        frame(FrameKind.PING, 0),
        open_frame(4, chunked=True),
        chunk(4, BODY[:20], 0),
        chunk(3, ANSWER[:20], 0),
        frame(FrameKind.CREDIT, 0, encode([(2, 3), (77, 1)])),
        chunk(4, BODY[20:], 1),
        chunk(3, ANSWER[20:], 1),
        chunk(5, LONG_DELTA, 3),
        frame(FrameKind.CANCEL, 2),
        frame(FrameKind.ENDS, 0, encode([(1, None), (5, ErrorInfo("not_found", "no", {"kind": "x"}))])),
        frame(FrameKind.GOAWAY, 0),
    )
)
"""What a well-behaved acceptor may send to a dialer with calls 1, 3 and 5 open: every kind but hello."""


def outcome(victim: Victim) -> Any:
    return (
        victim.items,
        victim.ends,
        [stream.id for stream in victim.served],
        victim.cancelled,
        victim.session.peer_going_away,
    )


def whole() -> Any:
    victim = Victim()
    assert victim.feed([TRAFFIC]) is None
    return outcome(victim)


def test_the_traffic_is_understood() -> None:
    assert whole() == (
        [
            (0, Delta((5,))),
            (1, Delta((6,), index=1)),
            (0, {"a": [1.5, None]}),
            (1, "text"),
            (1, ["a long answer"] * 4),
            (2, Delta((7, 8, 9))),
        ],
        [0, 2],
        [2, 4],
        [2],
        True,
    )


def test_cut_at_every_position() -> None:
    expected = whole()
    for position in range(len(TRAFFIC) + 1):
        victim = Victim()
        assert victim.feed([TRAFFIC[:position], TRAFFIC[position:]]) is None
        assert outcome(victim) == expected


def test_byte_by_byte() -> None:
    victim = Victim()
    assert victim.feed([TRAFFIC[i : i + 1] for i in range(len(TRAFFIC))]) is None
    assert outcome(victim) == whole()


def test_truncated_at_every_position() -> None:
    """What is missing is waited for: never an error, and the end of the connection ends every stream."""
    for position in range(len(TRAFFIC)):
        victim = Victim()
        assert victim.feed([TRAFFIC[:position]]) is None
        victim.close(ProtocolError("the peer went away", rule="test"))


def test_every_flipped_bit() -> None:
    num_errors = 0
    for position in range(len(TRAFFIC)):
        for bit in range(8):
            flipped = bytearray(TRAFFIC)
            flipped[position] ^= 1 << bit
            num_errors += Victim().feed([bytes(flipped)]) is not None
    assert 0 < num_errors < 8 * len(TRAFFIC)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=10), st.booleans(), st.booleans())
def test_arbitrary_bytes(pieces: list[bytes], dialer: bool, greeted: bool) -> None:
    Victim(dialer, greeted).feed(pieces)


STREAM_IDS = st.one_of(st.integers(0, 9), st.sampled_from([2**31, 2**32 - 2, 2**32 - 1]))
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ERRORS = st.builds(ErrorInfo, st.sampled_from(["not_found", "from the future"]), st.text(max_size=5))
NUMBERS = st.one_of(st.integers(-2, 12), st.integers(-(2**63), 2**64 - 1))
PAYLOADS = st.one_of(
    st.binary(max_size=40),
    VALUES.map(encode),
    st.lists(st.tuples(NUMBERS, VALUES), max_size=3).map(encode),
    st.lists(st.tuples(NUMBERS, st.none() | ERRORS), max_size=3).map(encode),
    st.lists(st.tuples(NUMBERS, NUMBERS), max_size=3).map(encode),
    st.lists(st.tuples(NUMBERS, st.just(Delta((1,)))), max_size=3).map(encode),
    st.builds(
        lambda window, deadline_s, chunked, body: encode(
            Open("t", window, deadline_s, {}, chunked, raw(body))
        ),
        NUMBERS,
        st.none() | st.floats(),
        st.booleans(),
        VALUES,
    ),
    st.builds(lambda flag, piece: bytes((flag,)) + piece, st.integers(0, 5), st.binary(max_size=3000)),
    st.sampled_from([DEEP, b"\x91\x92\x01" + DEEP, b"\x81\xa1z" + DEEP, b"\x96\xa1t\x01\xc0\x80\xc2" + DEEP]),
)
KINDS = st.one_of(st.sampled_from(list(FrameKind)), st.integers(0, 255))
FRAMES = st.builds(
    lambda kind, stream_id, payload: HEADER.pack(len(payload), kind, stream_id) + payload,
    KINDS,
    STREAM_IDS,
    PAYLOADS,
)


@settings(max_examples=400, deadline=None)
@given(st.lists(FRAMES, max_size=12), st.booleans(), st.booleans())
def test_arbitrary_frames(frames: list[bytes], dialer: bool, greeted: bool) -> None:
    Victim(dialer, greeted).feed(frames)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_spliced_traffic(data: st.DataObject) -> None:
    """Real traffic with pieces of it repeated, left out, or put elsewhere."""
    cuts = st.integers(0, len(TRAFFIC))
    parts = data.draw(st.lists(st.tuples(cuts, cuts), max_size=6))
    Victim().feed([TRAFFIC[min(part) : max(part)] for part in parts])


# --- each rule by name


def refused(rule: str, *frames: bytes, dialer: bool = True, greeted: bool = True) -> None:
    error = Victim(dialer, greeted).feed(frames)
    assert error is not None
    assert error.fields["rule"] == rule


def test_hostile_length() -> None:
    refused("frame_size", HEADER.pack(MAX_FRAME_BYTES + 1, FrameKind.ITEMS, 0))
    refused("frame_size", HEADER.pack(2**32 - 1, FrameKind.ITEMS, 0))


@pytest.mark.parametrize("kind", [0, max(FrameKind) + 1, 255])
def test_unknown_kind(kind: int) -> None:
    refused("frame_kind", HEADER.pack(0, kind, 0))


def test_hello_rules() -> None:
    hello = frame(FrameKind.HELLO, 0, encode(HELLO))
    refused("hello", hello)
    refused("hello", frame(FrameKind.PING, 0), greeted=False)
    small = msgspec.structs.replace(HELLO, max_frame_bytes=wire.MIN_FRAME_LIMIT_BYTES - 1)
    refused("hello", frame(FrameKind.HELLO, 0, encode(small)), greeted=False)
    refused("payload", frame(FrameKind.HELLO, 0, encode({"versions": "1"})), greeted=False)


@pytest.mark.parametrize("stream_id", [0, 1, 3, 2**32 - 1])
def test_stream_id_of_the_wrong_side(stream_id: int) -> None:
    refused("stream_id", open_frame(stream_id))
    refused("stream_id", frame(FrameKind.CANCEL, stream_id or 1))


def test_stream_id_used_again() -> None:
    refused("stream_id", open_frame(4), open_frame(4))
    refused("stream_id", open_frame(4), open_frame(2))
    refused("stream_id", open_frame(4), frame(FrameKind.CANCEL, 4), open_frame(4))


def test_window_and_credit_rules() -> None:
    refused("window", open_frame(2, window=0))
    refused("credit", open_frame(2), frame(FrameKind.CREDIT, 0, encode([(2, 0)])))
    refused("credit", frame(FrameKind.CREDIT, 0, encode([(2, -5)])))


@pytest.mark.parametrize("deadline_s", [float("nan"), -1.0, float("-inf")])
def test_deadline_rule(deadline_s: float) -> None:
    opening = Open("t", 4, deadline_s, {}, False, NIL)
    refused("deadline", frame(FrameKind.OPEN, 2, encode(opening)))


@pytest.mark.parametrize(
    "overrun",
    [
        lambda: frame(FrameKind.DELTAS, 0, encode([(1, Delta((1,)))] * 9)),
        lambda: frame(FrameKind.ITEMS, 0, encode([(1, None)] * 9)),
        lambda: chunk(1, b"\xc0", 1) * 9,
        lambda: chunk(1, encode(Delta((1,))), 3) * 9,
    ],
)
def test_credit_overrun(overrun: Callable[[], bytes]) -> None:
    victim = Victim()
    error = victim.feed([overrun()])
    assert error is not None
    assert error.fields["rule"] == "credit"
    assert len(victim.items) == LIMITS.window_items


def test_more_messages_in_pieces_than_allowed() -> None:
    frames = [open_frame(2 * n, chunked=True) + chunk(2 * n, b"x", 0) for n in range(1, BULK_STREAMS + 2)]
    refused("bulk", *frames)


def test_chunk_flood() -> None:
    flood = [chunk(4, b"x" * 4000, 0) for _ in range(10)]
    refused("message_size", open_frame(4, chunked=True), *flood)


def test_a_flood_of_nothing() -> None:
    """Pieces without a byte would never reach the size limit."""
    refused("chunk", open_frame(4, chunked=True), chunk(4, b"", 0))
    refused("chunk", open_frame(4, chunked=True), frame(FrameKind.CHUNK, 4))
    refused("chunk", open_frame(4, chunked=True), chunk(4, b"x", 8))


def test_chunks_of_unknown_streams_are_let_pass() -> None:
    victim = Victim()
    flood = [chunk(stream_id, b"x" * 4000, 0) for stream_id in range(100, 200)]
    assert victim.feed(flood) is None
    assert victim.session._bulk_receiver.buffered_bytes == 0


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\xff" * 10, b"\x91\x92\x01\xa2\xff\xff", b"\x91\x92\x01", DEEP, b"\x91\x92\x01" + DEEP],
)
@pytest.mark.parametrize(
    "kind",
    [FrameKind.OPEN, FrameKind.DELTAS, FrameKind.ITEMS, FrameKind.ENDS, FrameKind.CREDIT, FrameKind.REFUSE],
)
def test_payloads_that_do_not_decode(kind: FrameKind, payload: bytes) -> None:
    victim = Victim()
    error = victim.feed([frame(kind, 2 if kind is FrameKind.OPEN else 0, payload)])
    if error is None:  # bad text in an item is found when the item is decoded: its stream's own trouble
        assert kind in (FrameKind.ITEMS, FrameKind.DELTAS)
        assert victim.ends == [0]
    else:
        assert error.fields["rule"] == "payload"


def test_names_that_are_not_text() -> None:
    refused("payload", frame(FrameKind.HELLO, 0, b"\x81\xa7process\xa2\xff\xff"), greeted=False)
    refused("payload", frame(FrameKind.OPEN, 2, b"\x96\xa2\xff\xff\x01\xc0\x80\xc2\xc0"))


@pytest.mark.parametrize("data", [b"\xc1", b"\xa2\xff\xff", DEEP, b"\xc0\xc0"])
def test_a_long_item_that_does_not_decode_ends_its_stream_only(data: bytes) -> None:
    victim = Victim()
    assert victim.feed([chunk(1, data, 1), frame(FrameKind.ITEMS, 0, encode([(3, 1)]))]) is None
    assert victim.ends == [0]
    assert victim.items == [(1, 1)]


def test_a_request_that_does_not_decode_ends_its_stream_only() -> None:
    victim = Victim()
    deep = Open("t", 4, None, {}, False, msgspec.Raw(b"\xa2\xff\xff"))
    assert victim.feed([frame(FrameKind.OPEN, 2, encode(deep)), open_frame(4, chunked=True)]) is None
    assert victim.feed([chunk(4, DEEP[:3000], 0), chunk(4, DEEP[3000:], 1)]) is None
    assert [stream.end_info.code for stream in victim.served if stream.end_info] == ["invalid_request"] * 2


# --- the decoder alone


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(list(FrameKind)), STREAM_IDS, st.binary(max_size=100)), max_size=8),
    st.lists(st.integers(1, 50), max_size=30),
)
def test_frames_survive_any_cut(frames: list[tuple[FrameKind, int, bytes]], sizes: list[int]) -> None:
    data = b"".join(frame(*each) for each in frames)
    decoder = FrameDecoder(100)
    got: list[wire.Frame] = []
    for size in sizes:
        got += decoder.feed(data[:size])
        data = data[size:]
        assert decoder.buffered_bytes < HEADER.size + 100
    got += decoder.feed(data)
    assert got == [(int(kind), stream_id, payload) for kind, stream_id, payload in frames]
    assert decoder.buffered_bytes == 0


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=20))
def test_decoder_memory_is_bounded_and_errors_stick(pieces: list[bytes]) -> None:
    decoder = FrameDecoder(50)
    errors: list[ProtocolError] = []
    for piece in pieces:
        try:
            decoder.feed(piece)
        except ProtocolError as error:
            errors.append(error)
        else:
            assert not errors, "a broken stream was understood again"
        assert decoder.buffered_bytes < HEADER.size + 50
    assert all(error is errors[0] for error in errors)
    assert not errors or decoder.buffered_bytes == 0
