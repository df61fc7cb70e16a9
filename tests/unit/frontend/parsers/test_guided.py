"""Calls that a grammar forced: bare JSON."""

from __future__ import annotations

from kvolt.frontend.parsers.calls import NamedToolParser, RequiredToolParser
from kvolt.frontend.parsers.port import Content, ToolArguments, ToolStart


def test_required_gives_each_call_of_the_array() -> None:
    parser = RequiredToolParser()
    assert parser.feed('[ {"name": "f"') == [ToolStart(0, "f")]
    assert parser.feed(', "parameters": {"a": [1]') == [ToolArguments(0, '{"a": [1]')]
    assert parser.feed('}}, {"parameters": {}, "name": "g"}') == [
        ToolArguments(0, "}"),
        ToolStart(1, "g"),
        ToolArguments(1, "{}"),
    ]
    assert parser.feed("\n]") == []
    assert parser.finish() == []


def test_required_with_text_instead() -> None:
    parser = RequiredToolParser()
    assert parser.feed("[] or <not>") == [Content("[] or <not>")]
    assert parser.finish() == []


def test_named_takes_all_as_arguments() -> None:
    parser = NamedToolParser("f")
    assert parser.feed("") == []
    assert parser.feed('{"a"') == [ToolStart(0, "f"), ToolArguments(0, '{"a"')]
    assert parser.feed(": 1}") == [ToolArguments(0, ": 1}")]
    assert parser.finish() == []
