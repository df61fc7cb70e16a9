"""Server-sent events out of bytes, in whatever pieces they come. Pure.

Only the data of events is of interest; names, ids and comments (keep-alives) are passed over. Nothing is decoded:
events are found by their blank lines, which JSON cannot contain.
"""

from __future__ import annotations

import re

from kvolt.core.errors import ProtocolError

MAX_EVENT_BYTES = 8 << 20

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


class EventScanner:
    """Hands out the data of each event when its blank line has come."""

    __slots__ = ("tail",)

    def __init__(self) -> None:
        self.tail = b""
        """Of an event whose blank line has not come yet."""

    def feed(self, piece: bytes) -> list[bytes]:
        *blocks, tail = _BLANK_LINE.split(self.tail + piece)
        if len(tail) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event is over {MAX_EVENT_BYTES} bytes", rule="sse event")
        self.tail = tail
        return [data for block in blocks for data in _data(block)]

    def end(self) -> list[bytes]:
        """What the end of the stream completes: servers forget the last blank line."""
        tail, self.tail = self.tail, b""
        return _data(tail)


def _data(block: bytes) -> list[bytes]:
    """The event's data: its data lines joined, or nothing."""
    if block.startswith(b"data: ") and b"\n" not in block:
        return [block[6:].removesuffix(b"\r")]
    lines = [
        line[5:].removeprefix(b" ").removesuffix(b"\r")
        for line in block.split(b"\n")
        if line.startswith(b"data:")
    ]
    return [b"\n".join(lines)] if lines else []
