"""Messages over 64 KiB, sans-I/O: cut into chunks to send, put together on arrival.

At most `BULK_STREAMS` messages are in pieces at once in one direction. The sender gives every other piece
to the oldest of them and the rest to the one with the least left: a short message does not wait behind a
long one, and a receiver keeps two long ones at most.

Only `BULK_WINDOW_BYTES` may be on their way unread: what lies in the buffers between the two processes
cannot be overtaken by a delta. The reader gives credit for bytes of chunks under stream 0.

A chunk frame's payload is one flag byte (bit 0: the last piece, bit 1: the message is a Delta, bit 2: it
is a byte string as it is, not its encoding) and the piece, which is never empty.

No tick touches a whole byte string: it is cut where it lies and grows on arrival into the object that the
reader gets. Encoding or copying 10 MB at once means 10 MB of new pages, milliseconds for every stream.
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
    """What a message's bytes are; the value is its flag in each chunk."""

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
    """Cuts messages; the order within a stream is the caller's to keep (one message per stream at a time)."""

    __slots__ = ("_active", "_oldest_next", "_unread_bytes", "_waiting")

    def __init__(self) -> None:
        self._active: deque[_Outgoing] = deque()
        self._waiting: deque[_Outgoing] = deque()
        self._oldest_next = True
        self._unread_bytes = 0
        """Sent, and not yet said to be read."""

    @property
    def ready(self) -> bool:
        """Whether a chunk may leave now."""
        return bool(self._active) and self._unread_bytes < BULK_WINDOW_BYTES

    def was_read(self, num_bytes: int) -> None:
        self._unread_bytes = max(self._unread_bytes - num_bytes, 0)

    def __bool__(self) -> bool:
        return bool(self._active)

    def __len__(self) -> int:
        return len(self._active) + len(self._waiting)

    def add(self, stream_id: int, data: bytes, kind: MessageKind = MessageKind.ENCODED) -> None:
        queue = self._active if len(self._active) < BULK_STREAMS else self._waiting
        queue.append(_Outgoing(stream_id, data, kind))

    def take(self) -> tuple[bytes, int | None]:
        """The next chunk frame, and the stream whose message it completes, if it does."""
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

    def drop(self, stream_id: int) -> None:
        """Forget a stream's message: its reader has given up."""
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
    """A message that is whole again."""

    data: bytes
    kind: MessageKind


class BulkReceiver:
    """Puts messages together; breaks the connection when the peer exceeds the bounds."""

    __slots__ = ("_begun_at", "_max_message_bytes", "_messages", "_unacknowledged_bytes")

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._messages: dict[int, BytesIO] = {}
        """One buffer each, not a list of pieces: many tiny pieces must not cost more than their bytes.
        What it grows becomes the message without a copy."""
        self._begun_at: dict[int, float] = {}
        """When its first piece came; until then, since when it has been expected."""
        self._unacknowledged_bytes = 0

    def credit(self, payload: bytes) -> int:
        """A chunk was read, whosever it is: bytes to give credit for now, half a window at a time."""
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
        """Those with a message in pieces."""
        return tuple(self._messages)

    def forgive(self, seconds: float) -> None:
        """Messages that are not whole began so much later."""
        for stream_id in self._begun_at:
            self._begun_at[stream_id] += seconds

    def expect(self, stream_id: int, now: float) -> None:
        """A message was announced; its first piece has to come in time, too."""
        self._begun_at[stream_id] = now

    def begun_before(self, when: float) -> tuple[int, ...]:
        """Streams whose message was announced or began to arrive before this time and is not whole."""
        return tuple(stream_id for stream_id, begun_at in self._begun_at.items() if begun_at < when)

    def add(self, stream_id: int, payload: bytes, now: float = 0.0) -> Message | None:
        """The whole message once its last piece is there."""
        kind = payload[0] & ~_LAST if len(payload) > 1 else -1
        if kind not in _KINDS:
            raise ProtocolError("a chunk without its flags or without a piece", rule="chunk")
        message = self._messages.get(stream_id)
        if message is None:
            if len(self._messages) >= BULK_STREAMS:
                raise ProtocolError(f"more than {BULK_STREAMS} messages in pieces at once", rule="bulk")
            message = self._messages[stream_id] = BytesIO()
            self._begun_at[stream_id] = now
        if message.tell() + len(payload) - 1 > self._max_message_bytes:
            raise ProtocolError(
                f"a message in pieces is over {self._max_message_bytes} bytes", rule="message_size"
            )
        message.write(memoryview(payload)[1:])
        if not payload[0] & _LAST:
            return None
        self.drop(stream_id)
        return Message(message.getvalue(), MessageKind(kind))

    def drop(self, stream_id: int) -> None:
        self._messages.pop(stream_id, None)
        self._begun_at.pop(stream_id, None)

    def clear(self) -> None:
        self._messages.clear()
        self._begun_at.clear()
