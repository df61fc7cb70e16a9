"""Reader of one streamed tool call: the object `{"name": ..., "arguments": ...}`.

- A call starts when its name is complete; arguments before the name are buffered. If only the object itself
  identifies a call (`needs_arguments`), it starts once its arguments have also started as an object, and an unknown
  key ends the attempt immediately.
- The arguments' text is passed on as the model wrote it, valid or not: OpenAI's clients validate it. Arguments given
  as a JSON string are unescaped. Missing or null arguments become `{}`.
- `parameters` is an alias of `arguments`; of duplicate keys the first counts; other keys are skipped.
- Outside of the arguments the object must be valid. If it is not: an unstarted call is not a call; a started one with
  complete arguments is complete, and the rest is not part of it; for a started one whose arguments are missing, the
  raw text up to the closing marker is the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from kvolt.frontend.parsers.json_text import PLAIN, StringText, TextExtent, end_of, unescaped
from kvolt.frontend.parsers.markers import partial_marker_length
from kvolt.frontend.parsers.port import Piece, ToolArguments, ToolStart

MAX_HELD = 64 * 1024
"""Limit of the characters of a call before its name; longer text is not a call."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_MAX_KEY = 16
"""Longer than any known key; the rest of a longer key is not stored."""

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")


class ParseStatus(Enum):
    READING = auto()
    DONE = auto()
    NOT_A_CALL = auto()


