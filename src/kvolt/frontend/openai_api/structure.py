"""Limits the number of JSON values in a body before it is decoded, and the nesting of free-form JSON.

Two bytes make a value and six a list with a name; decoded, they take twenty times as much memory, and seconds that
block all other requests. Skipped fields are not decoded, so they are limited here as well.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from kvolt.core.errors import InvalidRequest

MAX_VALUES = 1_100_000
"""Enough for a prompt of a million token ids."""
MAX_NAMES = 100_000
"""The decoder holds the interpreter lock. Names take longest: about 50 ms for this many."""
MAX_LISTS = 100_000
MAX_ESCAPES = 3_000_000
"""Limit of backslashes: enough for 16 MiB of characters that are all \\u-escaped. Decoding takes about 10 ns each."""

MAX_DEPTH = 64

_LIMITS = ((MAX_VALUES, "values"), (MAX_NAMES, "names"), (MAX_LISTS, "lists and objects"))
_SMALL_BYTES = 512 * 1024
"""Smaller bodies cannot exceed a harmful number."""
_SLICE_BYTES = 64 * 1024


def check_structure(body: bytes) -> None:
    """Raise InvalidRequest if the body has more values than any valid request needs."""
    if len(body) > _SMALL_BYTES:
        _check((body,), "the body has", None)
        if body.count(b"\\") > MAX_ESCAPES:
            raise InvalidRequest(f"the body has more than {MAX_ESCAPES} backslashes", param=None)


def check_texts(texts: Sequence[str], subject: str, param: str) -> None:
    """Apply the limits to JSON inside strings, for all `texts` together. `subject` starts the error message."""
    if sum(map(len, texts)) > _SMALL_BYTES:
        _check([text.encode() for text in texts], subject, param)


def _check(texts: Sequence[bytes], subject: str, param: str | None) -> None:
    if _excess([sum(marks) for marks in zip(*map(_marks, texts), strict=True)]) is None:
        return
    total = [0, 0, 0]  # commas and brackets inside strings do not count
    for text in texts:
        for outside in _outside_strings(text):
            total = [count + more for count, more in zip(total, _marks(outside), strict=True)]
            if excess := _excess(total):
                raise InvalidRequest(f"{subject} more than {excess}", param=param)


def not_utf8_at(body: bytes) -> int | None:
    """Offset of the first invalid UTF-8 byte. Decodes slices: text can take four times the memory of its bytes."""
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
        (f"{limit} {noun}" for count, (limit, noun) in zip(marks, _LIMITS, strict=True) if count > limit),
        None,
    )


def _marks(text: bytes) -> tuple[int, int, int]:
    return text.count(b","), text.count(b":"), text.count(b"[") + text.count(b"{")


def _outside_strings(body: bytes) -> Iterator[bytes]:
    start = inside = 0
    while start < len(body):
        piece = body[start : start + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # keep a backslash with the character it escapes
            piece = body[start : start + _SLICE_BYTES + 1]
        start += len(piece)
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2


def nests_deeper(value: Any, max_depth: int = MAX_DEPTH) -> bool:
    """Whether a value is nested deeper than `max_depth`. Iterates by level: the check itself must not recurse."""
    level = [value]
    for _ in range(max_depth + 1):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                children.extend(item.values())
            elif isinstance(item, list):
                children.extend(item)
        if not children:
            return False
        level = children
    return True


def check_nesting(value: Any, param: str, max_depth: int = MAX_DEPTH) -> None:
    if nests_deeper(value, max_depth):
        raise InvalidRequest(f"{param} is nested deeper than {max_depth} levels", param=param)
