"""A message with tool calls in it, in any syntax that puts a JSON object into the text.

    GAP  the start, or after a call: white space and separators wait here for what they belong to
    TEXT content, searched for the opening marker
    CALL one call's object, see `arguments`

What turns out to be no call is content with its markers and all, and the text after it is TEXT. White
space and separators between the start, calls and the end are dropped; beside text they are content.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from kvolt.frontend.parsers.arguments import MAX_HELD, CallReader, Status
from kvolt.frontend.parsers.markers import begun_marker, first_marker, may_become
from kvolt.frontend.parsers.port import Content, Piece, joined

MAX_GAP = 64
"""Characters that wait in a gap; a longer one is content."""

_WINDOW = 4096
"""Characters given to a reader at a time: a long text full of calls is not copied again for each."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    opening: str = ""
    """Begins a call anywhere in the text; empty: nothing does."""
    closing: str = ""
    """Ends a call."""
    separators: str = " \t\r\n"
    """What may stand in a gap."""
    bare: bool = False
    """In a gap, an object begins a call without a marker."""
    needs_arguments: bool = False
    """An object is a call only if it has arguments."""


class _At(Enum):
    GAP = auto()
    TEXT = auto()
    CALL = auto()


class CallParser:
    """A TextParser for one CallSyntax."""

    __slots__ = (
        "_at",
        "_closing_due",
        "_head",
        "_max_held",
        "_num_calls",
        "_reader",
        "_syntax",
        "_unread",
    )

    passes_all = False
    """A call may begin anywhere."""

    def __init__(self, syntax: CallSyntax, max_held: int = MAX_HELD) -> None:
        self._syntax = syntax
        self._max_held = max_held
        self._at = _At.GAP
        self._head = ""
        """The gap so far, and in a call also its opening marker: content if there is no call."""
        self._unread = ""
        """Less than a marker or an escape."""
        self._closing_due = False
        """A call ended before its closing marker, which is swallowed when it comes."""
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
        """The output ended between calls, or within the last one's closing marker."""
        is_nothing = not unread or (self._closing_due and self._syntax.closing.startswith(unread))
        return self._at is _At.GAP and self._num_calls > 0 and is_nothing

    def _gap(self, text: str, position: int, pieces: list[Piece]) -> int:
        syntax = self._syntax
        begin = position
        while position < len(text) and text[position] in syntax.separators:
            position += 1
        self._head += text[begin:position]
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
        found = first_marker(text, position, markers)
        if found is None:
            end = len(text) - begun_marker(text, position, markers)
            pieces.append(Content(text[position:end]))
            return end
        end, marker = found
        pieces.append(Content(text[position:end]))
        if marker == self._syntax.opening:
            return self._to_call(end)
        self._closing_due = False
        return end + len(marker)

    def _call(self, text: str, position: int, pieces: list[Piece]) -> int:
        reader = self._reader
        position += reader.feed(text[position : position + _WINDOW], pieces)
        if reader.status is Status.DONE:
            self._num_calls += 1
            self._closing_due = bool(self._syntax.closing)
            self._head = ""
            self._at = _At.GAP
        elif reader.status is Status.NOT_A_CALL:
            self._head += reader.held
            self._to_text(pieces)
        return position

    def _to_text(self, pieces: list[Piece]) -> None:
        pieces.append(Content(self._head))
        self._head = ""
        self._at = _At.TEXT

    def _to_call(self, position: int) -> int:
        """At an opening marker: a call begins after it."""
        self._head += self._syntax.opening
        self._closing_due = False
        self._reader = self._new_reader()
        self._at = _At.CALL
        return position + len(self._syntax.opening)

    def _markers(self) -> list[str]:
        markers = [self._syntax.opening] if self._syntax.opening else []
        if self._closing_due:
            markers.append(self._syntax.closing)
        return markers

    def _new_reader(self) -> CallReader:
        return CallReader(
            self._num_calls,
            closing=self._syntax.closing,
            needs_arguments=self._syntax.needs_arguments,
            max_held=self._max_held,
        )
