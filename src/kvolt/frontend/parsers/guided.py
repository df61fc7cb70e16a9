"""Parsers of tool calls under a grammar (`tool_choice` is required or a function name): JSON without markers.

Output that violates the grammar is handled as usual: arguments in a started call, otherwise content.
"""

from __future__ import annotations

from kvolt.frontend.parsers.arguments import MAX_HELD
from kvolt.frontend.parsers.calls import CallParser, CallSyntax
from kvolt.frontend.parsers.port import Piece, ToolArguments, ToolStart

_ARRAY = CallSyntax(separators=" \t\r\n[,]", bare=True)


class RequiredToolParser(CallParser):
    """Parser of an array: `[{"name": ..., "parameters": {...}}, ...]`."""

    __slots__ = ()

    def __init__(self, max_held: int = MAX_HELD) -> None:
        super().__init__(_ARRAY, max_held)


class NamedToolParser:
    """TextParser whose whole input is the arguments of one function."""

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
