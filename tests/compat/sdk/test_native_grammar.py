"""What binds a model to a grammar, on an engine that has grammars: the tests that the sim engine answers with 501.

The weights are random: without the grammar nothing that comes out would be JSON.
"""

from __future__ import annotations

import asyncio
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Annotated, Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, Field
from tests.compat.sdk.native import CLOCK, LONG_ENOUGH, MODEL, NAMED, WEATHER, Native, Weather, ask
from tests.compat.sdk.server import checked
from tests.compat.sdk.test_openai_tools import Streamed


class Hour(BaseModel):
    hour: Annotated[int, Field(ge=0, le=23)]
    rain: bool | None


class Forecast(BaseModel):
    """Definitions, references, lists, alternatives."""

    place: Weather
    hours: Annotated[list[Hour], Field(min_length=1, max_length=2)]


# --- response_format


@pytest.mark.parametrize("seed", range(3))
def test_a_parsed_answer(tiny: OpenAI, seed: int) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": ask(), "seed": seed, "max_tokens": LONG_ENOUGH}
    answer = tiny.chat.completions.parse(**given, response_format=Weather)
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Weather)
    assert Weather.model_validate_json(choice.message.content or "") == choice.message.parsed
    with tiny.chat.completions.stream(**given, response_format=Weather) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_the_example(
    native: Native, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", native.api)
    monkeypatch.setattr(sys, "argv", ["json_schema.py", "Nice."])
    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "json_schema.py"), run_name="__main__")
    assert re.fullmatch(r"mood=(good|mixed|bad) stars=[1-5] topics=[a-z,]+\n", capsys.readouterr().out)


def test_a_deeper_schema(tiny: OpenAI) -> None:
    answer = tiny.chat.completions.parse(
        model=MODEL, messages=ask(), response_format=Forecast, seed=1, max_tokens=2 * LONG_ENOUGH
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.parsed is not None
    assert 1 <= len(answer.choices[0].message.parsed.hours) <= 2


def test_the_limit_comes_before_the_end_of_the_json(tiny: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        tiny.chat.completions.parse(model=MODEL, messages=ask(), response_format=Weather, max_tokens=3)
    assert caught.value.completion.choices[0].finish_reason == "length"


def test_any_object(tiny: OpenAI, native: Native) -> None:
    wanted: dict[str, Any] = {"response_format": {"type": "json_object"}, "max_tokens": 40}
    bias = {str(native.token_id("}")): 100}
    answer = checked(tiny.chat.completions.create(model=MODEL, messages=ask(), logit_bias=bias, **wanted))
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(answer.choices[0].message.content or "") == {}
    bias = {str(native.token_id("}")): -100}
    open_end = tiny.chat.completions.create(model=MODEL, messages=ask(), logit_bias=bias, **wanted)
    assert open_end.choices[0].finish_reason == "length"
    assert re.match(r'\{\s*"', open_end.choices[0].message.content or "")


async def test_everyone_has_a_grammar_of_its_own(atiny: AsyncOpenAI) -> None:
    """In one batch: a mask that were another's would show at once. Beside them a choice without any."""

    async def one(number: int) -> None:
        pattern = f"<{number}>[a-f]{{{number + 1}}}</{number}>"
        answer = await atiny.chat.completions.create(
            model=MODEL, messages=ask(), max_tokens=60, n=2, extra_body={"guided_regex": pattern}
        )
        for choice in answer.choices:
            assert re.fullmatch(pattern, choice.message.content or ""), pattern
            assert choice.finish_reason == "stop"

    async def free() -> str | None:
        answer = await atiny.chat.completions.create(
            model=MODEL, messages=ask(), max_tokens=40, temperature=0
        )
        return answer.choices[0].message.content

    alone = await free()
    *_, beside = await asyncio.gather(*map(one, range(8)), free())
    assert beside == alone


# --- guided_*

GRAMMAR = 'root ::= "[" item ("," item)? "]"\nitem ::= [0-9] [a-c]'
GUIDED: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"guided_regex": r"[a-z]{3}-\d{2}"}, r"[a-z]{3}-[0-9]{2}"),
    "choice": ({"guided_choice": ["yes", "no", "pěkně (ano)"]}, r"yes|no|pěkně \(ano\)"),
    "json": ({"guided_json": {"enum": ["left", 7, None]}}, '"left"|7|null'),
    "json as text": ({"guided_json": '{"type": "boolean"}'}, "true|false"),
    "grammar": ({"guided_grammar": GRAMMAR}, r"\[\d[abc](,\d[abc])?\]"),
    "structured_outputs": ({"structured_outputs": {"regex": "(ab){2}"}}, "abab"),
}
"""What is sent, and what the answer must match."""


