"""Fields of the requests: what each may be, and which name a refusal carries."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvolt.core.errors import InvalidRequest, KvoltError, Unsupported
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

USER = {"role": "user", "content": "hi"}


def chat(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [USER], **fields}).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": "hi", **fields}).encode()


def refusal(parse: Callable[[bytes], Any], body: bytes) -> KvoltError:
    with pytest.raises((InvalidRequest, Unsupported)) as caught:
        parse(body)
    assert caught.value.message
    return caught.value


BOTH: list[tuple[str, list[Any], list[Any]]] = [
    (
        "vllm_xargs",
        [{}, {"a": "b", "c": 1, "d": 0.5, "e": ["x", 2, 0.5]}],
        [{"a": True}, {"a": {}}, {"a": [[1]]}, [], "x"],
    ),
    ("temperature", [0, 0.0, 1, 2, 2.0], [-0.001, 2.001, -1, 1e300, "1", True]),
    ("top_p", [0.001, 0.5, 1], [0, -0.1, 1.0001, "x"]),
    ("top_k", [-1, 0, 1, 50, 2**31 - 1], [-2, 1.0, 2**31, "1"]),
    ("min_p", [0, 0.5, 1], [-0.1, 1.1]),
    ("frequency_penalty", [-2, 0, 2], [-2.1, 2.1]),
    ("presence_penalty", [-2, 0, 2], [-2.1, 2.1]),
    ("repetition_penalty", [0.01, 1, 2], [0, 1e-9, -1, 2.1]),
    ("n", [1, 128], [0, -1, 129, 1.0, True]),
    ("max_tokens", [1, 2**20], [0, -1, 2**20 + 1, 10**30, 1.5, "5", True]),
    ("min_tokens", [0, 5], [-1, 2**20 + 1]),
    ("seed", [0, -(2**63), 2**63 - 1], [2**63, -(2**63) - 1, 0.5, "1"]),
    ("stop", ["a", ["a"], [], ["a"] * 32, None], ["", ["a"] * 33, [1], 3, "x" * 1025]),
    ("stop_token_ids", [[], [0, 5]], [[-1], [2**32], ["a"], 3, [1.0]]),
    ("allowed_token_ids", [[0], [1, 2]], [[], [-1], [2**32]]),
    ("logit_bias", [{}, {"5": 1}, {"5": -100, "7": 100}], [{"5": 100.1}, {"5": -101}, {"5": "x"}, [1]]),
    ("logit_bias", [{"0": 0}], [{"a": 1}, {"-1": 1}, {"1.5": 1}, {" 1": 1}, {str(2**32): 1}]),
    ("stream", [True, False, None], ["yes", 1, {}]),
    ("ignore_eos", [True, False], [1, "no"]),
    ("include_stop_str_in_output", [True], ["x"]),
    ("skip_special_tokens", [False], [0]),
    ("return_tokens_as_token_ids", [True], [1]),
    ("prompt_logprobs", [0, 20], [-1, 21, True]),
    ("cache_salt", ["tenant"], ["", 3, "a\nb", "x" * 1025]),
    ("priority", [0, -5, 2**31 - 1], [2**31, 1.0]),
    ("model", ["m", "a/b", None], ["", 3]),
    ("user", ["u"], [3]),
    ("metadata", [{"a": "b", "n": 1, "none": None}], ["x", {"a": []}]),
    ("store", [True], ["x"]),
    ("guided_decoding_backend", ["xgrammar"], [3]),
]


@pytest.mark.parametrize(("name", "good", "bad"), BOTH)
def test_fields_of_both(name: str, good: list[Any], bad: list[Any]) -> None:
    for parse, body in ((parse_completion, completion), (parse_chat, chat)):
        for value in good:
            parsed = parse(body(**{name: value}))
            seen = getattr(parsed.request, name)
            if name == "logit_bias":
                seen = {str(key): weight for key, weight in seen.items()}
            assert seen == value
            assert parsed.unknown == ()
        for value in bad:
            param = refusal(parse, body(**{name: value})).fields["param"]
            assert isinstance(param, str)
            assert param.split("[")[0] == name


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_completion_tokens", [1, 2**20], [0, 2**20 + 1]),
        ("logprobs", [True, False], [1, 0, "yes"]),
        ("tool_choice", ["none", "auto"], [3]),
        ("parallel_tool_calls", [True, False], ["no"]),
        ("reasoning_effort", ["none", "minimal", "low", "medium", "high", "xhigh"], ["huge", 3]),
        ("verbosity", ["low"], ["loud"]),
        ("thinking", [True, False], ["yes", 3]),
        ("chat_template_kwargs", [{"enable_thinking": False}], [3, ["x"]]),
        ("documents", [[{"title": "t", "text": "x"}]], ["x", {}]),
        ("modalities", [["text"], []], ["text"]),
        ("prediction", [None], ["x", 3]),
        ("audio", [None], ["x"]),
    ],
)
def test_fields_of_chats(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(parse_chat(chat(**{name: value})).request, name) == value
    for value in bad:
        assert refusal(parse_chat, chat(**{name: value})).fields["param"] == name


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("prompt", ["", "hi", ["a", "b"], [1, 2], [[1], [2, 3]]], []),
        ("logprobs", [0, 5, 20], [-1, 21, True]),
        ("echo", [True], ["x"]),
        ("best_of", [1], [0, 21]),
        ("suffix", ["", None], [3]),
    ],
)
def test_fields_of_completions(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        assert getattr(parse_completion(completion(**{name: value})).request, name) == value
    for value in bad:
        assert refusal(parse_completion, completion(**{name: value})).fields["param"] == name


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        (3, "prompt"),
        ({}, "prompt"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([[1], []], "prompt[1]"),
        ([1, "x"], "prompt"),
        (["x", 1], "prompt"),
        ([[1], "x"], "prompt"),
        ([[1], ["x"]], "prompt[1][0]"),
        ([-1], "prompt[0]"),
        ([2**32], "prompt[0]"),
        ([True], "prompt[0]"),
        ([1.0], "prompt[0]"),
        ([None], "prompt[0]"),
        (["x"] * 129, "prompt"),
    ],
)
def test_wrong_prompts(prompt: Any, param: str) -> None:
    assert refusal(parse_completion, completion(prompt=prompt)).fields["param"] == param


def test_a_prompt_is_required() -> None:
    body = json.dumps({"model": "m"}).encode()
    error = refusal(parse_completion, body)
    assert (error.message, error.fields["param"]) == ("prompt is required", "prompt")


@pytest.mark.parametrize("prompt", [None, "", [""]])
@pytest.mark.parametrize("embeds", ["AAAA", ["AAAA", "BBBB"]])
def test_vectors_in_the_place_of_a_prompt(prompt: Any, embeds: Any) -> None:
    assert parse_completion(completion(prompt=prompt, prompt_embeds=embeds)).request.prompt_embeds == embeds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "hi"}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"nvext": {"token_data": [1]}}, "nvext.token_data"),
        ({"prompt_embeds": []}, "prompt_embeds"),
        ({"prompt_embeds": [""]}, "prompt_embeds[0]"),
        ({"prompt_embeds": 7}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"] * 64, "n": 3}, "prompt_embeds"),
        ({"prompt_embeds": ["AAAA"] * 65}, "prompt_embeds"),
    ],
)
def test_what_does_not_go_with_vectors(fields: dict[str, Any], param: str) -> None:
    body = completion(**{"prompt": "", "prompt_embeds": "AAAA"} | fields)
    assert refusal(parse_completion, body).fields["param"] == param


def test_null_is_the_same_as_nothing() -> None:
    for kind, parse, body in (
        (CompletionRequest, parse_completion, completion),
        (ChatRequest, parse_chat, chat),
    ):
        required = {field.encode_name for field in msgspec.structs.fields(kind) if field.required}
        required |= {"prompt", "model"}  # which `body` sets
        nulls = {name: None for name in kind.__struct_encode_fields__ if name not in required}
        assert len(nulls) > 30
        assert parse(body(**nulls)).request == parse(body()).request


def test_every_default_is_none() -> None:
    """A plain request says nothing of its own, so that the model's defaults can speak."""
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        assert {field.default for field in msgspec.structs.fields(kind) if not field.required} <= {None}


