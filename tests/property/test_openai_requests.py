"""Whatever JSON, or whatever bytes, come in: a request, or a refusal that says why. Never anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvolt.core.errors import InvalidRequest, KvoltError, Unsupported
from kvolt.frontend.openai_api.checks import (
    check_vocabulary,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)
from kvolt.frontend.openai_api.generation import chat_options, completion_options, list_prompts
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest, TokenizeRequest
from kvolt.frontend.openai_api.schemas import check_schema, schema_text
from kvolt.frontend.openai_api.templating import build_template_input

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**32, 2**63, 2**64, 10**30, -(10**30), 1e308, 1e-308, 0.5, 1.0]),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
KEYWORDS = st.sampled_from(
    [
        "type",
        "properties",
        "items",
        "anyOf",
        "allOf",
        "oneOf",
        "not",
        "$ref",
        "$defs",
        "enum",
        "required",
        "additionalProperties",
        "pattern",
        "minItems",
        "maximum",
        "role",
        "content",
        "text",
        "name",
        "function",
        "arguments",
        "tool_calls",
        "tool_call_id",
        "json_schema",
        "schema",
        "strict",
        "format",
        "structures",
        "triggers",
        "begin",
        "end",
        "parameters",
        "json",
        "regex",
        "choice",
        "grammar",
        "include_usage",
    ]
)
WORDS = st.sampled_from(
    [
        "user",
        "system",
        "assistant",
        "tool",
        "function",
        "developer",
        "text",
        "image_url",
        "json_schema",
        "json_object",
        "structural_tag",
        "auto",
        "none",
        "required",
        "object",
        "string",
        "array",
        "#",
        "#/$defs/a",
        "#/properties/a",
        "allowed_tools",
        "enabled",
    ]
)
JSON = st.recursive(
    SCALARS | WORDS,
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(KEYWORDS | st.text(max_size=5), children, max_size=5)
    ),
    max_leaves=8,
)

CONTENT = st.one_of(
    st.text(max_size=10),
    st.none(),
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=3),
    JSON,
)
MESSAGE = st.fixed_dictionaries(
    {"role": WORDS, "content": CONTENT},
    optional={"name": SCALARS, "tool_call_id": SCALARS, "tool_calls": JSON, "reasoning_content": SCALARS},
)
TOOL = st.fixed_dictionaries(
    {
        "type": st.just("function"),
        "function": st.fixed_dictionaries(
            {"name": st.sampled_from(["f", "g", "auto", ""])},
            optional={"parameters": JSON, "description": SCALARS},
        ),
    }
)


@st.composite
def request_of(draw: st.DrawFn, kind: type[msgspec.Struct], likely: dict[str, Any]) -> dict[str, Any]:
    """A body with right names and any values, beside values that make sense."""
    body = {"model": "m"}
    names = [name for name in ("messages", "prompt") if name in likely]
    names += draw(
        st.lists(st.sampled_from([*kind.__struct_encode_fields__, "unknown"]), max_size=4, unique=True)
    )
    names += draw(st.lists(st.sampled_from(sorted(likely)), max_size=3, unique=True))
    for name in names:
        body[name] = draw(likely.get(name, JSON))
    return body


COMMON: dict[str, st.SearchStrategy[Any]] = {
    "stream": st.booleans(),
    "stop": st.lists(st.text(max_size=3), max_size=3),
    "n": st.integers(0, 3),
    "logit_bias": st.dictionaries(st.integers(-1, 5).map(str), st.floats(-101, 101), max_size=3),
    "temperature": st.floats(-1, 3),
    "response_format": st.fixed_dictionaries({"type": WORDS}, optional={"json_schema": JSON, "format": JSON}),
    "guided_json": JSON,
    "guided_regex": st.text(alphabet="ab()[]{}|*+?\\^$.i,1-<>:=!", max_size=12),
}
MESSAGES = st.lists(MESSAGE, min_size=1, max_size=3)
TOOLS = st.lists(TOOL, max_size=3)
CHATS = request_of(
    ChatRequest,
    {
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": st.one_of(WORDS, st.just({"type": "function", "function": {"name": "f"}}), JSON),
        **COMMON,
    },
)
COMPLETIONS = request_of(
    CompletionRequest,
    {
        "prompt": st.one_of(st.text(max_size=5), st.lists(st.integers(0, 9), min_size=1), JSON),
        "echo": st.booleans(),
        **COMMON,
    },
)
TOKENIZE = request_of(TokenizeRequest, {"messages": MESSAGES, "tools": TOOLS})


def attempt(serve: Callable[[bytes], None], body: bytes) -> None:
    refusal: KvoltError | None = None
    try:
        serve(body)
    except (InvalidRequest, Unsupported) as error:
        refusal = error
    if refusal is not None:
        assert 0 < len(refusal.message) < 2000
        param = refusal.fields["param"]
        assert param is None or (isinstance(param, str) and param)


def serve_chat(body: bytes) -> None:
    request = parse_chat(body).request
    options = chat_options(request)
    check_vocabulary(request, 100)
    given = build_template_input(request, options.tools)
    json.dumps(given)
    json.dumps(given).encode()
    msgspec.msgpack.encode((options.sampling, options.grammar))


def serve_completion(body: bytes) -> None:
    request = parse_completion(body).request
    options = completion_options(request)
    check_vocabulary(request, 100)
    for prompt in list_prompts(request):
        assert isinstance(prompt, str) or all(isinstance(token_id, int) for token_id in prompt)
    msgspec.msgpack.encode((options.sampling, options.grammar))


def serve_tokenize(body: bytes) -> None:
    build_template_input(parse_tokenize(body).request)


def serve_detokenize(body: bytes) -> None:
    check_vocabulary(parse_detokenize(body).request, 100)


ALL = (serve_chat, serve_completion, serve_tokenize, serve_detokenize)


@given(CHATS)
def test_chats(body: dict[str, Any]) -> None:
    attempt(serve_chat, json.dumps(body).encode())


@given(COMPLETIONS)
def test_completions(body: dict[str, Any]) -> None:
    attempt(serve_completion, json.dumps(body).encode())


@given(TOKENIZE)
def test_tokenize(body: dict[str, Any]) -> None:
    attempt(serve_tokenize, json.dumps(body).encode())


@given(JSON)
def test_any_json(value: Any) -> None:
    for serve in ALL:
        attempt(serve, json.dumps(value).encode())


@given(st.text(st.characters(exclude_categories=()), max_size=20))
@example("\ud83d")
@example("\ude00\ud83d")
def test_texts_are_whole_characters(text: str) -> None:
    """Halves of a pair that JSON writes side by side are one character; a half alone is refused."""
    try:
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        with pytest.raises(InvalidRequest, match="surrogate"):
            parse_completion(json.dumps({"model": "m", "prompt": text}).encode())
    else:
        assert parse_completion(json.dumps({"model": "m", "prompt": text}).encode()).request.prompt == whole


@given(st.binary(max_size=200))
@example(b"\xff")
@example(b'{"model":"\\ud800')
def test_any_bytes(body: bytes) -> None:
    for serve in ALL:
        attempt(serve, body)


WHOLE = json.dumps(
    {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "h\u00e9 \U0001f600"}]},
            {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]},
        ],
        "prompt": [[1, 2], [3]],
        "tokens": [1, 2],
        "logit_bias": {"5": -1.5e1},
        "stop": ["\n", "\u2028"],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        "nvext": {"annotations": ["request_id"]},
        "stream": True,
    }
).encode()


@given(st.integers(0, len(WHOLE)), st.integers(0, 12), st.binary(max_size=6))
@settings(max_examples=300)
def test_a_body_with_a_piece_replaced(start: int, length: int, piece: bytes) -> None:
    for serve in ALL:
        attempt(serve, WHOLE[:start] + piece + WHOLE[start + length :])


@given(st.dictionaries(KEYWORDS, JSON, max_size=5))
def test_a_schema_is_refused_or_stays_what_it_is(schema: dict[str, Any]) -> None:
    def check(body: bytes) -> None:
        check_schema(schema, "schema")
        assert json.loads(schema_text(schema, "schema")) == schema

    attempt(check, b"")


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4))
def test_all_unknown_names_are_reported(extra: dict[str, Any]) -> None:
    known = set(ChatRequest.__struct_encode_fields__)
    extra = {name: value for name, value in extra.items() if name not in known}
    body = {**extra, "model": "m", "messages": [{"role": "user", "content": "x"}]}
    unknown = parse_chat(json.dumps(body).encode()).unknown
    assert len(unknown) == len(extra)
    assert all(name.isascii() and name.isprintable() for name in unknown)
