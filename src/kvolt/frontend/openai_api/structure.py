"""What a body of JSON is made of, looked at before it is decoded.

Two bytes make a value and six a list with a name: decoded, they take twenty times as much memory, and
seconds in which nobody else is served. Fields that are skipped are not decoded, so what they hold is checked
here as well.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence

from kvolt.core.errors import InvalidRequest

MAX_VALUES = 1_100_000
"""Room for a prompt of a million token ids."""
MAX_NAMES = 100_000
"""The decoder keeps the interpreter lock until it is done, and a name takes it longest: this many, 50 ms."""
MAX_LISTS = 100_000
MAX_ESCAPES = 3_000_000
"""Backslashes: room for 16 MiB of characters that are all escaped by number. A decoder takes about 10 ns for each."""

_LIMITS = ((MAX_VALUES, "values"), (MAX_NAMES, "names"), (MAX_LISTS, "lists and objects"))
_SMALL_BYTES = 512 * 1024
"""Not enough for any of these to hurt."""
_SLICE_BYTES = 64 * 1024


def check_structure(body: bytes) -> None:
    """InvalidRequest when there is more in it than any request needs."""
    if len(body) > _SMALL_BYTES:
        _check((body,), "the body has", None)
        if body.count(b"\\") > MAX_ESCAPES:
            raise InvalidRequest(f"the body has more than {MAX_ESCAPES} backslashes", param=None)


def check_texts(texts: Sequence[str], what: str, param: str) -> None:
    """The same for JSON inside of strings, of all `texts` together. `what` they are, and that they have."""
    if sum(map(len, texts)) > _SMALL_BYTES:
        _check([text.encode() for text in texts], what, param)


def _check(texts: Sequence[bytes], what: str, param: str | None) -> None:
    if _excess([sum(marks) for marks in zip(*map(_marks, texts), strict=True)]) is None:
        return
    total = [0, 0, 0]  # what stands in strings is text, and does not count
    for text in texts:
        for outside in _outside_strings(text):
            total = [count + more for count, more in zip(total, _marks(outside), strict=True)]
            if excess := _excess(total):
                raise InvalidRequest(f"{what} more than {excess}", param=param)


def not_utf8_at(body: bytes) -> int | None:
    """Where it stops to be UTF-8. By slices: a text can take four times the memory of its bytes."""
    if body.isascii():
        return None
    start = 0
    while start < len(body):
        end = start + _SLICE_BYTES
        try:
            start += codecs.utf_8_decode(body[start:end], "strict", end >= len(body))[1]
        except UnicodeDecodeError as error:
            return start + error.start
    return None


def _excess(marks: Sequence[int]) -> str | None:
    return next(
        (f"{most} {what}" for count, (most, what) in zip(marks, _LIMITS, strict=True) if count > most), None
    )


def _marks(text: bytes) -> tuple[int, int, int]:
    return text.count(b","), text.count(b":"), text.count(b"[") + text.count(b"{")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    start = inside = 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # keep a backslash with what it escapes
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2
