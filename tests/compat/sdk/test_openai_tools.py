"""The openai SDK: tool calls, whole and streamed, and what needs a grammar."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.lib.streaming.chat import ChatCompletionStreamEvent
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel
from tests.compat.sdk.server import CLOCK, WEATHER, call, checked, say
from tests.integration.processes import MODEL

PARIS = '{"city": "Paris", "days": 3}'
TEXT_AND_CALL = "Let me look.\n" + call("get_weather", PARIS)


@dataclass
class Streamed:
    """A streamed answer, put together by the rules of OpenAI's documentation."""

    content: str = ""
    ids: dict[int, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    pieces: defaultdict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    finish: str | None = None

    def add(self, chunk: ChatCompletionChunk) -> None:
        for choice in checked(chunk).choices:
            self.content += choice.delta.content or ""
            self.finish = choice.finish_reason or self.finish
            for piece in choice.delta.tool_calls or ():
                assert piece.function is not None
                if piece.id is not None:
                    assert (piece.index, piece.type) == (len(self.ids), "function")
                    assert piece.function.name
                    self.ids[piece.index], self.names[piece.index] = piece.id, piece.function.name
                else:
                    assert piece.index in self.ids
                    assert piece.function.name is None
                if piece.function.arguments:
                    self.pieces[piece.index].append(piece.function.arguments)

    def arguments(self, index: int) -> Any:
        return json.loads("".join(self.pieces[index]))


def streamed(client: OpenAI, messages: list[Any], **more: Any) -> Streamed:
    found = Streamed()
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True, **more) as stream:
        for chunk in stream:
            found.add(chunk)
    return found


def test_a_call(client: OpenAI) -> None:
    messages = say(call("get_weather", PARIS))
    answer = checked(client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    [made] = choice.message.tool_calls
    assert made.type == "function"
    assert made.id.startswith("call_")
    assert (made.function.name, json.loads(made.function.arguments)) == ("get_weather", json.loads(PARIS))
    found = streamed(client, messages, tools=[WEATHER])
    assert (found.finish, found.content, found.names) == ("tool_calls", "", {0: "get_weather"})
    assert "".join(found.pieces[0]) == made.function.arguments


def test_arguments_come_as_they_are_written(client: OpenAI) -> None:
    arguments = json.dumps({"city": "a rather long name of a city, " * 8, "days": 3})
    found = streamed(client, say(call("get_weather", arguments)), tools=[WEATHER])
    assert found.arguments(0) == json.loads(arguments)
    assert len(found.pieces[0]) > 40
    assert max(map(len, found.pieces[0])) < 10


def test_text_before_a_call(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say(TEXT_AND_CALL), tools=[WEATHER])
    message = answer.choices[0].message
    assert message.content is not None
    assert message.content.strip() == "Let me look."
    assert message.tool_calls is not None
    assert len(message.tool_calls) == 1
    found = streamed(client, say(TEXT_AND_CALL), tools=[WEATHER])
    assert (found.content, found.arguments(0)) == (message.content, json.loads(PARIS))


def test_parallel_calls(client: OpenAI) -> None:
    messages = say(
        "\n".join((call("get_weather", PARIS), call("get_time", "{}"), call("get_weather", PARIS)))
    )
    tools = [WEATHER, CLOCK]
    answer = checked(client.chat.completions.create(model=MODEL, messages=messages, tools=tools))
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    names = ["get_weather", "get_time", "get_weather"]
    assert [made.function.name for made in calls if made.type == "function"] == names
    assert len({made.id for made in calls}) == 3
    found = streamed(client, messages, tools=tools)
    assert list(found.names.values()) == names
    assert [found.arguments(index) for index in range(3)] == [json.loads(PARIS), {}, json.loads(PARIS)]
    assert len(set(found.ids.values())) == 3
    one = streamed(client, messages, tools=tools, parallel_tool_calls=False)
    assert list(one.names.values()) == ["get_weather"]


def test_reasoning_before_a_call(client: OpenAI) -> None:
    messages = say("<think>\nhm\n</think>\n\n" + call("get_time", "{}"))
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[CLOCK])
    message = answer.choices[0].message
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"].strip() == "hm"
    assert message.tool_calls is not None
    assert not (message.content or "").strip()
    assert answer.choices[0].finish_reason == "tool_calls"


