"""Messages: what is taken, and what a template sees of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.frontend.openai_api.checks import parse_chat
from kvolt.frontend.openai_api.messages import template_messages

CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1.0, "b": "é"}'}}


def parse(*messages: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": list(messages)}).encode()).request.messages


def seen(*messages: Any) -> list[dict[str, Any]]:
    return template_messages(parse(*messages))


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (3, "messages[0]"),
        ({}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "bot", "content": "x"}, "messages[0].role"),
        ({"role": None, "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 3}, "messages[0].content"),
        ({"role": "user", "content": {}}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "poem", "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "system"}, "messages[0].content"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": [{"id": "x"}]}, "messages[0].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[0].tool_calls[0].function.name"),
        ({"role": "tool", "content": "x"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "x", "tool_call_id": ""}, "messages[0].tool_call_id"),
        ({"role": "tool", "tool_call_id": "x"}, "messages[0].content"),
        ({"role": "function", "content": "x"}, "messages[0].name"),
    ],
)
def test_wrong_messages_name_the_place(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse(message)
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(
    ("messages", "param"), [([], "messages"), (None, "messages"), ("hi", "messages"), ({}, "messages")]
)
def test_what_is_no_list_of_messages(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(json.dumps({"model": "m", "messages": messages}).encode())
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": "http://x"}},
        {"type": "video_url", "video_url": {"url": "http://x"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
def test_media_is_not_supported_yet(part: dict[str, Any]) -> None:
    with pytest.raises(Unsupported) as caught:
        parse({"role": "user", "content": [{"type": "text", "text": "look"}, part]})
    assert caught.value.fields == {"feature": "media", "param": "messages[0].content[1]"}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}),
        ({"content": "hi", "name": "bob", "role": "user"}, {"role": "user", "content": "hi", "name": "bob"}),
        ({"role": "user", "content": "hi", "future": {"x": 1}}, {"role": "user", "content": "hi"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ),
        ({"role": "system", "content": ""}, {"role": "system", "content": ""}),
        ({"role": "developer", "content": "d"}, {"role": "developer", "content": "d"}),
        (
            {"role": "tool", "content": "42", "tool_call_id": "call_1"},
            {"role": "tool", "content": "42", "tool_call_id": "call_1"},
        ),
        ({"role": "function", "name": "f", "content": "42"}, {"role": "tool", "content": "42", "name": "f"}),
        ({"role": "function", "name": "f", "content": None}, {"role": "tool", "content": "", "name": "f"}),
        (
            {
                "role": "assistant",
                "content": "x",
                "reasoning_content": "hm",
                "annotations": [],
                "audio": None,
            },
            {"role": "assistant", "content": "x", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": None, "reasoning": "hm"},
            {"role": "assistant", "content": "", "reasoning_content": "hm"},
        ),
        (
            {"role": "assistant", "content": None, "refusal": "no"},
            {"role": "assistant", "content": "no"},
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "no"}]},
        ),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
    ],
)
def test_what_a_template_sees(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert seen(message) == [expected]


def test_arguments_of_earlier_calls_are_values_not_text() -> None:
    (message,) = seen({"role": "assistant", "tool_calls": [CALL]})
    function = {"name": "f", "arguments": {"a": 1.0, "b": "é"}}
    assert message["tool_calls"] == [{"id": "call_1", "type": "function", "function": function}]


@pytest.mark.parametrize(
    "text", ["not json", '{"a":', "[1]", "3", '"x"', "[" * 5000, '{"a":' * 100 + "1" + "}" * 100]
)
def test_arguments_that_a_model_got_wrong_stay_text(text: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
    (message,) = seen({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == text


def test_no_arguments_are_an_empty_object() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}
    (message,) = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == {}
