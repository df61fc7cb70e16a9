"""Incremental parser of server-sent events. Pure.

Returns the data of events; names, ids and comments (keep-alives) are skipped. Nothing is decoded: events end at blank
lines, which JSON cannot contain.
"""

from __future__ import annotations

import re

from kvolt.core.errors import ProtocolError

DONE = b"[DONE]"
"""Data of the event that ends a stream of the OpenAI API."""
MAX_EVENT_BYTES = 8 << 20

_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_PREFIX = b"data: "


class EventReader:
    """Returns the data of each complete event. Raises ProtocolError for an event that is too long."""

    __slots__ = ("tail",)

    def __init__(self) -> None:
        self.tail = b""
        """Bytes of the incomplete last event."""

    def feed(self, piece: bytes) -> list[bytes]:
        is_single = piece.endswith(b"\n\n") and piece.find(b"\n\n") == len(piece) - 2
        if is_single and not self.tail and b"\r" not in piece:
            return _data(piece[:-2])
        *blocks, tail = _BLANK_LINE.split(self.tail + piece)
        if len(tail) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event exceeds {MAX_EVENT_BYTES} bytes", rule="sse event")
        self.tail = tail
        return [data for block in blocks for data in _data(block)]

    def end(self) -> list[bytes]:
        """Complete the last event at the end of the stream: some servers omit the last blank line."""
        tail, self.tail = self.tail, b""
        return _data(tail)


def _data(block: bytes) -> list[bytes]:
    """Joined data lines of the event, or nothing."""
    if block.startswith(_PREFIX) and b"\n" not in block and b"\r" not in block:
        return [block[len(_PREFIX) :]]
    lines = [line[5:].removeprefix(b" ") for line in block.splitlines() if line.startswith(b"data:")]
    return [b"\n".join(lines)] if lines else []
