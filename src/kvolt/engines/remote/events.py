"""Incremental parser of server-sent events. Pure; reads only the data of events."""

from __future__ import annotations

import re

from kvolt.core.errors import ProtocolError

DONE = b"[DONE]"
MAX_EVENT_BYTES = 8 << 20

_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_PREFIX = b"data:"


class EventReader:
    """Returns the data of each complete event. ProtocolError for an event that is too long."""

    __slots__ = ("_tail",)

    def __init__(self) -> None:
        self._tail = b""

    def feed(self, piece: bytes) -> list[bytes]:
        *blocks, tail = _BLANK_LINE.split(self._tail + piece)
        if len(tail) > MAX_EVENT_BYTES:
            raise ProtocolError(f"an event exceeds {MAX_EVENT_BYTES} bytes", rule="sse event")
        self._tail = tail
        return [data for block in blocks if (data := _data(block)) is not None]


def _data(block: bytes) -> bytes | None:
    """Joined data lines of an event. None for a comment (keep-alive)."""
    lines = [
        line.removeprefix(_PREFIX).removeprefix(b" ").removesuffix(b"\r")
        for line in block.split(b"\n")
        if line.startswith(_PREFIX)
    ]
    return b"\n".join(lines) if lines else None
