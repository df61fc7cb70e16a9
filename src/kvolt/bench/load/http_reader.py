"""Incremental HTTP/1.1 response parser. Pure.

Handles framing: heads, chunks, lengths and connection reuse. Optimized for streams of small chunks: a complete chunk
costs a search, a lookup and two slices.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from kvolt.core.errors import ProtocolError

MAX_HEAD_BYTES = 64 << 10
_MAX_CHUNK_LINE_BYTES = 4 << 10
_MAX_SIZE_CHARS = 5
_BODILESS = (204, 304)
_SIZES = {spelled: size for size in range(1, 1 << 12) for spelled in (b"%x" % size, b"%X" % size)}
"""Sizes of small chunks by their usual hex spelling; others are parsed in the slow path."""


BodyReader = Callable[[list[bytes], float], None]
"""Receives the body pieces of one read and their arrival time."""


class _Awaiting(Enum):
    HEAD = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILER = auto()
    LENGTH = auto()
    CLOSE = auto()
    NOTHING = auto()


_CHUNK_LINE = _Awaiting.CHUNK_LINE
"""Cached, since an enum lookup takes 0.15 us per token."""


class ResponseReader:
    """Parser of one response; `begin` resets it for the next one on the connection."""

    __slots__ = ("_awaiting", "_left", "_tail", "done", "headers", "reusable", "status")

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._awaiting = _Awaiting.HEAD
        self._tail = b""
        self._left = 0
        self.status: int | None = None
        """None before the response head."""
        self.headers: dict[bytes, bytes] = {}
        """Names in lower case; the last value of repeated names."""
        self.reusable = False
        """Whether the connection can be reused after this response."""
        self.done = False

    def feed(self, data: bytes) -> list[bytes]:
        """Parse data; return its body pieces. Raises ProtocolError for invalid HTTP or data after the response."""
        if self._tail:
            data = self._tail + data
            self._tail = b""
        at = 0
        pieces: list[bytes] = []
        if self._awaiting is _CHUNK_LINE:
            # Fast path: nearly every read contains a single token.
            end = data.find(b"\r\n", 0, _MAX_SIZE_CHARS)
            if end > 0 and _SIZES.get(data[:end]) == len(data) - end - 4 and data.endswith(b"\r\n"):
                return [data[end + 2 : -2]]
            at = _take_whole_chunks(data, at, pieces)
            if at == len(data):
                return pieces
        self._read(data, at, pieces)
        return pieces

    def end(self) -> None:
        """Process the end of the connection. Raises ProtocolError if the response is incomplete."""
        if self._awaiting is _Awaiting.CLOSE:
            self._awaiting = _Awaiting.NOTHING
            self.done = True
        elif not self.done:
            raise ProtocolError("the connection was closed during the response", rule="http end")

    def _read(self, data: bytes, at: int, pieces: list[bytes]) -> None:
        while at < len(data):
            match self._awaiting:
                case _Awaiting.CHUNK | _Awaiting.LENGTH:
                    piece = data[at : at + self._left]
                    pieces.append(piece)
                    at += len(piece)
                    self._took(len(piece))
                    continue
                case _Awaiting.CLOSE:
                    pieces.append(data[at:])
                    return
                case _Awaiting.NOTHING:
                    raise ProtocolError("data after the end of the response", rule="http end")
                case _Awaiting.HEAD:
                    end, mark, limit = data.find(b"\r\n\r\n", at), 4, MAX_HEAD_BYTES
                case _:
                    end, mark, limit = data.find(b"\r\n", at), 2, _MAX_CHUNK_LINE_BYTES
            if (end if end >= 0 else len(data)) - at > limit:
                raise ProtocolError(f"a head or chunk line exceeds {limit} bytes", rule="http head")
            if end < 0:
                self._tail = data[at:]
                return
            part, at = data[at:end], end + mark
            self._line(part)
            if self._awaiting is _CHUNK_LINE:
                at = _take_whole_chunks(data, at, pieces)

    def _line(self, part: bytes) -> None:
        match self._awaiting:
            case _Awaiting.HEAD:
                self._head(part)
            case _Awaiting.CHUNK_LINE:
                digits = part.partition(b";")[0].strip()
                self._left = _number(digits, 16)
                self._awaiting = _Awaiting.CHUNK if self._left else _Awaiting.TRAILER
            case _Awaiting.CHUNK_END:
                if part:
                    raise ProtocolError("a chunk is longer than its size line", rule="http chunk")
                self._awaiting = _Awaiting.CHUNK_LINE
            case _ if not part:  # the empty line after the trailers
                self._finish()

    def _head(self, head: bytes) -> None:
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if not version.startswith(b"HTTP/1.") or len(rest) < 3:
            raise ProtocolError(
                f"the response begins with {lines[0][:40]!r}, not with HTTP/1.1", rule="http head"
            )
        status = _number(rest[:3], 10)
        if 100 <= status < 200:
            return  # interim response
        headers = {}
        for line in lines[1:]:
            name, colon, value = line.partition(b":")
            if not colon:
                raise ProtocolError(f"invalid header {line[:40]!r}", rule="http head")
            headers[name.strip().lower()] = value.strip()
        self.status, self.headers = status, headers
        connection = headers.get(b"connection", b"").lower()
        self.reusable = connection != b"close" if version == b"HTTP/1.1" else connection == b"keep-alive"
        if status in _BODILESS:
            self._finish()
        elif headers.get(b"transfer-encoding", b"").lower().endswith(b"chunked"):
            self._awaiting = _Awaiting.CHUNK_LINE
        elif b"content-length" in headers:
            self._left = _number(headers[b"content-length"], 10)
            self._awaiting = _Awaiting.LENGTH
            self._took(0)
        else:
            self._awaiting = _Awaiting.CLOSE
            self.reusable = False

    def _took(self, num_bytes: int) -> None:
        self._left -= num_bytes
        if self._left:
            return
        if self._awaiting is _Awaiting.CHUNK:
            self._awaiting = _Awaiting.CHUNK_END
        else:
            self._finish()

    def _finish(self) -> None:
        self._awaiting = _Awaiting.NOTHING
        self.done = True


def _take_whole_chunks(data: bytes, at: int, pieces: list[bytes]) -> int:
    """Append complete small chunks to `pieces`; return the offset of the rest."""
    while at < len(data):
        end = data.find(b"\r\n", at, at + _MAX_SIZE_CHARS)
        if end < 0:
            return at
        start = end + 2
        size = _SIZES.get(data[at:end])
        if size is None or not data.startswith(b"\r\n", start + size):
            return at
        pieces.append(data[start : start + size])
        at = start + size + 2
    return at


def _number(digits: bytes, base: int) -> int:
    try:
        if not digits.isalnum() or len(digits) > 16:  # int() would accept signs, spaces and underscores
            raise ValueError
        return int(digits, base)
    except ValueError:
        raise ProtocolError(f"invalid number {digits[:40]!r}", rule="http number") from None
