"""Calls as Hermes and Qwen 2.5 / 3 write them.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

Any number of them, with text before, between and after. A missing closing marker or brace is forgiven.
"""

from __future__ import annotations

from kvolt.frontend.parsers.arguments import MAX_HELD
from kvolt.frontend.parsers.calls import CallParser, CallSyntax

_SYNTAX = CallSyntax(opening="<tool_call>", closing="</tool_call>")


class HermesParser(CallParser):
    __slots__ = ()

    def __init__(self, max_held: int = MAX_HELD) -> None:
        super().__init__(_SYNTAX, max_held)
