"""Hermes calls within text."""

from __future__ import annotations

import tracemalloc

import pytest

from kvolt.frontend.parsers.calls import MAX_GAP, HermesParser
from kvolt.frontend.parsers.port import Content, Piece, ToolArguments, ToolStart

F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
CALL_F: list[Piece] = [ToolStart(0, "f"), ToolArguments(0, '{"a": 1}')]
CALL_G: list[Piece] = [ToolStart(1, "g"), ToolArguments(1, "{}")]


def parse(text: str) -> list[Piece]:
    parser = HermesParser()
    return parser.feed(text) + parser.finish()


def test_as_a_model_says_it() -> None:
    """Token by token, the way that Qwen's tokenizer cuts it."""
    parser = HermesParser()
    tokens = ["<tool_call>", "\n", '{"', "name", '":', ' "', "get", "_weather", '",', ' "', "arguments", '":']
    tokens += [' {"', "city", '":', ' "', "Paris", '"}}', "\n", "</tool_call>"]
    pieces = [piece for token in tokens for piece in parser.feed(token)]
    assert parser.finish() == []
    assert pieces == [
        ToolStart(0, "get_weather"),
        *(ToolArguments(0, text) for text in ['{"', "city", '":', ' "', "Paris", '"}']),
    ]


def test_text_before_between_and_after() -> None:
    assert parse(f"Let me see.\n{F}\nAnd:\n{G}\nDone.\n") == [
        Content("Let me see.\n"),
        *CALL_F,
        Content("\nAnd:\n"),
        *CALL_G,
        Content("\nDone.\n"),
    ]


def test_white_space_alone_is_no_content() -> None:
    assert parse(f"\n{F}\n \n{G}\n") == [*CALL_F, *CALL_G]
    assert parse("\n ") == [Content("\n ")]


def test_a_long_gap_is_content() -> None:
    parser = HermesParser()
    assert parser.feed(" " * MAX_GAP) == []
    assert parser.feed(" ") == [Content(" " * (MAX_GAP + 1))]
    assert parser.feed(F) == CALL_F


def test_plain_text_does_not_wait() -> None:
    parser = HermesParser()
    assert parser.feed("a < b") == [Content("a < b")]
    assert parser.feed(" <tool") == [Content(" ")]
    assert parser.feed("s>") == [Content("<tools>")]
    assert parser.feed("</tool_call>") == [Content("</tool_call>")]
    assert parser.feed("<tool_") == []
    assert parser.finish() == [Content("<tool_")]


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_c', []),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', []),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}}\n{G}', CALL_G),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}}\n</tool_call>x', [Content("}\nx")]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n<tool', [Content("\n<tool")]),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": 1}}}} x{G}', [Content(" x"), *CALL_G]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": 1}}<tool_call>oops</tool_call>',
            [Content("<tool_call>oops</tool_call>")],
        ),
    ],
)
def test_a_call_that_is_not_closed_well(text: str, after: list[Piece]) -> None:
    assert parse(text) == [*CALL_F, *after]


@pytest.mark.parametrize("bad", ["oops", '{"arguments": {"a": 1}}', '{"name": "f', "{}", ""])
def test_what_is_no_call_is_content(bad: str) -> None:
    text = f"\n<tool_call>{bad}</tool_call>\n"
    assert parse(text) == [Content(text)]
    if not bad.startswith('{"name'):  # an open string has no end
        assert parse(text + F) == [Content(text), *CALL_F]


def test_a_call_inside_a_bad_one_counts() -> None:
    assert parse(f"<tool_call>{F}") == [Content("<tool_call>"), *CALL_F]


def test_what_is_held_is_bounded_before_the_name() -> None:
    parser = HermesParser(max_held=100)
    text = '<tool_call>{"arguments": {"a": "' + "x" * 1000 + '"}, "name": "f"}</tool_call>'
    sent = ""
    for fed, character in enumerate(text, 1):
        for piece in parser.feed(character):
            assert isinstance(piece, Content)
            sent += piece.text
        assert fed - len(sent) <= len("<tool_call>") + 100
    assert sent == text
    assert parser.finish() == []


def test_what_is_held_is_bounded_after_the_name() -> None:
    parser = HermesParser()
    parser.feed('<tool_call>{"name": "f", "')
    for _ in range(1000):  # what is allocated once, by the measurement of coverage for example
        parser.feed("k")
    tracemalloc.start()
    try:
        for _ in range(1000):
            assert parser.feed("k" * 1000) == []
        assert tracemalloc.get_traced_memory()[0] < 50_000
    finally:
        tracemalloc.stop()
    assert parser.feed('": 1}') == [ToolArguments(0, "{}")]
