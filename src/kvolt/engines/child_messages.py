"""Frames: how an engine in a process of its own and who has started it send each other messages over a socket.

    frame: u32 length (little-endian) | msgpack of one message

Knows neither sockets nor what the messages are: those are the engine's own (`native.shell.messages`,
`sglang.messages`). Imported at both ends, so it needs nothing that only one of them has.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from kvolt.core.errors import ProtocolError

MAX_FRAME_BYTES = 1 << 30
"""More than any message; a longer one is a peer that has lost its place."""

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def raw(value: object) -> msgspec.Raw:
    """Encoded by itself, to be decoded by who knows its type."""
    return msgspec.Raw(_encoder.encode(value))


def frame(message: msgspec.Struct) -> bytearray:
    """ProtocolError for what is too long to be sent."""
    buffer = bytearray(_LENGTH.size)
    _encoder.encode_into(message, buffer, _LENGTH.size)
    size = len(buffer) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {size} bytes is over {MAX_FRAME_BYTES}", rule="frame length")
    _LENGTH.pack_into(buffer, 0, size)
    return buffer


class FrameCutter:
    """Bytes as they come in, whole messages out."""

    def __init__(self) -> None:
        self._partial = bytearray()
        self._wanted = 0
        """Bytes that must be there before it is worth looking again."""

    def feed(self, data: bytes) -> Sequence[memoryview]:
        """The messages that are complete now; they stay valid. ProtocolError for a length that cannot be."""
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return ()
            data = bytes(self._partial)
            self._partial = bytearray()
        view = memoryview(data)
        found: list[memoryview] = []
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
            found.append(view[body:end])
            start = end
        if start < len(data):
            self._partial += view[start:]
            self._wanted = end - start
        return found
