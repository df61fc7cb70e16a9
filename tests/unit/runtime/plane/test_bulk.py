"""Long messages in pieces: fairness, order, bounds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.errors import ProtocolError
from kvolt.runtime.plane.bulk import BULK_STREAMS, BulkReceiver, BulkSender, Message, MessageKind
from kvolt.runtime.plane.wire import CHUNK_BYTES, HEADER, FrameDecoder, FrameKind


def pieces(sender: BulkSender) -> list[tuple[int, bytes]]:
    taken = []
    while sender:
        data, _ = sender.next_chunk()
        ((kind, stream_id, payload),) = FrameDecoder(1 << 20).feed(data)
        assert kind == FrameKind.CHUNK
        assert len(data) <= HEADER.size + 1 + CHUNK_BYTES
        taken.append((stream_id, payload))
    return taken


@pytest.mark.parametrize("size", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES, 200_001])
@pytest.mark.parametrize("kind", MessageKind)
def test_round_trip(size: int, kind: MessageKind) -> None:
    sender, receiver = BulkSender(), BulkReceiver(size)
    data = bytes(range(251)) * (size // 251 + 1)
    sender.enqueue(5, data[:size], kind)
    got = [receiver.receive_chunk(stream_id, payload) for stream_id, payload in pieces(sender)]
    assert got[-1] == Message(data[:size], kind)
    assert got[:-1] == [None] * ((size - 1) // CHUNK_BYTES)
    assert receiver.buffered_bytes == 0
    assert not sender


def test_the_last_piece_names_its_stream() -> None:
    sender = BulkSender()
    sender.enqueue(5, b"x" * (CHUNK_BYTES + 1))
    assert sender.next_chunk()[1] is None
    assert sender.next_chunk()[1] == 5


def test_a_short_message_overtakes_long_ones_and_the_oldest_still_moves() -> None:
    sender = BulkSender()
    for stream_id, num_chunks in ((1, 8), (2, 8), (3, 2)):
        sender.enqueue(stream_id, b"x" * (num_chunks * CHUNK_BYTES))
    order = [stream_id for stream_id, _ in pieces(sender)]
    assert order[:4] == [1, 3, 1, 3]
    assert [stream_id for stream_id in order[4:] if stream_id != 3] == [1] * 6 + [2] * 8


def test_at_most_two_long_messages_are_unfinished_at_once() -> None:
    sender, receiver = BulkSender(), BulkReceiver(1 << 20)
    for stream_id in range(1, 9):
        sender.enqueue(stream_id, b"x" * ((stream_id % 3 + 4) * CHUNK_BYTES))
    most = 0
    for stream_id, payload in pieces(sender):
        receiver.receive_chunk(stream_id, payload)
        most = max(most, len(receiver.streams))
    assert most <= 2


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 3 * CHUNK_BYTES), min_size=1, max_size=10),
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=3),
)
def test_never_more_at_once_than_allowed(sizes: list[int], drops: list[tuple[int, int]]) -> None:
    """Whatever is dropped on the way (and told to the receiver, as a cancel does), the bound holds."""
    sender, receiver = BulkSender(), BulkReceiver(4 * CHUNK_BYTES)
    for stream_id, size in enumerate(sizes):
        sender.enqueue(stream_id, bytes([stream_id]) * size)
    done, dropped, number = {}, set(), 0
    while sender:
        for when, stream_id in drops:
            if when == number:
                sender.drop_stream(stream_id)
                receiver.drop_stream(stream_id)
                dropped.add(stream_id)
        number += 1
        if not sender:
            break
        data, completed = sender.next_chunk()
        ((_, stream_id, payload),) = FrameDecoder(1 << 20).feed(data)
        message = receiver.receive_chunk(stream_id, payload)
        assert (message is not None) == (completed == stream_id)
        if message is not None:
            done[stream_id] = message.data
        assert len(receiver._messages) <= BULK_STREAMS
    for stream_id, size in enumerate(sizes):
        if stream_id in done:
            assert done[stream_id] == bytes([stream_id]) * size
        else:
            assert stream_id in dropped
    assert receiver.buffered_bytes == 0


def test_one_too_many() -> None:
    receiver = BulkReceiver(100)
    for stream_id in range(BULK_STREAMS):
        receiver.receive_chunk(stream_id, b"\x00x")
    with pytest.raises(ProtocolError) as caught:
        receiver.receive_chunk(99, b"\x00x")
    assert caught.value.fields["rule"] == "bulk"
    receiver.drop_stream(0)
    assert receiver.receive_chunk(99, b"\x01x") == Message(b"x", MessageKind.ENCODED)


def test_the_size_limit_itself_is_allowed() -> None:
    receiver = BulkReceiver(4)
    receiver.receive_chunk(1, b"\x00ab")
    assert receiver.receive_chunk(1, b"\x01cd") == Message(b"abcd", MessageKind.ENCODED)
    receiver.receive_chunk(1, b"\x00ab")
    with pytest.raises(ProtocolError) as caught:
        receiver.receive_chunk(1, b"\x01cde")
    assert caught.value.fields["rule"] == "message_size"
    assert receiver.buffered_bytes <= 4


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x01", b"\x06x", b"\x08x", b"\xffx"])
def test_not_a_chunk(payload: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        BulkReceiver(100).receive_chunk(1, payload)
    assert caught.value.fields["rule"] == "chunk"


def test_clear() -> None:
    sender, receiver = BulkSender(), BulkReceiver(100)
    for stream_id in range(10):
        sender.enqueue(stream_id, b"x")
    sender.clear()
    assert not sender
    receiver.receive_chunk(1, b"\x00x")
    receiver.clear()
    assert receiver.buffered_bytes == 0