class CallReader:
    """Reads one call, from the first character after its opening marker."""

    __slots__ = (
        "_arguments_seen",
        "_closing",
        "_early_arguments",
        "_extent",
        "_has_arguments",
        "_held",
        "_index",
        "_is_arguments",
        "_key",
        "_name",
        "_needs_arguments",
        "_num_left",
        "_scalar_text",
        "_state",
        "_string",
        "started",
        "status",
    )

    def __init__(
        self, index: int, *, closing: str = "", needs_arguments: bool = False, max_held: int = MAX_HELD
    ) -> None:
        self._index = index
        self._closing = closing
        self._needs_arguments = needs_arguments
        self._num_left = max_held
        self.status = ParseStatus.READING
        self.started = False
        self._name: str | None = None
        self._has_arguments = False
        """Part of the arguments' text is known."""
        self._arguments_seen = False
        self._early_arguments: list[str] = []
        """Arguments received before the name."""
        self._held: list[str] = []
        self._state: _State = CallReader._object
        self._key = ""
        self._scalar_text: list[str] = []
        self._is_arguments = False
        """The current value is the arguments."""
        self._extent = TextExtent(closing)
        self._string = StringText(closing)

    @property
    def held(self) -> str:
        """Everything read while the call has not started."""
        return "".join(self._held)

    def feed(self, text: str, out: list[Piece]) -> int:
        """Read text; returns the number of characters read. The rest must be passed again, followed by more text."""
        if not self.started:
            text = text[: self._num_left]
        position = 0
        while self.status is ParseStatus.READING and position < len(text):
            state, start = self._state, position
            position = state(self, text, position, out)
            if position == start and self._state is state:
                break
        if not self.started:
            self._held.append(text[:position])
            self._num_left -= position
            if self.status is ParseStatus.READING and len(text) - position >= self._num_left:
                self.status = ParseStatus.NOT_A_CALL
        return position

    def finish(self, rest: str, out: list[Piece]) -> None:
        """End of the output: unread text belongs to the arguments if they were being read."""
        if self._state is CallReader._in_scalar and not self._has_arguments:
            rest = "".join(self._scalar_text)
            rest = "" if rest == "null" else rest
        elif self._state is CallReader._in_string and rest.startswith("\\"):
            rest = ""  # an incomplete escape is dropped
        if self._is_arguments or self._state is CallReader._raw:
            self._add_argument_text(rest, out)

    # --- states: each reads from `position` and returns where it stopped

    def _object(self, text: str, position: int, out: list[Piece]) -> int:
        position = end_of(_SPACE, text, position)
        if position == len(text):
            return position
        if text[position] != "{":
            return self._fail(position, out)
        self._state = CallReader._before_key
        return position + 1

    def _before_key(self, text: str, position: int, out: list[Piece]) -> int:
        position = end_of(_SPACE, text, position)
        if position == len(text):
            return position
        if text[position] == "}":
            return self._close(position, out)
        if text[position] != '"':
            return self._fail(position, out)
        self._scalar_text = []
        self._state = CallReader._in_key
        return position + 1

    def _in_key(self, text: str, position: int, out: list[Piece]) -> int:
        read, position = unescaped(text, position, PLAIN)
        if sum(map(len, self._scalar_text)) < _MAX_KEY:
            self._scalar_text.append(read)
        if position == len(text) or text[position] == "\\":
            return position
        self._key = "".join(self._scalar_text)
        if text[position] != '"' or (
            self._needs_arguments and not self.started and self._key not in _CALL_KEYS
        ):
            return self._fail(position, out)
        self._state = CallReader._after_key
        return position + 1

    def _after_key(self, text: str, position: int, out: list[Piece]) -> int:
        position = end_of(_SPACE, text, position)
        if position == len(text):
            return position
        if text[position] != ":":
            return self._fail(position, out)
        self._state = CallReader._before_value
        return position + 1

    def _before_value(self, text: str, position: int, out: list[Piece]) -> int:
        position = end_of(_SPACE, text, position)
        if position == len(text):
            return position
        character = text[position]
        if self._key == "name" and self._name is None:
            if character != '"':
                return self._fail(position, out)
            self._scalar_text = []
            self._state = CallReader._in_name
            return position + 1
        self._is_arguments = self._key in _ARGUMENT_KEYS and not self._arguments_seen
        self._arguments_seen |= self._is_arguments
        if character == '"':
            self._string = StringText(self._closing)
            self._state = CallReader._in_string
            return position + 1
        if character in "{[":
            self._extent = TextExtent(self._closing)
            self._state = CallReader._in_container
        elif end_of(_SCALAR, character, 0):
            self._scalar_text = []
            self._state = CallReader._in_scalar
        else:
            if self._is_arguments:
                self._is_arguments = self._arguments_seen = False
            return self._fail(position, out)
        return position

    def _in_name(self, text: str, position: int, out: list[Piece]) -> int:
        read, position = unescaped(text, position, PLAIN)
        self._scalar_text.append(read)
        if position == len(text) or text[position] == "\\":
            return position
        name = "".join(self._scalar_text)
        if text[position] != '"' or not name:
            return self._fail(position, out)
        self._name = name
        if self._has_arguments or not self._needs_arguments:
            self._start(out)
        self._state = CallReader._after_value
        return position + 1

    def _in_container(self, text: str, position: int, out: list[Piece]) -> int:
        end = self._extent.scan(text, position)
        if not self._add_argument_text(text[position:end], out):
            return self._fail(position, out)
        if self._extent.ended:
            self._is_arguments = False
            self._state = CallReader._after_value
        return end

    def _in_string(self, text: str, position: int, out: list[Piece]) -> int:
        end = self._string.scan(text, position)
        if not self._add_argument_text(self._string.text, out):
            return self._fail(position, out)
        if self._string.ended:
            self._is_arguments = False
            self._state = CallReader._after_value
            end += text[end] == '"'
        return end

    def _in_scalar(self, text: str, position: int, out: list[Piece]) -> int:
        """A number, true, false, null or similar. Null is not arguments text."""
        end = end_of(_SCALAR, text, position)
        read = text[position:end]
        if not self._has_arguments and self._is_arguments:
            self._scalar_text.append(read)
            read = "".join(self._scalar_text)
            if "null".startswith(read) and (end == len(text) or read == "null"):
                read = ""
        if not self._add_argument_text(read, out):
            return self._fail(position, out)
        if end < len(text):
            self._is_arguments = False
            self._state = CallReader._after_value
        return end

    def _after_value(self, text: str, position: int, out: list[Piece]) -> int:
        position = end_of(_SPACE, text, position)
        if position == len(text):
            return position
        if text[position] == ",":
            self._state = CallReader._before_key
            return position + 1
        if text[position] == "}":
            return self._close(position, out)
        return self._fail(position, out)

    def _raw(self, text: str, position: int, out: list[Piece]) -> int:
        end = text.find(self._closing, position) if self._closing else -1
        if end >= 0:
            self._add_argument_text(text[position:end], out)
            return self._end(end, out)
        end = len(text) - partial_marker_length(text, position, (self._closing,))
        self._add_argument_text(text[position:end], out)
        return end

    # --- shared by the states

    def _start(self, out: list[Piece]) -> None:
        if self._name is not None and not self.started:
            self.started = True
            out.append(ToolStart(self._index, self._name))
            out += [ToolArguments(self._index, text) for text in self._early_arguments]
            self._early_arguments = []
            self._held = []

    def _add_argument_text(self, text: str, out: list[Piece]) -> bool:
        """Handle text of the current value; False if it shows that this is not a call."""
        if not text or not (self._is_arguments or self._state is CallReader._raw):
            return True
        if self._needs_arguments and not self._has_arguments and text[0] != "{":
            return False
        self._has_arguments = True
        self._start(out)
        if self.started:
            out.append(ToolArguments(self._index, text))
        else:
            self._early_arguments.append(text)
        return True

    def _close(self, position: int, out: list[Piece]) -> int:
        """Handle the object's closing brace."""
        return self._end(position + 1, out) if self.started else self._fail(position, out)

    def _fail(self, position: int, out: list[Piece]) -> int:
        """Handle a character that is invalid here."""
        if not self.started:
            self.status = ParseStatus.NOT_A_CALL
        elif self._arguments_seen:
            return self._end(position, out)
        else:
            self._state = CallReader._raw
        return position

    def _end(self, position: int, out: list[Piece]) -> int:
        if not self._has_arguments:
            out.append(ToolArguments(self._index, "{}"))
        self.status = ParseStatus.DONE
        return position


_State = Callable[[CallReader, str, int, list[Piece]], int]
