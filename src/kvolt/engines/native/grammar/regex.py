"""Converts regular expressions from Python's syntax to that of the grammar library.

The frontend validates a pattern as Python's; the library uses Rust's dialect, which differs in places (`[a[b]]`,
`a{,3}`, `\\Z`). So a pattern is parsed with Python's parser and written in the other dialect. It describes the whole
output, so anchors at its ends are redundant and omitted. Classes like `\\d` and `\\w` are ASCII, as with `re.ASCII`.
Constructs that are not regular (look-around, back references) are rejected by name.
"""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Iterable, Sequence
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from kvolt.core.errors import InvalidRequest

_ASCII_CLASSES = {
    ops.CATEGORY_DIGIT: "[0-9]",
    ops.CATEGORY_NOT_DIGIT: "[^0-9]",
    ops.CATEGORY_WORD: "[0-9A-Za-z_]",
    ops.CATEGORY_NOT_WORD: "[^0-9A-Za-z_]",
    ops.CATEGORY_SPACE: r"[\x{20}\t\n\r\f\v]",
    ops.CATEGORY_NOT_SPACE: r"[^\x{20}\t\n\r\f\v]",
}
_STARTS = (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
_ENDS = (ops.AT_END, ops.AT_END_STRING)
_UNSUPPORTED = {
    ops.ASSERT: "look-around",
    ops.ASSERT_NOT: "look-around",
    ops.GROUPREF: "a back reference",
    ops.GROUPREF_EXISTS: "a conditional group",
    ops.ATOMIC_GROUP: "an atomic group",
    ops.POSSESSIVE_REPEAT: "a possessive repeat",
}
_warnings_lock = threading.Lock()
"""Guards the warning filters, which are a setting of the process."""
ANY_CHARACTER = "(?s:.)"

_Items = Sequence[tuple[Any, Any]]


def quote(text: str) -> str:
    """A pattern for exactly this text, valid between slashes."""
    return "".join(map(_character, map(ord, text)))


def alternatives(texts: Iterable[str]) -> str:
    """A pattern for any of these texts."""
    return "|".join(f"(?:{quote(text)})" for text in texts)


def _character(code: int) -> str:
    character = chr(code)
    return character if character.isascii() and character.isalnum() else f"\\x{{{code:x}}}"


def regex_source(pattern: str) -> str:
    """The pattern in the library's dialect, valid between slashes. InvalidRequest if it is not supported."""
    try:
        with _warnings_lock, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # FutureWarnings about character classes
            parsed = _parser.parse(pattern)
        text = _sequence(list(parsed), parsed.state.flags, True, True)
    except (re.error, RecursionError, OverflowError, ValueError) as error:
        raise InvalidRequest(f"not a regular expression: {str(error)[:200]}", param="grammar") from error
    return f"(?i:{text})" if parsed.state.flags & re.IGNORECASE else text


def _sequence(items: _Items, flags: int, is_first: bool, is_last: bool) -> str:
    """`is_first`, `is_last`: whether no output can precede or follow it."""
    solid = [at for at, (op, _) in enumerate(items) if op is not ops.AT]
    first, last = (solid[0], solid[-1]) if solid else (len(items), -1)
    return "".join(
        _item(op, value, flags, is_first and at <= first, is_last and at >= last)
        for at, (op, value) in enumerate(items)
    )


def _item(op: Any, value: Any, flags: int, is_first: bool, is_last: bool) -> str:
    if op is ops.LITERAL:
        return _character(value)
    if op is ops.NOT_LITERAL:
        return f"[^{_character(value)}]"
    if op is ops.ANY:
        return ANY_CHARACTER if flags & re.DOTALL else r"[^\n]"
    if op is ops.IN:
        return _class(value)
    if op is ops.BRANCH:
        branches = (_sequence(list(branch), flags, is_first, is_last) for branch in value[1])
        return f"(?:{'|'.join(branches)})"
    if op is ops.SUBPATTERN:
        return _group(value, flags, is_first, is_last)
    if op is ops.MAX_REPEAT or op is ops.MIN_REPEAT:
        least, most, repeated = value
        bound = "" if most is ops.MAXREPEAT else most
        return f"(?:{_sequence(list(repeated), flags, False, False)}){{{least},{bound}}}"
    if op is ops.AT and ((is_first and value in _STARTS) or (is_last and value in _ENDS)):
        return ""
    construct = _UNSUPPORTED.get(op) or "a word boundary or an anchor in the middle"
    raise InvalidRequest(
        f"the regular expression has {construct}, which constrained decoding does not support",
        param="grammar",
    )


def _group(value: Any, flags: int, is_first: bool, is_last: bool) -> str:
    _, added, removed, inner = value
    text = _sequence(list(inner), (flags | added) & ~removed, is_first, is_last)
    case = "i" if added & re.IGNORECASE else "-i" if removed & re.IGNORECASE else ""
    return f"(?{case}:{text})"


def _class(items: _Items) -> str:
    parts: list[str] = []
    for op, value in items:
        if op is ops.NEGATE:
            parts.append("^")
        elif op is ops.LITERAL:
            parts.append(_character(value))
        elif op is ops.RANGE:
            parts.append(f"{_character(value[0])}-{_character(value[1])}")
        else:
            parts.append(_ASCII_CLASSES[value])
    return f"[{''.join(parts)}]"
