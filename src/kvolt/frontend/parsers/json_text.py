"""Incremental readers of JSON text: the end of a value, and the contents of a string.

Both are lenient: a model's JSON may be invalid inside, and is passed on as written. Results do not depend on how the
text is split: characters that cannot be interpreted yet are left unread.
"""

from __future__ import annotations

import re

from kvolt.frontend.parsers.markers import may_become

PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
"""Characters of a valid string that need no unescaping."""

_PLAIN_OR_CONTROL = re.compile(r'[^"\\<]*')
_OUTSIDE_STRINGS = re.compile(r'[^"{}\[\]<]*')

_CODE_UNIT = re.compile(r"\\u[0-9a-fA-F]{4}")
_LOW_SURROGATE = re.compile(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class TextExtent:
    """Finds the end of one object or array, by brackets and strings only.

    A closing marker ends it too, unless it is inside a string. A string with a raw control character (invalid JSON,
    most likely never closed) does not hide the marker.
    """

    __slots__ = ("_closing", "_depth", "_plain", "ended")

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._depth = 0
        self._plain = _OUTSIDE_STRINGS
        """Pattern of characters to skip; it encodes whether the position is in a string, and of which kind."""
        self.ended = False

    def scan(self, text: str, position: int) -> int:
        """Return the position up to which the text certainly belongs to the value; `ended` is set at its end."""
        while position < len(text):
            position = end_of(self._plain, text, position)
            if position == len(text):
                break
            character = text[position]
            if character == "<":
                length = not_closing(text, position, self._closing)
                if length == 0:
                    self.ended = text.startswith(self._closing, position)
                    break
                position += length
            elif self._plain is _OUTSIDE_STRINGS:
                position += 1
                if character == '"':
                    self._plain = PLAIN
                else:
                    self._depth += 1 if character in "{[" else -1
                    if self._depth == 0:
                        self.ended = True
                        break
            elif character == '"':
                position += 1
                self._plain = _OUTSIDE_STRINGS
            elif character == "\\":
                if position + 1 == len(text):
                    break
                position += 2
            else:
                self._plain = _PLAIN_OR_CONTROL
        return position


class StringText:
    """Reads and unescapes the inside of a JSON string, after its opening quote."""

    __slots__ = ("_closing", "_plain", "ended", "text")

    def __init__(self, closing: str) -> None:
        self._closing = closing
        self._plain = PLAIN
        self.ended = False
        """The last returned position is that of the closing quote or a closing marker."""
        self.text = ""
        """Text of the last scan."""

    def scan(self, text: str, position: int) -> int:
        parts = []
        while position < len(text):
            read, position = unescaped(text, position, self._plain)
            parts.append(read)
            if position == len(text) or text[position] == "\\":
                break
            character = text[position]
            if character == '"':
                self.ended = True
                break
            if character == "<":
                length = not_closing(text, position, self._closing)
                if length == 0:
                    self.ended = text.startswith(self._closing, position)
                    break
                parts.append(character)
                position += length
            else:
                self._plain = _PLAIN_OR_CONTROL
        self.text = "".join(parts)
        return position


def end_of(run: re.Pattern[str], text: str, position: int) -> int:
    """End of a run of characters; the pattern also matches an empty run."""
    match = run.match(text, position)
    return match.end() if match else position


def not_closing(text: str, position: int, closing: str) -> int:
    """Number of characters at a `<` that certainly do not belong to the closing marker: 0 or 1."""
    if closing and (text.startswith(closing, position) or may_become(text, position, closing)):
        return 0
    return 1


def unescaped(text: str, position: int, plain: re.Pattern[str]) -> tuple[str, int]:
    """Unescape a string up to a non-plain character or an incomplete escape; returns text and position."""
    parts = []
    while True:
        end = end_of(plain, text, position)
        parts.append(text[position:end])
        position = end
        if not text.startswith("\\", position):
            break
        escape = _escape(text, position)
        if escape is None:
            break
        parts.append(escape[0])
        position = escape[1]
    return "".join(parts), position


def _escape(text: str, position: int) -> tuple[str, int] | None:
    """Decode the escape at a position; returns its text and end, or None if it may be incomplete.

    Invalid escapes are kept as written. An unpaired surrogate becomes U+FFFD, since UTF-8 cannot encode it.
    """
    kind = text[position + 1 : position + 2]
    if not kind:
        return None
    if kind != "u":
        return _ESCAPES.get(kind, "\\" + kind), position + 2
    unit = text[position : position + 6]
    if not _may_match(_CODE_UNIT, unit, r"\u0000"):
        return r"\u", position + 2
    if len(unit) < 6:
        return None
    code = int(unit[2:], 16)
    if not 0xD800 <= code < 0xDC00:
        return "\ufffd" if 0xDC00 <= code < 0xE000 else chr(code), position + 6
    low = text[position + 6 : position + 12]
    if not _may_match(_LOW_SURROGATE, low, r"\uDC00"):
        return "\ufffd", position + 6
    if len(low) < 6:
        return None
    return chr(0x10000 + ((code - 0xD800) << 10) + int(low[2:], 16) - 0xDC00), position + 12


def _may_match(pattern: re.Pattern[str], prefix: str, sample: str) -> bool:
    """Whether the text matches or may still match the pattern: completed from a sample, it matches."""
    return pattern.fullmatch(prefix + sample[len(prefix) :]) is not None
