"""OpenAI's formats: what is taken, and what is refused with the name of the field."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.errors import InvalidRequest
from kvolt.frontend.openai import ChatShape, CompletionShape, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": MESSAGES, **fields}).encode()


def refusal(parse: Callable[[bytes], Any], body: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse(body)
    assert caught.value.message
    return caught.value


def test_a_plain_request_has_no_values_of_its_own() -> None:
    asked = parse_completion(completion())
    assert (asked.model, asked.prompt) == ("m", "hi")
    left_out = (asked.max_tokens, asked.temperature, asked.top_p, asked.seed, asked.n, asked.stream)
    assert left_out == (None,) * 6
    assert [message.content for message in parse_chat(chat()).messages] == ["hi"]


def test_null_is_the_same_as_nothing() -> None:
    names = ("max_tokens", "temperature", "top_p", "seed", "n", "stream", "stream_options")
    nulls = dict.fromkeys(names)
    assert parse_completion(completion(**nulls)) == parse_completion(completion())
    assert parse_chat(chat(**nulls, max_completion_tokens=None)) == parse_chat(chat())


def test_unknown_fields_are_ignored() -> None:
    assert parse_completion(completion(user="u", logit_bias={"5": 1})) == parse_completion(completion())


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 0.0, 1, 2, 2.0], [-0.001, 2.001, -1, 1e300]),
        ("top_p", [0, 0.5, 1], [-0.1, 1.0001]),
        ("n", [1, 128], [0, -1, 129]),
        ("max_tokens", [1, 10**6, 10**30], [0, -1]),
        ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    ],
)
def test_ranges(name: str, good: list[Any], bad: list[Any]) -> None:
    for parse, body in ((parse_completion, completion), (parse_chat, chat)):
        for value in good:
            assert getattr(parse(body(**{name: value})), name) == value
        for value in bad:
            assert refusal(parse, body(**{name: value})).fields["param"] == name


def test_max_completion_tokens_has_a_range_too() -> None:
    assert parse_chat(chat(max_completion_tokens=1)).max_completion_tokens == 1
    assert refusal(parse_chat, chat(max_completion_tokens=0)).fields["param"] == "max_completion_tokens"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", 3, "model"),
        ("model", None, "model"),
        ("prompt", 3, "prompt"),
        ("prompt", None, "prompt"),
        ("prompt", [1, "x"], "prompt[1]"),
        ("prompt", [-1], "prompt[0]"),
        ("prompt", [2**32], "prompt[0]"),
        ("prompt", [True], "prompt[0]"),
        ("max_tokens", "5", "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("temperature", "hot", "temperature"),
        ("seed", 0.5, "seed"),
        ("n", [1], "n"),
        ("stream", "yes", "stream"),
        ("stream", 1, "stream"),
        ("stream_options", True, "stream_options"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ],
)
def test_a_wrong_type_names_the_field(field: str, value: Any, param: str) -> None:
    assert refusal(parse_completion, completion(**{field: value})).fields["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ([3], "messages[0]"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": None, "content": ""}], "messages[0].role"),
    ],
)
def test_wrong_messages_name_the_place(messages: Any, param: str) -> None:
    assert refusal(parse_chat, chat(messages=messages)).fields["param"] == param


@pytest.mark.parametrize("field", ["model", "prompt"])
def test_a_missing_field_is_named(field: str) -> None:
    body = {"model": "m", "prompt": "hi"}
    del body[field]
    assert field in refusal(parse_completion, json.dumps(body).encode()).message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'"text"',
        b'{"model":"m","prompt":"hi"} trailing',
        b'{"model":"m","prompt":"\xff\xfe"}',
        b'{"model":"m","prompt":"\\ud800"}',
        b'{"model":"m","prompt":"hi","temperature":NaN}',
        b'{"model":"m","prompt":"hi","temperature":1e999}',
        b'{"model":"m","prompt":"hi","x":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"model":"m","prompt":"hi","x":' + b'{"a":' * 100_000,
        b"\x00" * 100,
    ],
    ids=lambda body: body[:40].decode("latin-1"),
)
def test_what_is_not_a_request_is_refused(body: bytes) -> None:
    refusal(parse_completion, body)
    refusal(parse_chat, body)


@given(st.binary(max_size=200))
def test_no_bytes_bring_any_other_error(body: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        with suppress(InvalidRequest):
            parse(body)


def test_a_chat_delta_begins_with_the_role_and_ends_without_content() -> None:
    shape = ChatShape()
    assert shape.delta(0, "a", None, True)["delta"] == {"role": "assistant", "content": "a"}
    assert shape.delta(0, "", None, True)["delta"] == {"role": "assistant", "content": ""}
    assert shape.delta(0, "b", None, False)["delta"] == {"content": "b"}
    last = shape.delta(1, "", "length", False)
    assert (last["index"], last["delta"], last["finish_reason"]) == (1, {}, "length")


def test_a_completion_delta_looks_like_the_whole() -> None:
    shape = CompletionShape()
    assert shape.delta(0, "a", "stop", True) == shape.choice(0, "a", "stop")
