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

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> list[bytes]:
        if (
            not self._tail
            and piece.startswith(b"data: ")
            and piece.endswith(b"\n\n")
            and piece.find(b"\n", 6) == len(piece) - 2
            and piece[-3] != 13
        ):
            return [piece[6:-2]]  # exactly one event of one line, as a server writes a token
        return self._scan(piece)

    def end(self) -> list[bytes]:
        """What the end of the stream completes: servers forget the last blank line."""
        tail, self._tail = self._tail, b""
        return _data(tail)

    def _scan(self, piece: bytes) -> list[bytes]:
        *blocks, tail = _BLANK_LINE.split(self._tail + piece)
        if len(tail) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event is over {MAX_EVENT_BYTES} bytes", rule="sse event")
        self._tail = tail
        return [data for block in blocks for data in _data(block)]


def _data(block: bytes) -> list[bytes]:
    """The event's data: its data lines joined, or nothing."""
    lines = [
        line[5:].removeprefix(b" ").removesuffix(b"\r")
        for line in block.split(b"\n")
        if line.startswith(b"data:")
    ]
    return [b"\n".join(lines)] if lines else []
