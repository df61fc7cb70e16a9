"""Interface of parsers of model output.

A parser is a pure incremental state machine: the joined output does not depend on how its input is split. It never
raises on model output, and buffers a bounded amount of text.
"""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Visible text."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text of the model's reasoning."""

    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """Start of a tool call, with its complete name."""

    index: int
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """Next part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | ToolStart | ToolArguments


class TextParser(Protocol):
    """Parser of the text of one choice."""

    @property
    def passes_all(self) -> bool:
        """Whether nothing is buffered and all further text is content."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """Parse text; returns the pieces that are certain."""
        ...

    def finish(self) -> list[Piece]:
        """Return the buffered pieces at the end of the output. Call nothing afterwards."""
        ...


def joined(pieces: list[Piece]) -> list[Piece]:
    """Merge adjacent pieces of one kind and drop empty ones, to reduce the number of events."""
    if len(pieces) == 1 and (isinstance(pieces[0], ToolStart) or pieces[0].text):
        return pieces
    result: list[Piece] = []
    for (kind, index), group in groupby(pieces, _kind):
        if kind is ToolStart:
            result.extend(group)
            continue
        text = "".join(piece.text for piece in group if not isinstance(piece, ToolStart))
        if not text:
            continue
        if kind is ToolArguments:
            result.append(ToolArguments(index, text))
        else:
            result.append(Content(text) if kind is Content else Reasoning(text))
    return result


def _kind(piece: Piece) -> tuple[type[Piece], int]:
    return type(piece), piece.index if isinstance(piece, ToolStart | ToolArguments) else 0