def test_a_missing_field_is_named() -> None:
    error = refusal(parse_completion, json.dumps({"model": "m"}).encode())
    assert (error.message, error.fields["param"]) == ("prompt is required", "prompt")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": [USER]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"prompt": ["a"]}, "prompt"),
        (
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": [USER], "chat_template": "{{ messages }}"}, "chat_template"),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_cannot_be_tokenized(body: dict[str, Any], param: str) -> None:
    assert refusal(parse_tokenize, json.dumps(body).encode()).fields["param"] == param


def test_tokenize_takes_a_prompt_or_messages() -> None:
    asked = parse_tokenize(b'{"prompt":"hi","add_special_tokens":false,"return_token_strs":true}').request
    assert (asked.prompt, asked.add_special_tokens, asked.return_token_strs) == ("hi", False, True)
    parsed = parse_tokenize(json.dumps({"model": "m", "messages": [USER], "new": 1}).encode())
    assert parsed.request.messages is not None
    assert parsed.unknown == ("new",)


@pytest.mark.parametrize("tokens", [None, 3, "x", [1.0], ["1"], [-1], [2**32], [[1]]])
def test_detokenize_takes_ids_only(tokens: Any) -> None:
    param = refusal(parse_detokenize, json.dumps({"tokens": tokens}).encode()).fields["param"]
    assert str(param).startswith("tokens")


def test_detokenize() -> None:
    assert parse_detokenize(b'{"model":"m","tokens":[1,2]}').request.tokens == [1, 2]
    assert parse_detokenize(b'{"tokens":[]}').request.tokens == []


def test_the_types_make_a_schema_for_the_docs() -> None:
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        schema = msgspec.json.schema(kind)
        assert set(schema["$defs"][kind.__name__]["properties"]) == set(kind.__struct_encode_fields__)
