"""One tool call: the object `{"name": ..., "arguments": ...}`, read as it streams.

- The call starts when its name is complete; arguments that came before the name wait for it. Where
  nothing but the object itself says that this is a call (`needs_arguments`), it starts when its
  arguments have begun as an object too, and a key that no call has ends the attempt at once.
- The arguments' text is passed on as the model wrote it, sound or not: OpenAI's clients expect to
  check it. Arguments given as a JSON string are unescaped to the text inside. A call that ends
  with none, or with null, gets `{}`.
- `parameters` means the same as `arguments`; of keys given twice the first counts; other keys are skipped.
- Around the arguments the object must be sound. Where it is not, an unstarted call is not a call; a
  started one with its arguments complete is done, and the rest is not its text; and in a started one
  whose arguments are still to come, the raw text up to the closing marker is the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from enum import Enum, auto

from kvolt.frontend.parsers.json_text import PLAIN, Extent, StringText, end_of, unescaped
from kvolt.frontend.parsers.markers import begun_marker
from kvolt.frontend.parsers.port import Piece, ToolArguments, ToolStart

MAX_HELD = 64 * 1024
"""Characters of a call without a name yet; beyond them the text is no call."""

_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR = re.compile(r"[-+.0-9A-Za-z_]*")
_MAX_KEY = 16
"""Longer than any key that matters; of longer ones the rest is not kept."""

_ARGUMENT_KEYS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENT_KEYS, "type", "id")


class Status(Enum):
    READING = auto()
    DONE = auto()
    NOT_A_CALL = auto()


class CallReader:
    """Reads one call from the first character after its opening marker."""

    __slots__ = (
        "_argued",
        "_arguments_seen",
        "_closing",
        "_early",
        "_extent",
        "_held",
        "_index",
        "_is_arguments",
        "_key",
        "_name",
        "_needs_arguments",
        "_room",
        "_state",
        "_string",
        "_word",
        "started",
        "status",
    )

    def __init__(
        self, index: int, *, closing: str = "", needs_arguments: bool = False, max_held: int = MAX_HELD
    ) -> None:
        self._index = index
        self._closing = closing
        self._needs_arguments = needs_arguments
        self._room = max_held
        self.status = Status.READING
        self.started = False
        self._name: str | None = None
        self._argued = False
        """Some text of the arguments is known."""
        self._arguments_seen = False
        self._early: list[str] = []
        """Arguments that wait for the name."""
        self._held: list[str] = []
        self._state: _State = CallReader._object
        self._key = ""
        self._word: list[str] = []
        self._is_arguments = False
        """The value being read is the arguments."""
        self._extent = Extent(closing)
        self._string = StringText(closing)

    @property
    def held(self) -> str:
        """All that was read, while the call has not started."""
        return "".join(self._held)

    def feed(self, text: str, out: list[Piece]) -> int:
        """Read on; how many characters were read. The others must come again, with what follows them."""
        if not self.started:
            text = text[: self._room]
        position = 0
        while self.status is Status.READING and position < len(text):
            state, begin = self._state, position
            position = state(self, text, position, out)
            if position == begin and self._state is state:
                break
        if not self.started:
            self._held.append(text[:position])
            self._room -= position
            if self.status is Status.READING and len(text) - position >= self._room:
                self.status = Status.NOT_A_CALL
        return position

    def finish(self, rest: str, out: list[Piece]) -> None:
        """No more text comes: what was left unread is the arguments', if they were being read."""
        if self._state is CallReader._in_scalar and not self._argued:
            rest = "".join(self._word)
            rest = "" if rest == "null" else rest
        elif self._state is CallReader._in_string and rest.startswith("\\"):
            rest = ""  # half an escape stands for nothing
        if self._is_arguments or self._state is CallReader._raw:
            self._argue(rest, out)

    # --- states: each reads from position on and returns where it stopped

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
        self._word = []
        self._state = CallReader._in_key
        return position + 1

    def _in_key(self, text: str, position: int, out: list[Piece]) -> int:
        read, position = unescaped(text, position, PLAIN)
        if sum(map(len, self._word)) < _MAX_KEY:
            self._word.append(read)
        if position == len(text) or text[position] == "\\":
            return position
        self._key = "".join(self._word)
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
            self._word = []
            self._state = CallReader._in_name
            return position + 1
        self._is_arguments = self._key in _ARGUMENT_KEYS and not self._arguments_seen
        self._arguments_seen |= self._is_arguments
        if character == '"':
            self._string = StringText(self._closing)
            self._state = CallReader._in_string
            return position + 1
        if character in "{[":
            self._extent = Extent(self._closing)
            self._state = CallReader._in_container
        elif end_of(_SCALAR, character, 0):
            self._word = []
            self._state = CallReader._in_scalar
        else:
            if self._is_arguments:
                self._is_arguments = self._arguments_seen = False
            return self._fail(position, out)
        return position

    def _in_name(self, text: str, position: int, out: list[Piece]) -> int:
        read, position = unescaped(text, position, PLAIN)
        self._word.append(read)
        if position == len(text) or text[position] == "\\":
            return position
        name = "".join(self._word)
        if text[position] != '"' or not name:
            return self._fail(position, out)
        self._name = name
        if self._argued or not self._needs_arguments:
            self._start(out)
        self._state = CallReader._after_value
        return position + 1

    def _in_container(self, text: str, position: int, out: list[Piece]) -> int:
        end = self._extent.scan(text, position)
        if not self._argue(text[position:end], out):
            return self._fail(position, out)
        if self._extent.ended:
            self._is_arguments = False
            self._state = CallReader._after_value
        return end

    def _in_string(self, text: str, position: int, out: list[Piece]) -> int:
        end = self._string.scan(text, position)
        if not self._argue(self._string.text, out):
            return self._fail(position, out)
        if self._string.ended:
            self._is_arguments = False
            self._state = CallReader._after_value
            end += text[end] == '"'
        return end

    def _in_scalar(self, text: str, position: int, out: list[Piece]) -> int:
        """A number, true, false, null or what looks like one. Only null is no text of arguments."""
        end = end_of(_SCALAR, text, position)
        read = text[position:end]
        if not self._argued and self._is_arguments:
            self._word.append(read)
            read = "".join(self._word)
            if "null".startswith(read) and (end == len(text) or read == "null"):
                read = ""
        if not self._argue(read, out):
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
            self._argue(text[position:end], out)
            return self._end(end, out)
        end = len(text) - begun_marker(text, position, (self._closing,))
        self._argue(text[position:end], out)
        return end

    # --- what they have in common

    def _start(self, out: list[Piece]) -> None:
        if self._name is not None and not self.started:
            self.started = True
            out.append(ToolStart(self._index, self._name))
            out += [ToolArguments(self._index, text) for text in self._early]
            self._early = []
            self._held = []

    def _argue(self, text: str, out: list[Piece]) -> bool:
        """Text of the value being read; False when it shows that this is no call."""
        if not text or not (self._is_arguments or self._state is CallReader._raw):
            return True
        if self._needs_arguments and not self._argued and text[0] != "{":
            return False
        self._argued = True
        self._start(out)
        if self.started:
            out.append(ToolArguments(self._index, text))
        else:
            self._early.append(text)
        return True

    def _close(self, position: int, out: list[Piece]) -> int:
        """At the object's closing brace."""
        return self._end(position + 1, out) if self.started else self._fail(position, out)

    def _fail(self, position: int, out: list[Piece]) -> int:
        """No sound object has this character here."""
        if not self.started:
            self.status = Status.NOT_A_CALL
        elif self._arguments_seen:
            return self._end(position, out)
        else:
            self._state = CallReader._raw
        return position

    def _end(self, position: int, out: list[Piece]) -> int:
        if not self._argued:
            out.append(ToolArguments(self._index, "{}"))
        self.status = Status.DONE
        return position


_State = Callable[[CallReader, str, int, list[Piece]], int]
