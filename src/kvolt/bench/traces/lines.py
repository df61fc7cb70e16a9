"""A trace file as numbered lines, plain or gzip; and the one error that says what is wrong with it, and where.

Owns opening, decompressing and bounding. Must not know what a line means.
"""

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
"""No line, and no item of a JSON array, may be longer: a wrong file must not fill the memory."""

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (OSError, EOFError, zlib.error)
"""What reading a file raises: the disk's errors, and a gzip file that is cut or broken."""


def trace_error(file: str, line: int, reason: str, remedy: str | None = None) -> ConfigError:
    """The error of all readers. `line` counts from 1."""
    remedy = remedy or "correct or remove that line"
    return ConfigError(
        f"{file}:{line}: {reason}", key="trace", remedy=remedy, file=file, line=line, reason=reason
    )


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file's bytes, decompressed if they begin as gzip does, whatever the file is called."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}", key="trace", remedy="name a trace file that can be read"
        ) from error
    with file:
        if file.peek(2)[:2] != _GZIP_MAGIC:
            yield file
            return
        # GzipFile itself has slow lines and no peek.
        with gzip.GzipFile(fileobj=file) as unzipped, BufferedReader(cast(Any, unzipped)) as stream:
            yield stream


def numbered_lines(stream: BufferedReader, file: str) -> Iterator[tuple[int, bytes]]:
    """Each line that has something in it, without the white space around it, after its number."""
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(MAX_LINE_BYTES + 1)
        except UNREADABLE as error:
            raise trace_error(file, number, f"cannot be read: {error}", "fetch the file again") from error
        if not line:
            return
        if len(line) > MAX_LINE_BYTES:
            raise trace_error(file, number, f"a line of more than {MAX_LINE_BYTES >> 20} MiB")
        text = strip_mark(line).strip() if number == 1 else line.strip()
        if text:
            yield number, text


def strip_mark(start: bytes) -> bytes:
    """A file's first bytes without the mark that some editors put there."""
    return start.removeprefix(_BYTE_ORDER_MARK)
