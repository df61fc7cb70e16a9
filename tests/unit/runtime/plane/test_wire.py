"""Frames: the header, and what a decoder does at each boundary. The fuzzing is in tests/property."""

from __future__ import annotations

import msgspec
import pytest

from kvolt.core.errors import ProtocolError
from kvolt.runtime.plane.wire import (
    HEADER,
    FrameDecoder,
    FrameKind,
    Hello,
    Open,
    decode_open,
    encode,
    frame,
    negotiate,
)


def test_header_is_nine_bytes_little_endian() -> None:
    assert HEADER.size == 9
    assert frame(FrameKind.PING, 0x01020304, b"ab") == b"\x02\0\0\0\x0a\x04\x03\x02\x01ab"


def test_several_frames_in_one_piece() -> None:
    decoder = FrameDecoder(10)
    data = frame(FrameKind.PING, 1) + frame(FrameKind.ITEMS, 2, b"x" * 10) + frame(FrameKind.ENDS, 3, b"y")
    assert decoder.feed(data + b"\x01") == [
        (FrameKind.PING, 1, b""),
        (FrameKind.ITEMS, 2, b"x" * 10),
        (FrameKind.ENDS, 3, b"y"),
    ]
    assert decoder.buffered_bytes == 1


def test_nothing_comes_of_nothing() -> None:
    decoder = FrameDecoder(10)
    assert decoder.feed(b"") == []
    assert decoder.buffered_bytes == 0


def test_the_limit_itself_is_allowed() -> None:
    assert FrameDecoder(10).feed(frame(FrameKind.ITEMS, 0, b"x" * 10))
    with pytest.raises(ProtocolError) as caught:
        FrameDecoder(9).feed(frame(FrameKind.ITEMS, 0, b"x" * 10)[:9])
    assert caught.value.fields["rule"] == "frame_size"


def test_a_long_frame_is_refused_by_its_header() -> None:
    """Not after its bytes have been kept."""
    decoder = FrameDecoder(100)
    assert decoder.feed(HEADER.pack(101, FrameKind.ITEMS, 0)[:8]) == []
    with pytest.raises(ProtocolError):
        decoder.feed(HEADER.pack(101, FrameKind.ITEMS, 0)[8:])
    assert decoder.buffered_bytes == 0


def test_broken_stays_broken() -> None:
    decoder = FrameDecoder(100)
    with pytest.raises(ProtocolError) as first:
        decoder.feed(HEADER.pack(0, 99, 0))
    with pytest.raises(ProtocolError) as second:
        decoder.feed(frame(FrameKind.PING, 0))
    assert second.value is first.value


def test_hello_is_a_map_that_may_grow() -> None:
    hello = Hello(versions=(1,), process="p", max_frame_bytes=1, max_message_bytes=2, heartbeat_s=0.5)
    assert set(msgspec.msgpack.decode(encode(hello))) == {
        "versions",
        "process",
        "max_frame_bytes",
        "max_message_bytes",
        "heartbeat_s",
    }


def test_open_keeps_its_body_as_it_is() -> None:
    body = encode({"a": [1, 2]})
    opening = decode_open(encode(Open("t", 1, None, {}, False, msgspec.Raw(body))))
    assert bytes(opening.body) == body


def test_the_best_common_version() -> None:
    assert negotiate((3, 2, 1), (1, 2)) == 2
    assert negotiate((1,), (2,)) is None
