"""Reasoning between `<think>` and `</think>` at the start of a message.

- The output starts inside if the prompt ended with the opening tag (`starts_inside`); an opening tag repeated by the
  model is dropped. Otherwise only a leading `<think>` opens.
- Reasoning does not open again after its end: these models think once, and a later `<think>` is content.
- Reasoning that is never closed is reasoning to the end.
- Newlines next to a tag belong to it and are dropped, as these models' chat templates do with previous messages;
  other white space is kept. vLLM keeps these newlines and Dynamo drops them only in unary responses; here streamed
  and unary text are equal.
"""

from __future__ import annotations

from enum import Enum, auto

from kvolt.frontend.parsers.markers import may_become, partial_marker_length
from kvolt.frontend.parsers.port import Content, Piece, Reasoning

OPENING = "<think>"
CLOSING = "</think>"

MAX_SPACE = 16
"""Limit of the white space buffered before a tag; a longer run is content."""


class _At(Enum):
    START = auto()
    INSIDE_START = auto()
    INSIDE = auto()
    OUTSIDE_START = auto()
    OUTSIDE = auto()


class ThinkParser:
    """TextParser for Qwen3 and DeepSeek-R1."""

    __slots__ = ("_at", "_held", "_starts_inside")

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self._at = _At.START
        self._held = ""

    @property
    def passes_all(self) -> bool:
        return self._at is _At.OUTSIDE and not self._held

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        if self._at is _At.OUTSIDE:
            return [Content(text)]
        if self._at is _At.INSIDE and not self._held and "<" not in text and "\n" not in text:
            return [Reasoning(text)]
        text, self._held = self._held + text, ""
        if self._at is _At.START:
            text = self._open(text)
        if self._at is _At.INSIDE_START:
            text = text.lstrip("\n")
            if text:
                self._at = _At.INSIDE
        pieces: list[Piece] = []
        if self._at is _At.INSIDE:
            reasoning, text = self._reason(text)
            if reasoning:
                pieces.append(Reasoning(reasoning))
        if self._at is _At.OUTSIDE_START:
            text = text.lstrip("\n")
            if text:
                self._at = _At.OUTSIDE
        if self._at is _At.OUTSIDE and text:
            pieces.append(Content(text))
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._at is _At.START and self._starts_inside:
            held = held.lstrip("\n")
        if not held:
            return []
        inside = self._at is _At.INSIDE or self._starts_inside
        return [Reasoning(held) if inside else Content(held)]

    def _open(self, text: str) -> str:
        """Handle a leading tag; returns the text after it, all text if there is none, or "" if undecided."""
        start = len(text) - len(text.lstrip())
        if start <= MAX_SPACE:
            if text.startswith(OPENING, start):
                self._at = _At.INSIDE_START
                return text[start + len(OPENING) :]
            if may_become(text, start, OPENING):
                self._held = text
                return ""
        self._at = _At.INSIDE_START if self._starts_inside else _At.OUTSIDE
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """Return the reasoning that is certain, and the text after its end."""
        end = text.find(CLOSING)
        if end >= 0:
            self._at = _At.OUTSIDE_START
            return text[: _before_newlines(text, end)], text[end + len(CLOSING) :]
        certain = _before_newlines(text, len(text) - partial_marker_length(text, 0, (CLOSING,)))
        self._held = text[certain:]
        return text[:certain], ""


def _before_newlines(text: str, end: int) -> int:
    start = max(0, end - MAX_SPACE)
    return start + len(text[start:end].rstrip("\n"))
