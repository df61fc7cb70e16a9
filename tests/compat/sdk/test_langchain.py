"""langchain-openai: ChatOpenAI and OpenAI against kvolt."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, SecretStr
from tests.compat.sdk.server import Server, call, say
from tests.integration.processes import MODEL

PARIS = '{"city": "Paris"}'


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"<say>Sunny in {city}.</say>"


class Weather(BaseModel):
    """The weather in a city."""

    city: str
    days: int


@pytest.fixture
def model(server: Server) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=server.api, api_key=SecretStr("any"), max_retries=0)


def test_invoke(model: ChatOpenAI) -> None:
    answer = model.invoke([SystemMessage("Be brief."), HumanMessage("<say>Hello.</say>")])
    assert answer.content == "Hello."
    assert isinstance(answer, AIMessage)
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.response_metadata["model_name"] == MODEL
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len("Hello.") + 1


def test_stream(model: ChatOpenAI) -> None:
    whole = model.invoke("<say>Hello 東京.</say>")
    chunks = list(model.stream("<say>Hello 東京.</say>", stream_usage=True))
    assert len(chunks) > 5
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    assert total.content == "Hello 東京."
    assert isinstance(whole, AIMessage)
    told, before = dict(total.usage_metadata or {}), dict(whole.usage_metadata or {})
    del told["input_token_details"], before["input_token_details"]  # the second finds more of it in a cache
    assert told == before
    assert total.response_metadata["finish_reason"] == "stop"


async def test_async(model: ChatOpenAI) -> None:
    answer = await model.ainvoke("<say>Hello.</say>")
    assert answer.content == "Hello."
    assert "".join([str(chunk.content) async for chunk in model.astream("<say>Hello.</say>")]) == "Hello."
    answers = await model.abatch([f"<say>{number}</say>" for number in range(8)])
    assert [answer.content for answer in answers] == [str(number) for number in range(8)]


def test_tools(model: ChatOpenAI) -> None:
    bound = model.bind_tools([get_weather])
    messages: list[Any] = [HumanMessage(f"<say>{call('get_weather', PARIS)}</say>")]
    answer = bound.invoke(messages)
    assert isinstance(answer, AIMessage)
    [made] = answer.tool_calls
    assert (made["name"], made["args"]) == ("get_weather", json.loads(PARIS))
    assert answer.invalid_tool_calls == []
    total: Any = None
    for chunk in bound.stream(messages):
        total = chunk if total is None else total + chunk
    assert [(streamed["name"], streamed["args"]) for streamed in total.tool_calls] == [
        (made["name"], made["args"])
    ]
    result = get_weather.invoke(made)
    assert isinstance(result, ToolMessage)
    answer = bound.invoke([*messages, answer, result])
    assert answer.content == "Sunny in Paris."


def test_structured_output_by_a_tool(model: ChatOpenAI) -> None:
    """langchain names the tool that it wants called; that needs a grammar, which the simulated engine has not."""
    structured = model.with_structured_output(Weather, method="function_calling")
    with pytest.raises(openai.InternalServerError) as caught:
        structured.invoke("<say>x</say>")
    assert caught.value.status_code == 501
    assert "grammar" in caught.value.message


def test_structured_output_by_a_tool_of_the_models_choice(model: ChatOpenAI) -> None:
    structured = model.with_structured_output(Weather, method="function_calling", tool_choice="auto")
    said = call("Weather", '{"city": "Paris", "days": 3}')
    assert structured.invoke(f"<say>{said}</say>") == Weather(city="Paris", days=3)


@pytest.mark.parametrize("method", ["json_schema", "json_mode"])
def test_structured_output_by_a_grammar(model: ChatOpenAI, method: Any) -> None:
    structured = model.with_structured_output(Weather, method=method)
    with pytest.raises(openai.InternalServerError) as caught:
        structured.invoke("<say>x</say>")
    assert caught.value.status_code == 501


def test_logprobs_and_stop(model: ChatOpenAI) -> None:
    answer = model.bind(logprobs=True, top_logprobs=2, stop=["c"]).invoke("<say>abcd</say>")
    assert answer.content == "ab"
    assert [entry["token"] for entry in answer.response_metadata["logprobs"]["content"]] == ["a", "b"]


def test_several_choices(model: ChatOpenAI) -> None:
    result = model.model_copy(update={"n": 2}).generate([[HumanMessage(say("one", "two")[0]["content"])]])
    assert [generation.text for generation in result.generations[0]] == ["one", "two"]


def test_completions(server: Server) -> None:
    model = OpenAI(model=MODEL, base_url=server.api, api_key=SecretStr("any"), max_retries=0)
    assert model.invoke("<say>Hello.</say>") == "Hello."
    assert "".join(model.stream("<say>Hello.</say>")) == "Hello."


def test_errors(model: ChatOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        model.invoke("x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        model.invoke("x", model="nobody")
    with pytest.raises(ContextOverflowError):
        model.invoke("x " * 40_000)
