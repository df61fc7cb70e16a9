"""Reasoning, then tools."""

from __future__ import annotations

from kvolt.frontend.parsers.calls import HermesParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import Content, Reasoning, ToolArguments, ToolStart
from kvolt.frontend.parsers.reasoning import ThinkParser

F = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
G = '<tool_call>{"name": "g", "arguments": {"a": 2}}</tool_call>'


def test_content_of_the_first_goes_to_the_second() -> None:
    chain = ParserChain(ThinkParser(starts_inside=True), HermesParser())
    pieces = chain.feed(f"Hm {F}\n</think>\n\nOk. {F}") + chain.finish()
    assert pieces == [Reasoning(f"Hm {F}"), Content("Ok. "), ToolStart(0, "f"), ToolArguments(0, '{"a": 1}')]


def test_what_the_first_held_back_reaches_the_second() -> None:
    chain = ParserChain(ThinkParser(starts_inside=False), HermesParser())
    assert chain.feed("<t") == []
    assert chain.finish() == [Content("<t")]


def test_either_may_be_missing() -> None:
    none = ParserChain()
    assert none.feed("<think>") + none.feed("") + none.finish() == [Content("<think>")]
    tools = ParserChain(None, HermesParser())
    assert tools.feed("a<") + tools.finish() == [Content("a"), Content("<")]
    reasoning = ParserChain(ThinkParser(starts_inside=True))
    assert reasoning.feed(f"a</think>{F}") + reasoning.finish() == [Reasoning("a"), Content(F)]


def test_calls_beyond_the_limit_are_swallowed() -> None:
    chain = ParserChain(None, HermesParser(), max_calls=1)
    assert chain.feed(F) == [ToolStart(0, "f"), ToolArguments(0, '{"a": 1}')]
    assert chain.feed(G[:-20]) + chain.feed(G[-20:]) + chain.feed("End.") + chain.finish() == [
        Content("End.")
    ]
