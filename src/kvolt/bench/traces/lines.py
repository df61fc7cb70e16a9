"""Numbered lines, and items of JSON arrays, of a plain or gzip file; the error type of all trace readers.

An item may be longer than a line, and a file larger than memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from kvolt.core.errors import ConfigError

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line or JSON array item, so that a wrong file does not exhaust memory."""

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)
"""Exceptions of reading: I/O errors and invalid gzip data."""


def trace_error(file: str, line: int, reason: str, remedy: str | None = None) -> ConfigError:
    """Create the ConfigError of all readers. `line` counts from 1."""
    remedy = remedy or "correct or remove the line"
    return ConfigError(
        f"{file}:{line}: {reason}", key="trace", remedy=remedy, file=file, line=line, reason=reason
    )


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """Open a file, decompressed if it starts with the gzip magic number."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}", key="trace", remedy="choose a readable trace file"
        ) from error
    with file:
        if file.peek(2)[:2] != _GZIP_MAGIC:
            yield file
            return
        # GzipFile reads lines slowly and has no peek.
        with gzip.GzipFile(fileobj=file) as unzipped, BufferedReader(cast(Any, unzipped)) as stream:
            yield stream


def numbered_lines(stream: BufferedReader, file: str) -> Iterator[tuple[int, bytes]]:
    """Numbered non-empty lines, stripped."""
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(MAX_LINE_BYTES + 1)
        except UNREADABLE as error:
            raise trace_error(file, number, f"cannot be read: {error}", "download the file again") from error
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise trace_error(file, number, f"a line exceeds {MAX_LINE_BYTES >> 20} MiB")
        text = strip_mark(line).strip() if number == 1 else line.strip()
        if text:
            yield number, text


def strip_mark(start: bytes) -> bytes:
    """Remove a UTF-8 byte order mark."""
    return start.removeprefix(_BYTE_ORDER_MARK)


_CHUNK_BYTES = 1 << 20
_NEAR_END_CHARS = 16
"""Maximum distance of the error position from the end of the buffer for an incomplete token."""
_WHITE = " \t\r\n"


class ItemReader:
    """Iterates over (first line of the item, item) of a JSON array.

    Uses `raw_decode`, which returns the end of an item. Incomplete and invalid items are distinguished by the position
    of the decoding error.
    """

    def __init__(self, stream: BufferedReader, file: str) -> None:
        self._stream = stream
        self._file = file
        self._text = ""
        self._at = 0
        self._line = 1
        """Line number of `_at`."""
        self._ended = False
        self._decode = json.JSONDecoder().raw_decode
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        self._expect("[")
        if self._next_char() != "]":
            while True:
                self._next_char()
                line = self._line
                yield line, self._item()
                if self._next_char() != ",":
                    break
                self._advance(self._at + 1)
        self._expect("]")
        if self._next_char():
            raise self._error("data after the array")

    def _expect(self, char: str) -> None:
        char_found = self._next_char()
        if char_found != char:
            raise self._error(
                f"bad JSON: expected {char!r}, got {char_found!r}"
                if char_found
                else "bad JSON: unexpected end of file"
            )
        self._advance(self._at + 1)

    def _next_char(self) -> str:
        """Peek at the next non-whitespace character; empty at the end of the file."""
        while True:
            end = self._at
            while end < len(self._text) and self._text[end] in _WHITE:
                end += 1
            self._advance(end)
            if end < len(self._text):
                return self._text[end]
            if not self._more():
                return ""

    def _item(self) -> Any:
        while True:
            try:
                item, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                cut = (
                    error.msg.startswith("Unterminated string")
                    or error.pos >= len(self._text) - _NEAR_END_CHARS
                )
                if cut and len(self._text) - self._at > MAX_LINE_BYTES:
                    raise self._error(f"an item exceeds {MAX_LINE_BYTES >> 20} MiB") from error
                if cut and self._more():
                    continue
                line = self._line + self._text.count("\n", self._at, error.pos)
                raise trace_error(self._file, line, f"bad JSON: {error.msg}") from error
            except RecursionError as error:
                raise self._error("bad JSON: nested too deeply") from error
            self._advance(end)
            return item

    def _advance(self, to: int) -> None:
        self._line += self._text.count("\n", self._at, to)
        self._at = to

    def _more(self) -> bool:
        """Drop consumed text and read as much as is buffered, so that long items take linear time."""
        if self._ended:
            return False
        rest = self._text[self._at :]
        try:
            data = self._stream.read(max(_CHUNK_BYTES, len(rest)))
            self._ended = not data
            text = self._utf8.decode(data, final=self._ended)
        except (*UNREADABLE, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read: {error}") from error
        self._text, self._at = rest + text, 0
        return bool(text) or not self._ended

    def _error(self, reason: str) -> ConfigError:
        return trace_error(self._file, self._line, reason)
