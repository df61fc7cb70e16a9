"""What every parser of model output takes and gives.

A parser is a pure incremental machine: however its input is cut, the joined output is the same. It
never raises on what a model says, and holds back no more than a bounded amount of text.
"""

from __future__ import annotations

from itertools import groupby
from typing import Protocol

import msgspec


class Content(msgspec.Struct, frozen=True, gc=False):
    """Text for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """Text that the model wrote for itself."""

    text: str


class ToolStart(msgspec.Struct, frozen=True, gc=False):
    """A call begins; its name is known whole."""

    index: int
    name: str


class ToolArguments(msgspec.Struct, frozen=True, gc=False):
    """The next part of a call's arguments, as JSON text."""

    index: int
    text: str


Piece = Content | Reasoning | ToolStart | ToolArguments


class TextParser(Protocol):
    """Takes the text of one choice, in any parts."""

    @property
    def passes_all(self) -> bool:
        """Nothing is held back, and from now on all text comes out as content, as it is."""
        ...

    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """What was held back, now that no more text comes. Nothing may be fed afterwards."""
        ...


def joined(pieces: list[Piece]) -> list[Piece]:
    """Merge adjacent pieces of one kind and drop empty ones: fewer events for the client."""
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