@pytest.mark.parametrize("what", GUIDED)
def test_guided(tiny: OpenAI, what: str) -> None:
    body, pattern = GUIDED[what]
    answer = checked(
        tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=60, seed=5, extra_body=body)
    )
    text = answer.choices[0].message.content or ""
    assert re.fullmatch(pattern, text), text
    assert answer.choices[0].finish_reason == "stop"
    chunks = tiny.chat.completions.create(
        model=MODEL, messages=ask(), max_tokens=60, seed=5, extra_body=body, stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    completion = tiny.completions.create(model=MODEL, prompt="Say", max_tokens=60, extra_body=body)
    assert re.fullmatch(pattern, completion.choices[0].text), completion.choices[0].text


def test_a_grammar_that_is_complete_wants_no_more_tokens(tiny: OpenAI) -> None:
    body = {"guided_choice": ["yes", "no"], "min_tokens": 20}
    answer = tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=40, extra_body=body)
    assert answer.choices[0].message.content in ("yes", "no")
    assert answer.choices[0].finish_reason == "stop"


# --- tool_choice


def test_a_named_function(tiny: OpenAI) -> None:
    """OpenAI ends such an answer with `stop`: the call was no choice of the model's."""
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": ask(),
        "tools": [CLOCK, WEATHER],
        "tool_choice": NAMED,
        "max_tokens": LONG_ENOUGH,
        "seed": 2,
    }
    answer = checked(tiny.chat.completions.create(**given))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", None)
    assert choice.message.tool_calls is not None
    [made] = choice.message.tool_calls
    assert made.type == "function"
    assert made.function.name == "get_weather"
    Weather.model_validate_json(made.function.arguments)

    found = Streamed()
    with tiny.chat.completions.create(**given, stream=True) as stream:
        for chunk in stream:
            found.add(chunk)
    assert (found.finish, found.content, found.names) == ("stop", "", {0: "get_weather"})
    assert "".join(found.pieces[0]) == made.function.arguments
    assert len(found.pieces[0]) > 20, "arguments come as they are written"

    parsed = tiny.chat.completions.parse(**given).choices[0].message.tool_calls
    assert parsed is not None
    assert isinstance(parsed[0].function.parsed_arguments, Weather)


@pytest.mark.parametrize("seed", range(3))
def test_any_function(tiny: OpenAI, native: Native, seed: int) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": ask(),
        "tools": [WEATHER, CLOCK],
        "tool_choice": "required",
        "max_tokens": LONG_ENOUGH,
        "seed": seed,
        "logit_bias": {str(native.token_id("]")): 3},  # else it makes calls without end
    }
    answer = checked(tiny.chat.completions.create(**given))
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [made.function for made in choice.message.tool_calls or () if made.type == "function"]
    assert calls
    for made in calls:
        if made.name == "get_weather":
            Weather.model_validate_json(made.arguments)
        else:
            assert (made.name, json.loads(made.arguments)) == ("get_time", {})

    found = Streamed()
    with tiny.chat.completions.create(**given, stream=True) as stream:
        for chunk in stream:
            found.add(chunk)
    assert found.finish == "tool_calls"
    told = [(found.names[index], "".join(found.pieces[index])) for index in range(len(found.names))]
    assert told == [(made.name, made.arguments) for made in calls]


def test_one_function_at_a_time(tiny: OpenAI, native: Native) -> None:
    answer = tiny.chat.completions.create(
        model=MODEL,
        messages=ask(),
        tools=[CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=LONG_ENOUGH,
        logit_bias={str(native.token_id(",")): 100},
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert [made.function.name for made in choice.message.tool_calls or () if made.type == "function"] == [
        "get_time"
    ]


# --- what no grammar can be made of


def schema(inner: dict[str, Any]) -> dict[str, Any]:
    outer = {"type": "object", "properties": {"a": inner}, "required": ["a"]}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": outer}}


NEVER = {"type": "integer", "minimum": 5, "maximum": 3}
WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a schema that nothing satisfies": ({"response_format": schema(NEVER)}, "response_format", "'a'"),
    "a schema beyond grammars": ({"response_format": schema({"not": {}})}, "response_format", "not"),
    "a tool beyond grammars": (
        {
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": schema(NEVER)["json_schema"]["schema"]},
                }
            ],
            "tool_choice": "required",
        },
        "tools",
        "unsatisfiable",
    ),
    "a back reference": ({"extra_body": {"guided_regex": r"(a)\1"}}, "guided_regex", "back reference"),
    "a rule that is not there": (
        {"extra_body": {"guided_grammar": "root ::= nobody"}},
        "guided_grammar",
        "nobody",
    ),
    "no grammar at all": (
        {"extra_body": {"structured_outputs": {"grammar": "%%%"}}},
        "structured_outputs.grammar",
        "%%%",
    ),
}
"""What is sent, the `param` that names it, and what the message must say of it. The edge finds nothing wrong with
these: the engine's compiler does, and a client is told by a status, streaming or not."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_what_no_grammar_can_be_made_of(tiny: OpenAI, what: str, stream: bool) -> None:
    more, param, said = WRONG[what]
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.chat.completions.create(model=MODEL, messages=ask(), stream=stream, max_tokens=5, **more)
    error = caught.value
    assert error.param == param
    assert said in error.message
    assert error.type == "invalid_request_error"


def test_json_beside_tools_that_may_be_called(tiny: OpenAI) -> None:
    """The one grammar that is still missing, as the README says."""
    wanted: Any = {"type": "json_object"}
    with pytest.raises(openai.InternalServerError) as caught:
        tiny.chat.completions.create(model=MODEL, messages=ask(), tools=[CLOCK], response_format=wanted)
    assert caught.value.status_code == 501
