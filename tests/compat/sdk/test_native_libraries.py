"""langchain-openai and litellm where they ask for a grammar, on the engine that has one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from tests.compat.sdk.native import LONG_ENOUGH, MODEL, NAMED, WEATHER, Native, Weather, ask

pytestmark = pytest.mark.filterwarnings("ignore")  # both use what their own libraries call deprecated


@pytest.fixture
def model(native: Native) -> ChatOpenAI:
    return ChatOpenAI(
        model=MODEL,
        base_url=native.api,
        api_key=SecretStr("any"),
        max_retries=0,
        max_completion_tokens=LONG_ENOUGH,
        seed=1,
    )


@pytest.fixture
def given(native: Native) -> dict[str, Any]:
    return {
        "model": f"openai/{MODEL}",
        "api_base": native.api,
        "api_key": "any",
        "max_retries": 0,
        "messages": ask(),
        "max_tokens": LONG_ENOUGH,
        "seed": 1,
    }


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_structured_output(model: ChatOpenAI, method: Any) -> None:
    structured = model.with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke("How will it be?"), Weather)
    *_, last = structured.stream("How will it be?")
    assert isinstance(last, Weather)


def test_langchain_json_mode(model: ChatOpenAI, native: Native) -> None:
    closing = model.model_copy(update={"logit_bias": {native.token_id("}"): 100}})
    found: Any = closing.with_structured_output(Weather, method="json_mode", include_raw=True).invoke("Well?")
    assert json.loads(found["raw"].content) == {}
    assert found["parsing_error"] is not None, "an object, but no Weather"


def test_langchain_must_call(model: ChatOpenAI) -> None:
    bound = model.bind_tools([WEATHER], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke("How will it be?")
    assert isinstance(answer, AIMessage)
    [made] = answer.tool_calls
    assert made["name"] == "get_weather"
    Weather.model_validate(made["args"])
    assert answer.invalid_tool_calls == []


def test_litellm_structured_output(litellm: Any, given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, response_format=Weather)
    assert answer.choices[0].finish_reason == "stop"
    Weather.model_validate_json(answer.choices[0].message.content)
    built = litellm.stream_chunk_builder(
        list(litellm.completion(**given, response_format=Weather, stream=True))
    )
    assert built is not None
    assert built.choices[0].message.content == answer.choices[0].message.content


def test_litellm_must_call(litellm: Any, given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, tools=[WEATHER], tool_choice=NAMED)
    [made] = answer.choices[0].message.tool_calls
    assert made.function.name == "get_weather"
    Weather.model_validate_json(made.function.arguments)


def test_litellm_grammar_that_cannot_be(litellm: Any, given: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError) as caught:
        litellm.completion(**given, extra_body={"guided_regex": r"(a)\1"})
    assert "back reference" in str(caught.value)
