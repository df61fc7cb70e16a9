"""Rules between fields, and against a vocabulary."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import InvalidRequest, Unsupported
from kvolt.frontend.openai_api.checks import check_vocabulary, parse_chat, parse_completion, parse_detokenize


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {}}, "stream_options"),
        ({"stream_options": {"include_usage": True}, "stream": False}, "stream_options"),
        ({"stream_options": {"include_usage": 1}, "stream": True}, "stream_options.include_usage"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_completion_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs.chat_template"),
        ({"chat_template_args": {"self": 1}}, "chat_template_args.self"),
        ({"chat_template_args": {"a": 1}, "chat_template_kwargs": {"a": 2}}, "chat_template_args"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {}}, "thinking.type"),
        ({"nvext": {"no_such": 1}}, "nvext.no_such"),
        ({"nvext": {"agent_hints": {"no_such": 1}}}, "nvext.agent_hints.no_such"),
    ],
)
def test_chats_that_contradict_themselves(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat(chat(**fields))
    assert caught.value.fields["param"] == param


@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"functions": []}, "functions"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": "auto"}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"chat_template": "x"}, "chat_template"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ],
)
def test_chats_for_which_there_is_no_mechanism(fields: dict[str, Any], feature: str) -> None:
    with pytest.raises(Unsupported) as caught:
        parse_chat(chat(**fields))
    assert caught.value.fields["feature"] == feature
    assert caught.value.fields["param"] in {*fields, "thinking.budget_tokens"}


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 4, "temperature": 0},
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"max_tokens": 5, "min_tokens": 5},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {"stream": True, "stream_options": {"include_usage": None, "include_obfuscation": False}},
        {"logprobs": True, "top_logprobs": 20},
        {"chat_template_args": {"a": 1}, "chat_template_kwargs": {"a": 1}},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"thinking": {"type": "enabled"}},
        {"modalities": ["text"]},
        {"parallel_tool_calls": False},
        {"tools": []},
    ],
)
def test_chats_that_may_be_asked(fields: dict[str, Any]) -> None:
    assert parse_chat(chat(**fields)).unknown == ()


def test_the_error_of_best_of_names_the_condition() -> None:
    with pytest.raises(Unsupported, match="best_of must equal n: best_of is 3, n is 2"):
        parse_completion(completion(best_of=3, n=2))


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"best_of": 2, "stream": True}, InvalidRequest, "best_of"),
        ({"best_of": 2, "n": 2, "stream": True}, InvalidRequest, "best_of"),
        ({"best_of": 2, "n": 3}, InvalidRequest, "best_of"),
        ({"best_of": 3}, Unsupported, "best_of"),
        ({"best_of": 3, "n": 2}, Unsupported, "best_of"),
        ({"suffix": "x"}, Unsupported, "suffix"),
        ({"prompt": ["a"] * 65, "n": 2}, InvalidRequest, "prompt"),
        ({"prompt": [[1]] * 129}, InvalidRequest, "prompt"),
        ({"stream_options": {"include_usage": True}}, InvalidRequest, "stream_options"),
        ({"min_tokens": 17, "max_tokens": 16}, InvalidRequest, "min_tokens"),
    ],
)
def test_completions_that_cannot_be(fields: dict[str, Any], error: type[Exception], param: str) -> None:
    with pytest.raises(error) as caught:
        parse_completion(completion(**fields))
    assert caught.value.fields["param"] == param  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 1, "stream": True},
        {"best_of": 3, "n": 3},
        {"prompt": ["a"] * 64, "n": 2},
        {"prompt": list(range(1000)), "n": 128},
        {"prompt": "x", "n": 128},
    ],
)
def test_completions_that_may_be_asked(fields: dict[str, Any]) -> None:
    parse_completion(completion(**fields))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"99": 1, "100": 1}}, "logit_bias"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"allowed_token_ids": [5, 4000000000]}, "allowed_token_ids"),
        ({"prompt": [1, 100]}, "prompt"),
        ({"prompt": [[1], [2, 100, 3]]}, "prompt[1]"),
    ],
)
def test_ids_over_the_vocabulary(fields: dict[str, Any], param: str) -> None:
    request = parse_completion(completion(**fields)).request
    with pytest.raises(InvalidRequest, match=r"ends at 99") as caught:
        check_vocabulary(request, 100)
    assert caught.value.fields["param"] == param
    check_vocabulary(request, 2**32)


def test_ids_within_the_vocabulary() -> None:
    check_vocabulary(
        parse_completion(completion(prompt=["a"], logit_bias={"99": 1}, stop_token_ids=[])).request, 100
    )
    check_vocabulary(parse_chat(chat(logit_bias={"99": 1}, allowed_token_ids=[0])).request, 100)
    check_vocabulary(parse_detokenize(b'{"tokens":[]}').request, 100)
    with pytest.raises(InvalidRequest):
        check_vocabulary(parse_detokenize(b'{"tokens":[100]}').request, 100)
