"""Numbered lines of a plain or gzip file, with bounded length, and the error type of all trace readers."""

from __future__ import annotations

import gzip
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
