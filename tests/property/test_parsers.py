"""Parsers of model output: however the text is cut, what comes out is the same, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvolt.frontend.parsers.calls import HermesParser, Llama3JsonParser, NamedToolParser, RequiredToolParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, TextParser, ToolArguments, ToolStart
from kvolt.frontend.parsers.reasoning import ThinkParser

MAX_HELD = 48
"""Small, so that generated calls go over it."""

PARSERS: dict[str, Callable[[], TextParser]] = {
    "hermes": HermesParser,
    "hermes, little held": lambda: HermesParser(MAX_HELD),
    "llama3_json": Llama3JsonParser,
    "llama3_json, little held": lambda: Llama3JsonParser(MAX_HELD),
    "required": RequiredToolParser,
    "named": lambda: NamedToolParser("f"),
    "qwen3": lambda: ThinkParser(starts_inside=False),
    "deepseek_r1": lambda: ThinkParser(starts_inside=True),
    "qwen3, then hermes": lambda: ParserChain(ThinkParser(starts_inside=False), HermesParser()),
    "deepseek_r1, then llama3_json": lambda: ParserChain(ThinkParser(starts_inside=True), Llama3JsonParser()),
    "one call": lambda: ParserChain(None, HermesParser(), max_calls=1),
}


class Result(NamedTuple):
    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def collect(pieces: Iterable[Piece]) -> Result:
    content, reasoning = "", ""
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        match piece:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case ToolStart(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolArguments(index, text):
                assert index == len(calls) - 1
                calls[index] = calls[index][0], calls[index][1] + text
        assert isinstance(piece, ToolStart) or piece.text, "an event that says nothing"
    return Result(content, reasoning, calls)


def parse(parser: TextParser, parts: Iterable[str]) -> Result:
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return collect(pieces + parser.finish())


def cut(text: str, at: Iterable[int]) -> list[str]:
    edges = [0, *sorted(at), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<|python_tag|>",
    "<",
    "</",
    "<tool",
    "\n",
    "\n\n",
    " ",
    " " * 20,
    ";",
    "[",
    "]",
    "{",
    "}",
    '"',
    ":",
    ",",
    "\\",
    "\\u",
    "\\ud83d",
    "\\ude00",
    "\\u00e9",
    "\\n",
    '\\"',
    "null",
    "12",
    "é",
    "🎉",
    "text",
    '"name"',
    '"name": "f"',
    '"arguments"',
    '"arguments": {',
    '"parameters": {',
    '"arguments": "',
    '"id": 3',
    '{"name": "f", "arguments": {"a": [1, "x}"]}}',
    '{"name": "g", "parameters": {}}',
    '{"parameters": {"a": 1}, "name": "h"}',
    '<tool_call>\n{"name": "f", "arguments": {',
]

MARKERS = [("<tool_call>", "</tool_call>"), ("<|python_tag|>", ""), ("[", "]"), ("", "")]

WORDS = st.text(st.sampled_from("aé🎉日 \n{}[]\"'\\:;,<>/&|%0-") | st.characters(codec="utf-8"), max_size=12)
NAMES = st.text(st.sampled_from("abcXYZ019_-.é"), min_size=1, max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(WORDS, children, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.dictionaries(WORDS, VALUES, max_size=3)


class Call(NamedTuple):
    name: str
    arguments: str
    text: str


@st.composite
def calls(draw: st.DrawFn, arguments_key: str) -> Call:
    """A call in one of the ways that models write it."""
    name = draw(NAMES)
    arguments = json.dumps(
        draw(ARGUMENTS), ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 2]))
    )
    given_as = json.dumps(arguments, ensure_ascii=draw(st.booleans())) if draw(st.booleans()) else arguments
    members = [f'"name": {json.dumps(name)}', f'"{arguments_key}": {given_as}']
    if draw(st.booleans()):
        members.reverse()
    if draw(st.booleans()):
        members.insert(draw(st.integers(0, 2)), '"type": "function"')
    space = draw(st.sampled_from(["", " ", "\n"]))
    return Call(name, arguments, f"{{{space}{f', {space}'.join(members)}{space}}}")


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """Messages that were well-formed, with a few places spoilt."""
    opening, closing = draw(st.sampled_from(MARKERS))
    key = draw(st.sampled_from(["arguments", "parameters"]))
    messages = [f"{opening}{call.text}{closing}" for call in draw(st.lists(calls(key), max_size=2))]
    text = draw(st.sampled_from(["", "<think>\n", "</think>\n\n"])) + "\n".join(messages)
    for _ in range(draw(st.integers(0, 3))):
        begin = draw(st.integers(0, len(text)))
        text = text[:begin] + draw(st.sampled_from(FRAGMENTS)) + text[begin + draw(st.integers(0, 12)) :]
    return text


# --- the same however it is cut


@pytest.mark.parametrize("name", PARSERS)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join) | damaged(), st.data())
def test_a_cut_changes_nothing(name: str, text: str, data: st.DataObject) -> None:
    new = PARSERS[name]
    whole = parse(new(), [text])
    assert parse(new(), text) == whole, "one character at a time"
    for position in range(len(text)):
        assert parse(new(), cut(text, [position])) == whole
    positions = data.draw(st.lists(st.integers(0, len(text))))
    assert parse(new(), cut(text, positions)) == whole


# --- well-formed messages come out as they were meant


def everywhere(new: Callable[[], TextParser], text: str, positions: list[int]) -> Result:
    whole = parse(new(), [text])
    assert parse(new(), text) == whole
    assert parse(new(), cut(text, [position % (len(text) + 1) for position in positions])) == whole
    return whole


POSITIONS = st.lists(st.integers(0, 10_000), max_size=8)
PLAIN = WORDS.filter(lambda text: text.strip() != "" and "<" not in text)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(PLAIN | st.just("\n"), calls("arguments")), max_size=3), PLAIN | st.just(""), POSITIONS
)
def test_hermes(messages: list[tuple[str, Call]], end: str, positions: list[int]) -> None:
    text = "".join(f"{before}<tool_call>\n{call.text}\n</tool_call>" for before, call in messages) + end
    whole = everywhere(HermesParser, text, positions)
    assert whole.calls == [(call.name, call.arguments) for _, call in messages]
    assert whole.content == "".join(before for before, _ in messages if before.strip()) + end


@settings(max_examples=60, deadline=None)
@given(
    st.lists(calls("parameters"), min_size=1, max_size=3),
    st.sampled_from([";", "\n", "; ", " ;\n"]),
    POSITIONS,
)
def test_llama3_json(messages: list[Call], separator: str, positions: list[int]) -> None:
    for tag in ("", "<|python_tag|>"):
        text = tag + separator.join(call.text for call in messages)
        whole = everywhere(Llama3JsonParser, text, positions)
        assert whole == Result("", "", [(call.name, call.arguments) for call in messages])


@settings(deadline=None)
@given(st.lists(calls("parameters"), min_size=1, max_size=3), st.sampled_from([",", ", ", ",\n"]), POSITIONS)
def test_required(messages: list[Call], separator: str, positions: list[int]) -> None:
    text = f"[{separator.join(call.text for call in messages)}]\n"
    whole = everywhere(RequiredToolParser, text, positions)
    assert whole == Result("", "", [(call.name, call.arguments) for call in messages])


@settings(deadline=None)
@given(ARGUMENTS.map(json.dumps), POSITIONS)
def test_named(arguments: str, positions: list[int]) -> None:
    assert everywhere(lambda: NamedToolParser("f"), arguments, positions) == Result(
        "", "", [("f", arguments)]
    )


@settings(deadline=None)
@given(PLAIN.map(str.strip), PLAIN.map(str.strip), calls("arguments"), st.booleans(), POSITIONS)
def test_reasoning_then_content_then_a_call(
    reasoning: str, content: str, call: Call, is_opened_by_prompt: bool, positions: list[int]
) -> None:
    opening = "" if is_opened_by_prompt else "<think>\n"
    text = f"{opening}{reasoning}\n</think>\n\n{content}<tool_call>{call.text}</tool_call>"

    def chain() -> TextParser:
        return ParserChain(ThinkParser(starts_inside=is_opened_by_prompt), HermesParser())

    assert everywhere(chain, text, positions) == Result(content, reasoning, [(call.name, call.arguments)])


# --- what is no call comes out as it went in


@settings(deadline=None)
@given(st.dictionaries(WORDS, VALUES) | st.lists(VALUES) | WORDS, POSITIONS)
@example({"name": "Bob", "age": 3}, [])
@example({"name": "Bob", "parameters": [1]}, [])
@example({"name": "Bob", "type": "person"}, [])
@example({"name": 3, "parameters": {}}, [])
def test_json_that_is_no_call_is_content(answer: Any, positions: list[int]) -> None:
    text = json.dumps(answer)
    assert everywhere(Llama3JsonParser, text, positions) == Result(text, "", [])


NAMELESS = st.sampled_from(
    [
        "",
        "oops",
        "{",
        "{}",
        "[1]",
        '{"name"}',
        '{"name": 3, "arguments": {}}',
        '{"name": ""}',
        '{"name: "f", "arguments": {}}',
        '{"arguments": {"a": 1}}',
        '{"arguments": {"a": 1, "name": "f"',
        '{"arguments": "{\\"a\\": 1}", "x"',
        "{'name': 'f', 'arguments': {}}",
        '{"na\nme": "f"}',
        '{"arguments": {"name": "f"}}',
    ]
)


@settings(max_examples=60, deadline=None)
@given(PLAIN | st.just(""), NAMELESS, st.booleans(), PLAIN | st.just(""), calls("arguments"), POSITIONS)
def test_a_bad_call_is_content_with_its_markers(
    before: str, bad: str, is_closed: bool, after: str, call: Call, positions: list[int]
) -> None:
    """And does no harm to the call after it, if it was closed (else that one may be its JSON's text)."""
    closing = "</tool_call>" if is_closed else ""
    text = f"{before}<tool_call>{bad}{closing}{after}"
    whole = everywhere(HermesParser, text, positions)
    assert whole == Result(text, "", [])
    if is_closed:
        whole = everywhere(HermesParser, f"{text}<tool_call>{call.text}</tool_call>", positions)
        assert whole == Result(text, "", [(call.name, call.arguments)])


@settings(max_examples=30, deadline=None)
@given(calls("arguments"))
def test_a_call_cut_short_loses_nothing(call: Call) -> None:
    """Either it had not started, and is content; or its name is whole, and its arguments as far as they go."""
    text = f"<tool_call>{call.text}"
    known = ""
    for length in range(len(text)):
        whole = parse(HermesParser(), [text[:length]])
        if whole.calls:
            ((name, arguments),) = whole.calls
            assert (whole.content, name) == ("", call.name)
            assert call.arguments.startswith(arguments)
            assert arguments.startswith(known)
            known = arguments
        else:
            assert whole.content == text[:length]
            assert known == ""
    assert known == call.arguments
