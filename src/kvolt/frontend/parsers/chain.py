"""Combines a reasoning parser and a tool call parser."""

from __future__ import annotations

from kvolt.frontend.parsers.port import Content, Piece, TextParser, ToolArguments, ToolStart, joined


class ParserChain:
    """Reasoning parser, then tool call parser; either may be missing.

    Calls beyond `max_calls` are dropped: clients that disable parallel calls expect at most one.
    """

    __slots__ = ("_max_calls", "_reasoning", "_tools")

    def __init__(
        self,
        reasoning: TextParser | None = None,
        tools: TextParser | None = None,
        *,
        max_calls: int | None = None,
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls

    @property
    def passes_all(self) -> bool:
        return self._tools is None and (self._reasoning is None or self._reasoning.passes_all)

    def feed(self, text: str) -> list[Piece]:
        if self._reasoning is not None:
            return self._second(self._reasoning.feed(text))
        return self._second([Content(text)]) if text else []

    def finish(self) -> list[Piece]:
        pieces = self._second(self._reasoning.finish()) if self._reasoning is not None else []
        if self._tools is not None:
            pieces = joined(pieces + self._allowed(self._tools.finish()))
        return pieces

    def _second(self, pieces: list[Piece]) -> list[Piece]:
        tools = self._tools
        if tools is None:
            return pieces
        result: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Content):
                result += self._allowed(tools.feed(piece.text))
            else:
                result.append(piece)
        return result

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Pieces without further calls."""
        limit = self._max_calls
        if limit is None:
            return pieces
        return [
            piece
            for piece in pieces
            if not isinstance(piece, ToolStart | ToolArguments) or piece.index < limit
        ]
