"""Llama 3's calls: the message itself."""

from __future__ import annotations

import pytest

from kvolt.frontend.parsers.calls import Llama3JsonParser
from kvolt.frontend.parsers.port import Content, Piece, ToolArguments, ToolStart

F = '{"name": "f", "parameters": {"a": 1}}'
G = '{"type": "function", "name": "g", "parameters": {}}'
CALL_F: list[Piece] = [ToolStart(0, "f"), ToolArguments(0, '{"a": 1}')]
CALL_G: list[Piece] = [ToolStart(1, "g"), ToolArguments(1, "{}")]


def parse(text: str) -> list[Piece]:
    parser = Llama3JsonParser()
    return parser.feed(text) + parser.finish()


@pytest.mark.parametrize("text", [F, f"\n{F}\n", f"<|python_tag|>{F}", f" <|python_tag|> {F};"])
def test_one_call(text: str) -> None:
    assert parse(text) == CALL_F


@pytest.mark.parametrize("between", [";", "; ", "\n", " ;\n", "", "<|python_tag|>", ";<|python_tag|>"])
def test_several_calls(between: str) -> None:
    assert parse(f"{F}{between}{G}") == [*CALL_F, *CALL_G]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"answer": 42}',
        '{"name": "Bob", "age": 3}',
        '{"name": "Bob"}',
        '{"name": "Bob", "parameters": "tall"}',
        "{x | x > 0}",
        "<|python_tag|>print(1)",
        "<|python",
        f"Like this: {F}",
        f"[{F}]",
        "; ",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert parse(text) == [Content(text)]


def test_an_answer_in_json_does_not_wait_for_its_end() -> None:
    parser = Llama3JsonParser()
    assert parser.feed('{"answer"') == [Content('{"answer"')]
    assert parser.feed(": 4") == [Content(": 4")]


def test_text_and_then_the_tag() -> None:
    assert parse(f"Let me see. <|python_tag|>{F}") == [Content("Let me see. "), *CALL_F]


def test_an_object_that_is_no_call_after_one_that_is() -> None:
    assert parse(f'{F}; {{"b": 2}}') == [*CALL_F, Content('; {"b": 2}')]
