"""litellm: its `openai/` provider, with nothing but the address told."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tests.compat.sdk.server import WEATHER, Server, ask, call, occupied, say
from tests.integration.processes import MODEL

PARIS = '{"city": "Paris"}'

pytestmark = pytest.mark.filterwarnings("ignore")  # litellm uses what its own libraries call deprecated


@pytest.fixture
def given(server: Server) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": server.api, "api_key": "any", "max_retries": 0}


def test_chat(litellm: Any, given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, messages=say("Hello."))
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == len("Hello.") + 1
    assert answer.model == MODEL


def test_stream(litellm: Any, given: dict[str, Any]) -> None:
    messages = say("Hello 東京.")
    whole = litellm.completion(**given, messages=messages)
    chunks = list(
        litellm.completion(**given, messages=messages, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Hello 東京."
    built = litellm.stream_chunk_builder(chunks)
    assert built is not None
    assert built.choices[0].message.content == "Hello 東京."
    assert built.choices[0].finish_reason == "stop"
    assert built.usage.completion_tokens == whole.usage.completion_tokens
    assert built.usage.prompt_tokens == whole.usage.prompt_tokens


async def test_async(litellm: Any, given: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**given, messages=say("Hello."))
    assert answer.choices[0].message.content == "Hello."
    stream = await litellm.acompletion(**given, messages=say("Hello."), stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "Hello."


def test_reasoning(litellm: Any, given: dict[str, Any]) -> None:
    messages = say("<think>\nwhy\n</think>\n\nbecause")
    answer = litellm.completion(**given, messages=messages)
    assert answer.choices[0].message.reasoning_content.strip() == "why"
    assert answer.choices[0].message.content.strip() == "because"
    deltas = [chunk.choices[0].delta for chunk in litellm.completion(**given, messages=messages, stream=True)]
    thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
    assert thoughts == answer.choices[0].message.reasoning_content


def test_tools(litellm: Any, given: dict[str, Any]) -> None:
    messages = say(call("get_weather", PARIS))
    answer = litellm.completion(**given, messages=messages, tools=[WEATHER])
    assert answer.choices[0].finish_reason == "tool_calls"
    [made] = answer.choices[0].message.tool_calls
    assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", json.loads(PARIS))
    built = litellm.stream_chunk_builder(
        list(litellm.completion(**given, messages=messages, tools=[WEATHER], stream=True))
    )
    assert built is not None
    assert built.choices[0].finish_reason == "tool_calls"
    [streamed] = built.choices[0].message.tool_calls
    assert streamed.function.arguments == made.function.arguments
    result = {"role": "tool", "tool_call_id": made.id, "content": "<say>Sunny.</say>"}
    history = [*messages, answer.choices[0].message.model_dump(), result]
    answer = litellm.completion(**given, messages=history, tools=[WEATHER])
    assert answer.choices[0].message.content == "Sunny."


def test_logprobs_and_choices(litellm: Any, given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, messages=say("ab", "c"), n=2, logprobs=True, top_logprobs=2)
    assert [choice.message.content for choice in answer.choices] == ["ab", "c"]
    entries = answer.choices[0].logprobs.content
    assert [entry.token for entry in entries] == ["a", "b"]
    assert [len(entry.top_logprobs) for entry in entries] == [2, 2]


def test_text_completion(litellm: Any, given: dict[str, Any]) -> None:
    given["model"] = f"text-completion-openai/{MODEL}"
    answer = litellm.text_completion(**given, prompt="<say>Hello.</say>")
    assert answer.choices[0].text == "Hello."
    chunks = litellm.text_completion(**given, prompt="<say>Hello.</say>", stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == "Hello."


@pytest.mark.parametrize(
    ("more", "kind", "status"),
    [
        ({"temperature": 9}, "BadRequestError", 400),
        ({"messages": ask("x " * 40_000)}, "ContextWindowExceededError", 400),
        ({"model": "openai/nobody"}, "NotFoundError", 404),
        ({"response_format": {"type": "json_object"}}, "APIError", 501),
        (
            {"messages": ask("a story " * 8_000), "extra_headers": {"x-kvolt-timeout-ms": "1"}},
            "Timeout",
            504,
        ),
    ],
    ids=["wrong", "too long", "no model", "no grammar", "no time"],
)
def test_errors(litellm: Any, given: dict[str, Any], more: dict[str, Any], kind: str, status: int) -> None:
    with pytest.raises(getattr(litellm, kind)) as caught:
        litellm.completion(**{**given, "messages": say("x"), **more})
    assert getattr(caught.value, "status_code", None) == status


def test_too_many_at_once(litellm: Any, server: Server, given: dict[str, Any], narrow: openai.OpenAI) -> None:
    given["api_base"] = server.narrow_api
    with occupied(narrow), pytest.raises(litellm.RateLimitError):
        litellm.completion(**given, messages=say("x"))


def test_a_stream_that_meets_its_deadline_ends_with_length(litellm: Any, given: dict[str, Any]) -> None:
    headers = {"x-kvolt-timeout-ms": "800"}
    chunks = list(litellm.completion(**given, messages=ask(), stream=True, extra_headers=headers))
    assert any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "length"
