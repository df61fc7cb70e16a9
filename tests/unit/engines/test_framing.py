"""Frames: whole messages come out, however their bytes were cut on the way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import ProtocolError
from kvolt.engines.framing import MAX_FRAME_BYTES, FrameSplitter, encode_frame, encode_raw


class Word(msgspec.Struct, array_like=True):
    text: str
    inside: msgspec.Raw = msgspec.Raw(b"\xc0")


decode = msgspec.msgpack.Decoder(Word).decode


@given(st.lists(st.integers(0, 3000), max_size=8), st.lists(st.integers(1, 5000), min_size=1))
def test_messages_come_out_whole_however_they_are_cut(lengths: list[int], pieces: list[int]) -> None:
    sent = [Word("x" * length) for length in lengths]
    stream = b"".join(bytes(encode_frame(message)) for message in sent)
    cutter, got = FrameSplitter(), []
    at = number = 0
    while at < len(stream):
        size = pieces[number % len(pieces)]
        got += [decode(message).text for message in cutter.feed(stream[at : at + size])]
        at, number = at + size, number + 1
    assert got == [message.text for message in sent]


def test_a_length_that_cannot_be_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        FrameSplitter().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))


def test_what_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.engines.framing.MAX_FRAME_BYTES", 100)
    with pytest.raises(ProtocolError):
        encode_frame(Word("x" * 100))


def test_what_was_cut_stays_valid() -> None:
    """The bytes of a large value are not copied: nothing may be written over them later."""
    cutter = FrameSplitter()
    first = encode_frame(Word("first"))
    (message,) = cutter.feed(bytes(first[:6])) or cutter.feed(bytes(first[6:]))
    for _ in range(10):
        cutter.feed(bytes(encode_frame(Word("y" * 500))))
    assert decode(message).text == "first"


def test_a_value_inside_is_decoded_by_who_knows_its_type() -> None:
    (message,) = FrameSplitter().feed(bytes(encode_frame(Word("call", encode_raw((1, "a"))))))
    assert msgspec.msgpack.decode(decode(message).inside, type=tuple[int, str]) == (1, "a")
