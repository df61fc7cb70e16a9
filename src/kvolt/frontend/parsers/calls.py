"""Parser for messages with tool calls, in any syntax that embeds a JSON object in the text.

    GAP  the start, or after a call: white space and separators are buffered until it is known what they belong to
    TEXT content, searched for the opening marker
    CALL the object of one call, see `arguments`

Text that turns out not to be a call is content, including its markers, and continues in TEXT. White space and
separators between the start, calls and the end are dropped; next to text they are content.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar

from kvolt.frontend.parsers.arguments import MAX_HELD, CallReader, ParseStatus
from kvolt.frontend.parsers.markers import first_marker, may_become, partial_marker_length
from kvolt.frontend.parsers.port import Content, Piece, ToolArguments, ToolStart, joined

MAX_GAP = 64
"""Limit of the characters buffered in a gap; a longer gap is content."""

_WINDOW = 4096
"""Characters passed to a reader at a time, so that long text with many calls is not copied again for each."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    opening: str = ""
    """Starts a call anywhere in the text; empty: none."""
    closing: str = ""
    """Ends a call."""
    separators: str = " \t\r\n"
    """Characters allowed in a gap."""
    bare: bool = False
    """In a gap, an object starts a call without a marker."""
    needs_arguments: bool = False
    """An object is a call only if it has arguments."""


class _At(Enum):
    GAP = auto()
    TEXT = auto()
    CALL = auto()


class CallParser:
    """A TextParser for one CallSyntax."""

    syntax: ClassVar[CallSyntax]

    __slots__ = (
        "_at",
        "_closing_due",
        "_head",
        "_max_held",
        "_num_calls",
        "_reader",
        "_unread",
    )

    passes_all = False
    """A call may start anywhere."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        self._max_held = max_held
        self._at = _At.GAP
        self._head = ""
        """Buffered gap, and in a call also its opening marker: content if it is not a call."""
        self._unread = ""
        """Unread text, shorter than a marker or an escape."""
        self._closing_due = False
        """A call ended before its closing marker, which is dropped when it arrives."""
        self._num_calls = 0
        self._reader = self._new_reader()

    def feed(self, text: str) -> list[Piece]:
        if self._at is _At.TEXT and not self._unread and "<" not in text:
            return [Content(text)] if text else []
        text = self._unread + text
        pieces: list[Piece] = []
        position = 0
        while position < len(text):
            before = self._at, position
            match self._at:
                case _At.GAP:
                    position = self._gap(text, position, pieces)
                case _At.TEXT:
                    position = self._text(text, position, pieces)
                case _At.CALL:
                    position = self._call(text, position, pieces)
            if before == (self._at, position):
                break
        self._unread = text[position:]
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        unread, self._unread = self._unread, ""
        if self._at is _At.CALL and self._reader.started:
            self._reader.finish(unread, pieces)
        elif self._at is _At.CALL:
            pieces.append(Content(self._head + self._reader.held + unread))
        elif not self._is_closed_gap(unread):
            pieces.append(Content(self._head + unread))
        return joined(pieces)

    def _is_closed_gap(self, unread: str) -> bool:
        """Whether the output ended between calls, or within the last call's closing marker."""
        is_nothing = not unread or (self._closing_due and self.syntax.closing.startswith(unread))
        return self._at is _At.GAP and self._num_calls > 0 and is_nothing

    def _gap(self, text: str, position: int, pieces: list[Piece]) -> int:
        syntax = self.syntax
        start = position
        while position < len(text) and text[position] in syntax.separators:
            position += 1
        self._head += text[start:position]
        if len(self._head) > MAX_GAP:
            self._to_text(pieces)
        elif position == len(text):
            pass
        elif self._closing_due and text.startswith(syntax.closing, position):
            self._closing_due = False
            self._head = ""
            position += len(syntax.closing)
        elif syntax.opening and text.startswith(syntax.opening, position):
            position = self._to_call(position)
        elif syntax.bare and text[position] == "{":
            self._reader = self._new_reader()
            self._at = _At.CALL
        elif not any(may_become(text, position, marker) for marker in self._markers()):
            self._to_text(pieces)
        return position

    def _text(self, text: str, position: int, pieces: list[Piece]) -> int:
        markers = self._markers()
        marker_match = first_marker(text, position, markers)
        if marker_match is None:
            end = len(text) - partial_marker_length(text, position, markers)
            pieces.append(Content(text[position:end]))
            return end
        end, marker = marker_match
        pieces.append(Content(text[position:end]))
        if marker == self.syntax.opening:
            return self._to_call(end)
        self._closing_due = False
        return end + len(marker)

    def _call(self, text: str, position: int, pieces: list[Piece]) -> int:
        reader = self._reader
        position += reader.feed(text[position : position + _WINDOW], pieces)
        if reader.status is ParseStatus.DONE:
            self._num_calls += 1
            self._closing_due = bool(self.syntax.closing)
            self._head = ""
            self._at = _At.GAP
        elif reader.status is ParseStatus.NOT_A_CALL:
            self._head += reader.held
            self._to_text(pieces)
        return position

    def _to_text(self, pieces: list[Piece]) -> None:
        pieces.append(Content(self._head))
        self._head = ""
        self._at = _At.TEXT

    def _to_call(self, position: int) -> int:
        """Handle an opening marker: a call starts after it."""
        self._head += self.syntax.opening
        self._closing_due = False
        self._reader = self._new_reader()
        self._at = _At.CALL
        return position + len(self.syntax.opening)

    def _markers(self) -> list[str]:
        markers = [self.syntax.opening] if self.syntax.opening else []
        if self._closing_due:
            markers.append(self.syntax.closing)
        return markers

    def _new_reader(self) -> CallReader:
        return CallReader(
            self._num_calls,
            closing=self.syntax.closing,
            needs_arguments=self.syntax.needs_arguments,
            max_held=self._max_held,
        )


class HermesParser(CallParser):
    """Tool calls in the format of Hermes and Qwen 2.5 / 3.

        <tool_call> {"name": "get_weather", "arguments": {"city": "Paris"}} </tool_call>

    Any number of calls, with text before, between and after. A missing closing marker or brace is tolerated.
    """

    __slots__ = ()

    syntax = CallSyntax(opening="<tool_call>", closing="</tool_call>")


class Llama3JsonParser(CallParser):
    """Tool calls in the format of Llama 3: the message consists of objects separated by `;` or white space.

        {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}

    A `<|python_tag|>` may precede an object, and is required for a call after text. A message may also be JSON content:
    an object is a call only if it has a name and an object as parameters (or `arguments`).
    """

    __slots__ = ()

    syntax = CallSyntax(opening="<|python_tag|>", separators=" \t\r\n;", bare=True, needs_arguments=True)


class RequiredToolParser(CallParser):
    """Parser of an array: `[{"name": ..., "parameters": {...}}, ...]`, under a grammar (`tool_choice` is `required`).

    Output that violates the grammar is handled as usual: arguments in a started call, otherwise content.
    """

    __slots__ = ()

    syntax = CallSyntax(separators=" \t\r\n[,]", bare=True)


class NamedToolParser:
    """TextParser whose whole input is the arguments of one function, which `tool_choice` names."""

    __slots__ = ("_name", "_started")

    passes_all = False

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        arguments = ToolArguments(0, text)
        if self._started:
            return [arguments]
        self._started = True
        return [ToolStart(0, self._name), arguments]

    def finish(self) -> list[Piece]:
        return []
