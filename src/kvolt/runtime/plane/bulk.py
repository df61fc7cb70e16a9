"""Messages over 64 KiB, sans-I/O: split into chunks for sending, reassembled on arrival.

At most `BULK_STREAMS` messages are chunked concurrently in one direction. The sender alternates between the
oldest message and the one with the fewest bytes left, so a short message does not wait behind a long one, and a
receiver buffers two long ones at most.

At most `BULK_WINDOW_BYTES` may be in transit unread, because a delta cannot overtake bytes in the buffers between
the two processes. The reader returns credit for chunk bytes under stream 0.

The payload of a chunk frame is one flag byte (bit 0: last chunk, bit 1: the message is a Delta, bit 2: it is a raw
byte string, not msgpack) and the chunk data, which is never empty.

A long byte string is never copied or encoded as a whole in one tick: it is sliced where it lies, and on arrival it
grows into the object that the reader gets. Encoding or copying 10 MB at once costs 10 MB of new pages, which
delays every stream by milliseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from typing import NamedTuple

from kvolt.core.errors import ProtocolError
from kvolt.runtime.plane.wire import CHUNK_BYTES, HEADER, FrameKind

BULK_STREAMS = 4
BULK_WINDOW_BYTES = 512 * 1024

_LAST = 1


class MessageKind(IntEnum):
    """Format of a message's bytes; the value is its flag in each chunk."""

    ENCODED = 0
    DELTA = 2
    BYTES = 4


_KINDS = frozenset(MessageKind)


@dataclass(slots=True, eq=False)
class _Outgoing:
    stream_id: int
    data: bytes
    kind: MessageKind
    position: int = 0


class BulkSender:
    """Splits messages into chunks; the caller keeps the order within a stream (one message per stream at a time)."""

    __slots__ = ("_active", "_oldest_next", "_unread_bytes", "_waiting")

    def __init__(self) -> None:
        self._active: deque[_Outgoing] = deque()
        self._waiting: deque[_Outgoing] = deque()
        self._oldest_next = True
        self._unread_bytes = 0
        """Bytes sent and not yet acknowledged as read."""

    @property
    def ready(self) -> bool:
        """Whether a chunk may be sent now."""
        return bool(self._active) and self._unread_bytes < BULK_WINDOW_BYTES

    def ack_bytes(self, num_bytes: int) -> None:
        self._unread_bytes = max(self._unread_bytes - num_bytes, 0)

    def __bool__(self) -> bool:
        return bool(self._active)

    def __len__(self) -> int:
        return len(self._active) + len(self._waiting)

    def enqueue(self, stream_id: int, data: bytes, kind: MessageKind = MessageKind.ENCODED) -> None:
        queue = self._active if len(self._active) < BULK_STREAMS else self._waiting
        queue.append(_Outgoing(stream_id, data, kind))

    def next_chunk(self) -> tuple[bytes, int | None]:
        """The next chunk frame, and the stream id if it completes that stream's message."""
        message = self._choose()
        piece = memoryview(message.data)[message.position : message.position + CHUNK_BYTES]
        message.position += len(piece)
        self._unread_bytes += len(piece) + 1
        last = message.position >= len(message.data)
        if last:
            self._active.remove(message)
            self._refill()
        header = HEADER.pack(len(piece) + 1, FrameKind.CHUNK, message.stream_id)
        flags = message.kind | (_LAST if last else 0)
        return b"".join((header, bytes((flags,)), piece)), message.stream_id if last else None

    def _choose(self) -> _Outgoing:
        oldest_next, self._oldest_next = self._oldest_next, not self._oldest_next
        if oldest_next:
            return self._active[0]
        return min(self._active, key=lambda message: len(message.data) - message.position)

    def drop_stream(self, stream_id: int) -> None:
        """Discard a stream's message: its reader is gone."""
        self._active = deque(message for message in self._active if message.stream_id != stream_id)
        self._waiting = deque(message for message in self._waiting if message.stream_id != stream_id)
        self._refill()

    def clear(self) -> None:
        self._active.clear()
        self._waiting.clear()

    def _refill(self) -> None:
        while self._waiting and len(self._active) < BULK_STREAMS:
            self._active.append(self._waiting.popleft())


class Message(NamedTuple):
    """A reassembled message."""

    data: bytes
    kind: MessageKind


class BulkReceiver:
    """Reassembles messages. Raises ProtocolError when the peer exceeds the bounds."""

    __slots__ = ("_max_message_bytes", "_messages", "_started_at", "_unacknowledged_bytes")

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._messages: dict[int, BytesIO] = {}
        """One growing buffer per message, not a list of chunks: many tiny chunks must not cost more than their bytes.
        The buffer becomes the message without a copy."""
        self._started_at: dict[int, float] = {}
        """Arrival of the first chunk; before that, when the message was announced."""
        self._unacknowledged_bytes = 0

    def ack_due_bytes(self, payload: bytes) -> int:
        """Count a received chunk; returns the bytes to acknowledge now, at least half a window or 0."""
        self._unacknowledged_bytes += len(payload)
        if self._unacknowledged_bytes * 2 < BULK_WINDOW_BYTES:
            return 0
        due, self._unacknowledged_bytes = self._unacknowledged_bytes, 0
        return due

    @property
    def buffered_bytes(self) -> int:
        return sum(message.tell() for message in self._messages.values())

    @property
    def streams(self) -> tuple[int, ...]:
        """Streams with an incomplete message."""
        return tuple(self._messages)

    def extend_deadlines(self, seconds: float) -> None:
        """Extend the deadlines of incomplete messages."""
        for stream_id in self._started_at:
            self._started_at[stream_id] += seconds

    def expect_message(self, stream_id: int, now: float) -> None:
        """Start the deadline of an announced message, before its first chunk."""
        self._started_at[stream_id] = now

    def started_before(self, when: float) -> tuple[int, ...]:
        """Streams whose incomplete message was announced or started before this time."""
        return tuple(stream_id for stream_id, started_at in self._started_at.items() if started_at < when)

    def receive_chunk(self, stream_id: int, payload: bytes, now: float = 0.0) -> Message | None:
        """Add a chunk; returns the message when it is complete."""
        kind = payload[0] & ~_LAST if len(payload) > 1 else -1
        if kind not in _KINDS:
            raise ProtocolError("a chunk without flags or data", rule="chunk")
        message = self._messages.get(stream_id)
        if message is None:
            if len(self._messages) >= BULK_STREAMS:
                raise ProtocolError(f"more than {BULK_STREAMS} chunked messages at once", rule="bulk")
            message = self._messages[stream_id] = BytesIO()
            self._started_at[stream_id] = now
        if message.tell() + len(payload) - 1 > self._max_message_bytes:
            raise ProtocolError(
                f"a chunked message exceeds {self._max_message_bytes} bytes", rule="message_size"
            )
        message.write(memoryview(payload)[1:])
        if not payload[0] & _LAST:
            return None
        self.drop_stream(stream_id)
        return Message(message.getvalue(), MessageKind(kind))

    def drop_stream(self, stream_id: int) -> None:
        self._messages.pop(stream_id, None)
        self._started_at.pop(stream_id, None)

    def clear(self) -> None:
        self._messages.clear()
        self._started_at.clear()
