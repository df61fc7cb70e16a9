"""Bodies as well-known clients send them: all are understood, and none of their fields is unknown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvolt.core.request import GrammarKind
from kvolt.frontend.openai_api.checks import parse_chat, parse_completion
from kvolt.frontend.openai_api.generation import (
    GenerationOptions,
    chat_options,
    completion_options,
    list_prompts,
)
from kvolt.frontend.openai_api.requests import ChatRequest, CompletionRequest
from kvolt.frontend.openai_api.templating import build_template_input

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current temperature for a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "location": {"type": "string", "description": "City and country"},
                "unit": {"type": ["string", "null"], "enum": ["celsius", "fahrenheit", None]},
            },
            "required": ["location", "unit"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}

PYDANTIC_TOOL = {
    "type": "function",
    "function": {
        "name": "Query",
        "strict": True,
        "parameters": {
            "$defs": {
                "Column": {"enum": ["id", "status"], "title": "Column", "type": "string"},
                "Condition": {
                    "properties": {
                        "column": {"$ref": "#/$defs/Column"},
                        "value": {"anyOf": [{"type": "string"}, {"type": "integer"}], "title": "Value"},
                    },
                    "required": ["column", "value"],
                    "title": "Condition",
                    "type": "object",
                    "additionalProperties": False,
                },
            },
            "properties": {
                "conditions": {
                    "items": {"$ref": "#/$defs/Condition"},
                    "title": "Conditions",
                    "type": "array",
                },
                "order_by": {"$ref": "#/$defs/Column"},
            },
            "required": ["conditions", "order_by"],
            "title": "Query",
            "type": "object",
            "additionalProperties": False,
        },
    },
}

CALENDAR = {
    "$defs": {
        "Person": {
            "properties": {"name": {"title": "Name", "type": "string"}},
            "required": ["name"],
            "title": "Person",
            "type": "object",
            "additionalProperties": False,
        }
    },
    "properties": {
        "name": {"title": "Name", "type": "string"},
        "date": {"format": "date", "title": "Date", "type": "string"},
        "participants": {"items": {"$ref": "#/$defs/Person"}, "title": "Participants", "type": "array"},
    },
    "required": ["name", "date", "participants"],
    "title": "CalendarEvent",
    "type": "object",
    "additionalProperties": False,
}


def call(number: int, city: str) -> dict[str, Any]:
    arguments = json.dumps({"location": city, "unit": None})
    return {
        "id": f"call_{number}",
        "function": {"arguments": arguments, "name": "get_weather"},
        "type": "function",
    }


OPENAI_TURN_AFTER_PARALLEL_CALLS = {
    "messages": [
        {"role": "developer", "content": "You are a helpful assistant."},
        {"role": "user", "content": "What is the weather in Paris and Bogotá?"},
        {
            "content": None,
            "refusal": None,
            "role": "assistant",
            "annotations": [],
            "audio": None,
            "function_call": None,
            "tool_calls": [call(1, "Paris, France"), call(2, "Bogotá, Colombia")],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "14"},
        {"role": "tool", "tool_call_id": "call_2", "content": "18"},
    ],
    "model": "gpt-4.1",
    "parallel_tool_calls": True,
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "tools": [WEATHER],
}

OPENAI_PARSE = {
    "messages": [
        {"role": "system", "content": "Extract the event."},
        {"role": "user", "content": "Alice and Bob go to a science fair on Friday."},
    ],
    "model": "gpt-4o-2024-08-06",
    "response_format": {
        "type": "json_schema",
        "json_schema": {"schema": CALENDAR, "name": "CalendarEvent", "strict": True},
    },
    "stream": False,
}

OPENAI_EVERYTHING = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "bob"}],
    "model": "gpt-4o",
    "frequency_penalty": 0,
    "logit_bias": {"50256": -100},
    "logprobs": True,
    "max_completion_tokens": 2048,
    "metadata": {"trace": "1"},
    "modalities": ["text"],
    "n": 1,
    "prediction": {"type": "content", "content": "code"},
    "presence_penalty": 0,
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "reasoning_effort": "medium",
    "response_format": {"type": "text"},
    "safety_identifier": "s",
    "seed": 42,
    "service_tier": "auto",
    "stop": None,
    "store": False,
    "temperature": 1,
    "top_logprobs": 5,
    "top_p": 1,
    "user": "u",
    "verbosity": "medium",
}

LANGCHAIN_STRUCTURED = {
    "messages": [{"content": "Who wrote Faust?", "role": "user"}],
    "model": "qwen",
    "parallel_tool_calls": False,
    "stream": False,
    "temperature": 0.0,
    "tool_choice": {"type": "function", "function": {"name": "Query"}},
    "tools": [PYDANTIC_TOOL],
}

LANGCHAIN_AGENT = {
    "messages": [
        {"content": "You are an agent.", "role": "system"},
        {"content": "weather?", "role": "user"},
        {
            "content": None,
            "role": "assistant",
            "tool_calls": [
                {
                    "type": "function",
                    "id": "call_x",
                    "function": {
                        "name": "get_weather",
                        "arguments": '{"location": "Rome", "unit": "celsius"}',
                    },
                }
            ],
        },
        {"content": '{"temperature": 21}', "role": "tool", "tool_call_id": "call_x"},
    ],
    "model": "qwen",
    "stream": True,
    "tool_choice": "required",
    "tools": [WEATHER, PYDANTIC_TOOL],
}

LITELLM = {
    "model": "llama",
    "messages": [
        {
            "role": "system",
            "content": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        },
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "hello",
            "tool_calls": None,
            "function_call": None,
            "reasoning_content": "greet back",
            "provider_specific_fields": {"refusal": None},
        },
        {"role": "user", "content": "again"},
    ],
    "temperature": 0.2,
    "max_tokens": 10,
    "stream": True,
    "stream_options": {"include_usage": True},
    "top_k": 20,
    "chat_template_kwargs": {"enable_thinking": False},
}

DYNAMO_BENCH = {
    "messages": [{"role": "user", "content": "words " * 200}],
    "model": "qwen",
    "stream": True,
    "max_completion_tokens": 100,
    "min_tokens": 100,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
    "nvext": {
        "annotations": ["request_id"],
        "extra_fields": ["worker_id", "timing"],
        "agent_hints": {"osl": 100},
    },
}

CHATS = {
    "openai-parallel": OPENAI_TURN_AFTER_PARALLEL_CALLS,
    "openai-parse": OPENAI_PARSE,
    "openai-everything": OPENAI_EVERYTHING,
    "langchain-structured": LANGCHAIN_STRUCTURED,
    "langchain-agent": LANGCHAIN_AGENT,
    "litellm": LITELLM,
    "dynamo-bench": DYNAMO_BENCH,
}


def chat(body: dict[str, Any]) -> tuple[ChatRequest, GenerationOptions]:
    parsed = parse_chat(json.dumps(body).encode())
    assert parsed.unknown == ()
    return parsed.request, chat_options(parsed.request)


@pytest.mark.parametrize("name", CHATS)
def test_chats_of_real_clients(name: str) -> None:
    request, options = chat(CHATS[name])
    given = build_template_input(request, options.tools)
    assert len(given.messages) == len(CHATS[name]["messages"])
    json.dumps(given)  # plain values only: what a template's tojson can print


def test_the_turn_after_parallel_calls() -> None:
    request, options = chat(OPENAI_TURN_AFTER_PARALLEL_CALLS)
    messages = build_template_input(request, options.tools).messages
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool", "tool"]
    cities = [call["function"]["arguments"]["location"] for call in messages[2]["tool_calls"]]
    assert cities == ["Paris, France", "Bogotá, Colombia"]
    assert [message.get("tool_call_id") for message in messages[3:]] == ["call_1", "call_2"]
    assert (options.tool_choice, options.grammar) == ("auto", None)


def test_a_pydantic_model_as_response_format() -> None:
    _, options = chat(OPENAI_PARSE)
    assert options.grammar is not None
    assert options.grammar.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(options.grammar.text) == CALENDAR


def test_a_pydantic_model_as_a_tool() -> None:
    _, options = chat(LANGCHAIN_STRUCTURED)
    assert options.tool_choice == "Query"
    assert options.grammar is not None
    assert json.loads(options.grammar.text) == PYDANTIC_TOOL["function"]["parameters"]  # type: ignore[index]
    _, options = chat(LANGCHAIN_AGENT)
    assert options.grammar is not None
    definitions = json.loads(options.grammar.text)["$defs"]["Query"]["$defs"]
    assert definitions["Condition"]["properties"]["column"] == {"$ref": "#/$defs/Query/$defs/Column"}


def test_logprobs_and_bias_of_the_openai_sdk() -> None:
    _, options = chat(OPENAI_EVERYTHING)
    assert options.sampling.logprobs == 5
    assert options.sampling.logit_bias == {50256: -100.0}
    assert (options.sampling.seed, options.max_tokens) == (42, 2048)


VLLM_BENCH = {
    "model": "m",
    "prompt": "once",
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 128,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}
LM_EVAL = {
    "prompt": [[1, 2, 3], [4, 5]],
    "model": "m",
    "max_tokens": 1,
    "logprobs": 1,
    "seed": 1234,
    "echo": True,
    "temperature": 0,
}
OPENAI_COMPLETION = {
    "model": "m",
    "prompt": ["a", "b"],
    "best_of": 1,
    "n": 1,
    "suffix": None,
    "stop": ["\n"],
    "user": "",
}


def completion(body: dict[str, Any]) -> tuple[CompletionRequest, GenerationOptions]:
    parsed = parse_completion(json.dumps(body).encode())
    assert parsed.unknown == ()
    return parsed.request, completion_options(parsed.request)


def test_completions_of_real_clients() -> None:
    request, options = completion(VLLM_BENCH)
    assert (list_prompts(request), options.ignore_eos, options.max_tokens) == (["once"], True, 128)
    request, options = completion(LM_EVAL)
    assert list_prompts(request) == [[1, 2, 3], [4, 5]]
    assert options.sampling.prompt_logprobs == 1
    request, options = completion(OPENAI_COMPLETION)
    assert (list_prompts(request), options.stop) == (["a", "b"], ("\n",))


def test_chat_fields_in_a_completion_are_reported() -> None:
    body = {"model": "m", "prompt": "x", "max_completion_tokens": 5, "features": {}, "messages": []}
    assert parse_completion(json.dumps(body).encode()).unknown == (
        "max_completion_tokens",
        "features",
        "messages",
    )
