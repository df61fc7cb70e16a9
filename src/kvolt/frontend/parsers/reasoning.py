"""Reasoning between `<think>` and `</think>`, at the start of a message.

- The output begins inside when the prompt ended with the opening tag (`starts_inside`); an opening tag
  that the model writes all the same is swallowed. Otherwise only a leading `<think>` opens.
- Reasoning that has ended does not open again: these models think once, at the start, and an answer
  that speaks of `<think>` must come out as it was written.
- Reasoning that is never closed stays reasoning, whatever it contains.
- Newlines that touch a tag belong to it and are dropped, as the chat templates of these models do when
  they take the message back; other white space stays. vLLM keeps these newlines and Dynamo drops them
  only in unary answers; here streamed and unary text are equal.
"""

from __future__ import annotations

from enum import Enum, auto

from kvolt.frontend.parsers.markers import begun_marker, may_become
from kvolt.frontend.parsers.port import Content, Piece, Reasoning

OPENING = "<think>"
CLOSING = "</think>"

MAX_SPACE = 16
"""White space held back before a tag; a longer run is text."""


class _At(Enum):
    START = auto()
    INSIDE_START = auto()
    INSIDE = auto()
    OUTSIDE_START = auto()
    OUTSIDE = auto()


class ThinkParser:
    """Parses what Qwen3 and DeepSeek-R1 write; a TextParser."""

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
        """Look for a leading tag; what follows it, or all when there is none, or nothing yet."""
        begin = len(text) - len(text.lstrip())
        if begin <= MAX_SPACE:
            if text.startswith(OPENING, begin):
                self._at = _At.INSIDE_START
                return text[begin + len(OPENING) :]
            if may_become(text, begin, OPENING):
                self._held = text
                return ""
        self._at = _At.INSIDE_START if self._starts_inside else _At.OUTSIDE
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """The reasoning that is certain, and the text after its end."""
        end = text.find(CLOSING)
        if end >= 0:
            self._at = _At.OUTSIDE_START
            return text[: _before_newlines(text, end)], text[end + len(CLOSING) :]
        certain = _before_newlines(text, len(text) - begun_marker(text, 0, (CLOSING,)))
        self._held = text[certain:]
        return text[:certain], ""


def _before_newlines(text: str, end: int) -> int:
    begin = max(0, end - MAX_SPACE)
    return begin + len(text[begin:end].rstrip("\n"))