def test_result_goes_back(client: OpenAI) -> None:
    """A conversation as an agent has it: what the SDK got is what it sends."""
    messages: list[Any] = say(TEXT_AND_CALL)
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER])
    message = answer.choices[0].message
    assert message.tool_calls is not None
    messages.append(message)
    for made in message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": made.id, "content": "<say>Sunny.</say>"})
    answer = checked(client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER]))
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("Sunny.", "stop")
    messages.append(answer.choices[0].message.model_dump(exclude_none=True))
    messages += say("You are welcome.")
    found = streamed(client, messages, tools=[WEATHER])
    assert (found.content, found.ids) == ("You are welcome.", {})


def test_several_choices(client: OpenAI) -> None:
    messages = say(call("get_weather", PARIS), "No need.")
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[WEATHER], n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop"]
    assert answer.choices[1].message.tool_calls is None


def test_no_tools_wanted(client: OpenAI) -> None:
    """Without tools, or with tool_choice none, markup is text."""
    text = call("get_weather", PARIS)
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = client.chat.completions.create(model=MODEL, messages=say(text), **more)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, "stop")


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "get_wea',
        "<tool_call>\nnonsense\n</tool_call>",
        '<tool_call>{"a": 1}</tool_call>',
    ],
)
def test_what_is_no_call_is_not_lost(client: OpenAI, said: str) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=say(said), tools=[WEATHER])
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content == said
    assert streamed(client, say(said), tools=[WEATHER]).content == said


def test_call_cut_off_by_the_limit(client: OpenAI) -> None:
    messages = say(call("get_weather", json.dumps({"city": "x" * 50})))
    found = streamed(client, messages, tools=[WEATHER], max_tokens=60)
    assert found.finish == "length"
    assert found.names == {0: "get_weather"}
    assert "".join(found.pieces[0]).startswith('{"city": "x')


async def test_async(aclient: AsyncOpenAI) -> None:
    found = Streamed()
    stream = await aclient.chat.completions.create(
        model=MODEL, messages=say(TEXT_AND_CALL), tools=[WEATHER], stream=True
    )
    async with stream:
        async for chunk in stream:
            found.add(chunk)
    assert (found.finish, found.arguments(0)) == ("tool_calls", json.loads(PARIS))


def test_stream_helper(client: OpenAI) -> None:
    """The SDK's own accumulation, from deltas to parsed arguments."""
    with client.chat.completions.stream(model=MODEL, messages=say(TEXT_AND_CALL), tools=[WEATHER]) as stream:
        events: list[ChatCompletionStreamEvent[None]] = list(stream)
        final = stream.get_final_completion()
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == PARIS
    assert len(deltas) > 3
    [done] = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert (done.name, done.index, json.loads(done.arguments)) == ("get_weather", 0, json.loads(PARIS))
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.arguments == PARIS


class Weather(BaseModel):
    """What a caller wants the model to fill in."""

    city: str
    days: int


GRAMMARS: dict[str, dict[str, Any]] = {
    "a schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "weather", "schema": Weather.model_json_schema(), "strict": True},
        }
    },
    "any object": {"response_format": {"type": "json_object"}},
    "any tool": {"tools": [WEATHER], "tool_choice": "required"},
    "one tool": {
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    },
}
"""What binds the model to a grammar. The simulated engine has none, so a client is told, before anything else."""


@pytest.mark.parametrize("what", GRAMMARS)
@pytest.mark.parametrize("stream", [False, True])
def test_no_grammar_yet(client: OpenAI, what: str, stream: bool) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=say(PARIS), stream=stream, **GRAMMARS[what])
    assert caught.value.status_code == 501
    assert "grammar" in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_no_grammar_yet_for_a_parsed_answer(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.parse(model=MODEL, messages=say(PARIS), response_format=Weather)
    assert caught.value.status_code == 501


def test_wrong_schema(client: OpenAI) -> None:
    wrong: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": {"type": "banana"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=say(PARIS), response_format=wrong)
    assert (caught.value.param or "").startswith("response_format")
    assert "banana" in caught.value.message


@pytest.mark.parametrize(
    ("more", "param"),
    [
        (
            {"tool_choice": {"type": "function", "function": {"name": "get_lost"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
    ],
)
def test_wrong_tools(client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=say(PARIS), **{"tools": [WEATHER], **more})
    assert caught.value.param == param
