"""Length-prefixed frames between a process and the engine process that it started.

    frame: u32 length (little-endian) | msgpack of one message

Knows neither sockets nor message types: those belong to the engine (`native.shell.messages`,
`sglang.host.messages`). Imported at both ends, so it depends on nothing that only one of them has installed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from kvolt.core.errors import ProtocolError

MAX_FRAME_BYTES = 1 << 30
"""More than any message; a longer frame means that the stream is out of sync."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode_raw(value: object) -> msgspec.Raw:
    """Encode a value separately, to be decoded where its type is known."""
    return msgspec.Raw(_encoder.encode(value))


def encode_frame(message: msgspec.Struct) -> bytearray:
    """ProtocolError if the message is too long."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {size} bytes is over {MAX_FRAME_BYTES}", rule="frame length")
    _LENGTH.pack_into(buffer, 0, size)
    return buffer


class FrameSplitter:
    """Incremental decoder: bytes in, complete messages out."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._num_required = 0
        """Size that must be buffered before the next message is complete."""

    def feed(self, data: bytes) -> Sequence[memoryview]:
        """The messages that are complete now; they stay valid. ProtocolError for an impossible length."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._num_required:
                return ()
            data = bytes(self._partial)
            self._partial = bytearray()
        view = memoryview(data)
        messages: list[memoryview] = []
        start = 0
        while True:
            body = start + _LENGTH.size
            if body > len(data):
                end = body
                break
            (size,) = _LENGTH.unpack_from(data, start)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes", rule="frame length")
            end = body + size
            if end > len(data):
                break
            messages.append(view[body:end])
            start = end
        if start < len(data):
            self._partial += view[start:]
            self._num_required = end - start
        return messages
