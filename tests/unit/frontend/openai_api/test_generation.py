"""What a request comes to, with the model's defaults filled in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.errors import ConfigError, InvalidRequest, PayloadTooLarge, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Sampling
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion
from kvolt.frontend.openai_api.generation import (
    GenerationOptions,
    chat_options,
    completion_options,
    generation_defaults,
    list_prompts,
    with_client_param,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "f"}}
JSON = {"type": "json_object"}


def chat(defaults: Sampling | None = None, **fields: Any) -> GenerationOptions:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = parse_chat(json.dumps(body).encode()).request
    return chat_options(request) if defaults is None else chat_options(request, defaults)


def completion(**fields: Any) -> GenerationOptions:
    request = parse_completion(json.dumps({"model": "m", "prompt": "hi", **fields}).encode()).request
    return completion_options(request)


def test_a_plain_request_is_all_defaults() -> None:
    assert chat() == completion() == GenerationOptions(sampling=Sampling())


SAMPLING_CASES = [
    ("temperature", 0, "temperature", 0.0),
    ("top_p", 0.5, "top_p", 0.5),
    ("top_k", 7, "top_k", 7),
    ("top_k", 0, "top_k", None),
    ("top_k", -1, "top_k", None),
    ("min_p", 0.1, "min_p", 0.1),
    ("presence_penalty", -1, "presence_penalty", -1.0),
    ("frequency_penalty", 1, "frequency_penalty", 1.0),
    ("repetition_penalty", 1.5, "repetition_penalty", 1.5),
    ("logit_bias", {"5": -100}, "logit_bias", {5: -100.0}),
    ("allowed_token_ids", [3, 4], "allowed_token_ids", (3, 4)),
    ("seed", -5, "seed", -5),
    ("n", 3, "num_choices", 3),
    ("prompt_logprobs", 2, "prompt_logprobs", 2),
    ("nvext", {"greed_sampling": True}, "temperature", 0.0),
]


@pytest.mark.parametrize(("field", "value", "name", "expected"), SAMPLING_CASES)
def test_sampling(field: str, value: Any, name: str, expected: Any) -> None:
    for options in (chat(**{field: value}), completion(**{field: value})):
        assert getattr(options.sampling, name) == expected


def test_every_sampling_field_has_a_case() -> None:
    """A field that the request schema accepts and no case maps would be ignored in silence."""
    tested = {name for _, _, name, _ in SAMPLING_CASES} | {"logprobs"}
    assert tested == set(Sampling.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "name", "expected"),
    [
        ({"max_tokens": 5}, "max_tokens", 5),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"stop": "a"}, "stop", ("a",)),
        ({"stop": ["b", "a", "b"]}, "stop", ("b", "a")),
        ({"stop": []}, "stop", ()),
        ({"stop": [str(number) for number in range(32)]}, "stop", tuple(map(str, range(32)))),
        ({"stop_token_ids": [7]}, "stop_token_ids", (7,)),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"include_stop_str_in_output": True}, "include_stop", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({"guided_regex": "a"}, "grammar", Grammar(GrammarKind.REGEX, "a")),
    ],
)
def test_options(fields: dict[str, Any], name: str, expected: Any) -> None:
    assert getattr(chat(**fields), name) == expected
    assert getattr(completion(**fields), name) == expected


def test_max_completion_tokens_is_the_same_limit() -> None:
    assert chat(max_completion_tokens=7).max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_chats(fields: dict[str, Any], expected: int | None) -> None:
    assert chat(**fields).sampling.logprobs == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (None, None)),
        ({"logprobs": 0}, (0, None)),
        ({"logprobs": 5}, (5, None)),
        ({"logprobs": 5, "echo": True}, (5, 5)),
        ({"logprobs": 5, "echo": True, "prompt_logprobs": 1}, (5, 1)),
        ({"echo": True}, (None, None)),
    ],
)
def test_logprobs_of_completions(fields: dict[str, Any], expected: tuple[int | None, int | None]) -> None:
    sampling = completion(**fields).sampling
    assert (sampling.logprobs, sampling.prompt_logprobs) == expected


def test_the_models_defaults_hold_where_a_request_is_silent() -> None:
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.05}
    defaults = generation_defaults({**values, "max_tokens": 9})
    assert chat(defaults).sampling == chat(defaults, **dict.fromkeys(values)).sampling == Sampling(**values)
    mine = chat(defaults, temperature=0, top_k=0).sampling
    assert (mine.temperature, mine.top_k, mine.top_p) == (0.0, None, 0.95)


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_k": 1.5}])
def test_defaults_that_are_no_sampling(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        generation_defaults(values)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("x", ["x"]),
        (["x", "y"], ["x", "y"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ([7], [[7]]),
    ],
)
def test_prompts(prompt: Any, expected: Any) -> None:
    request = parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).request
    assert list_prompts(request) == expected


def test_tools_and_their_choice() -> None:
    assert (chat(tools=[TOOL]).tool_choice, len(chat(tools=[TOOL]).tools)) == ("auto", 1)
    none = chat(tools=[TOOL], tool_choice="none")
    assert (none.tool_choice, none.tools, none.grammar) == ("none", (), None)
    named = chat(tools=[TOOL], tool_choice=NAMED)
    assert named.tool_choice == "f"
    assert named.grammar == Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{}}')
    one = chat(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert one.grammar is not None
    assert '"maxItems":1' in one.grammar.text
    assert not one.parallel_tool_calls
    assert chat(tools=[TOOL], parallel_tool_calls=None).parallel_tool_calls


def test_a_demanded_call_beats_the_response_format() -> None:
    for choice in ("required", NAMED):
        options = chat(tools=[TOOL], tool_choice=choice, response_format=JSON)
        assert options.grammar == chat(tools=[TOOL], tool_choice=choice).grammar
    assert chat(tools=[TOOL], tool_choice="none", response_format=JSON).grammar == Grammar(
        GrammarKind.JSON_OBJECT, ""
    )


def test_what_cannot_hold_together() -> None:
    with pytest.raises(Unsupported) as caught:
        chat(tools=[TOOL], response_format=JSON)
    assert caught.value.fields["feature"] == "response_format_with_tools"
    with pytest.raises(InvalidRequest, match="another constraint"):
        chat(tools=[TOOL], tool_choice="required", guided_regex="a")
    with pytest.raises(InvalidRequest, match="requires tools"):
        chat(tool_choice="required")
    assert chat(tools=[TOOL], guided_regex="a").grammar == Grammar(GrammarKind.REGEX, "a")


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"response_format": JSON}, "grammar", "response_format"),
        ({"guided_regex": "a"}, "grammar", "guided_regex"),
        ({"structured_outputs": {"regex": "a"}}, "grammar", "structured_outputs.regex"),
        ({"tools": [TOOL], "tool_choice": "required"}, "grammar", "tools"),
        ({"tools": [TOOL], "tool_choice": NAMED}, "grammar", "tools"),
        ({}, "token_ids", "messages"),
        ({}, "max_tokens", "max_tokens"),
        ({}, None, None),
    ],
)
def test_a_workers_refusal_names_what_the_client_sent(
    fields: dict[str, Any], param: str | None, told: str | None
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    request = parse_chat(json.dumps(body).encode()).request
    error = PayloadTooLarge("too much", param=param, limit_bytes=3)
    worded = with_client_param(error, request, chat_options(request))
    assert (type(worded), worded.message) == (PayloadTooLarge, "too much")
    assert worded.fields == {"param": told, "limit_bytes": 3}


def test_a_workers_refusal_of_a_completion() -> None:
    request = parse_completion(b'{"model": "m", "prompt": "hi"}').request
    error = InvalidRequest("no", param="token_ids")
    assert with_client_param(error, request, completion_options(request)).fields == {"param": "prompt"}
