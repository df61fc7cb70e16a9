"""Calls as Llama 3 writes them: the whole message is objects, with `;` or white space between them.

    {"name": "get_weather", "parameters": {"city": "Paris"}}; {"name": ...}

A `<|python_tag|>` may come before an object, and only it begins a call after text. An answer may be JSON
too: an object is a call only when it has a name and, as an object, parameters (or `arguments`).
"""

from __future__ import annotations

from kvolt.frontend.parsers.arguments import MAX_HELD
from kvolt.frontend.parsers.calls import CallParser, CallSyntax

_SYNTAX = CallSyntax(opening="<|python_tag|>", separators=" \t\r\n;", bare=True, needs_arguments=True)


class Llama3JsonParser(CallParser):
    __slots__ = ()

    def __init__(self, max_held: int = MAX_HELD) -> None:
        super().__init__(_SYNTAX, max_held)
