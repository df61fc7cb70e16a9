"""What a chat template is given."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.frontend.openai_api.checks import parse_chat, parse_tokenize
from kvolt.frontend.openai_api.generation import chat_options
from kvolt.frontend.openai_api.requests import ChatRequest
from kvolt.frontend.openai_api.templating import build_template_input

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]


def chat(**fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "developer", "content": "hi"}], **fields}
    return parse_chat(json.dumps(body).encode()).request


def test_a_plain_chat() -> None:
    given = build_template_input(chat())
    assert given == ([{"role": "developer", "content": "hi"}], None, True, False, {}, False)


@pytest.mark.parametrize(
    ("fields", "begins", "continues"),
    [
        ({"add_generation_prompt": False}, False, False),
        ({"continue_final_message": True}, False, True),
        ({"continue_final_message": False}, True, False),
    ],
)
def test_how_the_prompt_ends(fields: dict[str, Any], begins: bool, continues: bool) -> None:
    given = build_template_input(chat(**fields))
    assert (given.add_generation_prompt, given.continue_final_message) == (begins, continues)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "none"},
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        ({"thinking": True}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True, "thinking": True}),
        ({"chat_template_kwargs": {"x": [1]}}, {"x": [1]}),
        ({"chat_template_args": {"x": 1}}, {"x": 1}),
        ({"documents": [{"text": "t"}]}, {"documents": [{"text": "t"}]}),
        (
            {"thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "thinking": True},
        ),
    ],
)
def test_what_else_it_knows(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    assert build_template_input(chat(**fields)).kwargs == expected


def test_tools_are_those_that_may_be_called() -> None:
    request = chat(tools=TOOLS, tool_choice="none")
    assert build_template_input(request, chat_options(request).tools).tools is None
    request = chat(tools=TOOLS)
    assert len(build_template_input(request, chat_options(request).tools).tools or ()) == 2


def test_tokenizing_messages_sees_the_same() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "chat_template_kwargs": {"a": 1}}
    given = build_template_input(parse_tokenize(json.dumps(body).encode()).request)
    assert given.messages == [{"role": "user", "content": "x"}]
    assert [tool["function"]["name"] for tool in given.tools or ()] == ["f", "g"]
    assert given.kwargs == {"a": 1}
