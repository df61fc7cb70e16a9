"""The openai SDK: completions and models."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types import Completion
from tests.compat.sdk.server import Server, checked, counts_of
from tests.integration.processes import MODEL, sim_text


def prompt(*texts: str) -> str:
    return f"<say>{'<or/>'.join(texts)}</say>"


def chunks_of(client: OpenAI, asked: Any, **more: Any) -> list[Completion]:
    with client.completions.create(model=MODEL, prompt=asked, stream=True, **more) as stream:
        chunks = list(stream)
    for chunk in chunks:  # the SDK's type does not know that OpenAI says null until a choice is over
        if all(choice.finish_reason is not None for choice in chunk.choices):
            checked(chunk)
    return chunks


def text_of(chunks: list[Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def test_a_text(client: OpenAI) -> None:
    answer = checked(client.completions.create(model=MODEL, prompt=prompt("Hello 東京.")))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "Hello 東京.", "stop")
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = chunks_of(client, prompt("Hello 東京."), stream_options={"include_usage": True})
    assert text_of(chunks) == "Hello 東京."
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason] == [
        "stop"
    ]
    assert counts_of(chunks[-1].usage) == counts_of(answer.usage)


def test_markup_is_text_here(client: OpenAI) -> None:
    text = "<think>why</think><tool_call>{}</tool_call>"
    answer = client.completions.create(model=MODEL, prompt=prompt(text), max_tokens=100)
    assert answer.choices[0].text == text
    assert text_of(chunks_of(client, prompt(text), max_tokens=100)) == text


def test_length_and_seed(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="Once", max_tokens=5, seed=8)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (sim_text("Once", 8, 5), "length")


def test_no_limit_given(client: OpenAI) -> None:
    """OpenAI's completions end after 16 tokens when nothing is said."""
    answer = client.completions.create(model=MODEL, prompt="Once", seed=8, timeout=3)
    assert answer.choices[0].text == sim_text("Once", 8, 16)
    assert answer.choices[0].finish_reason == "length"


def test_several_prompts(client: OpenAI) -> None:
    prompts = [prompt("a", "A"), prompt("b", "B")]
    answer = checked(client.completions.create(model=MODEL, prompt=prompts, n=2))
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, "a"),
        (1, "A"),
        (2, "b"),
        (3, "B"),
    ]
    chunks = chunks_of(client, prompts, n=2)
    assert [text_of(chunks, index) for index in range(4)] == ["a", "A", "b", "B"]


def test_token_ids(client: OpenAI, server: Server) -> None:
    one, two = server.token_ids(prompt("a")), server.token_ids(prompt("b"))
    answer = client.completions.create(model=MODEL, prompt=one)
    assert answer.choices[0].text == "a"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(one)
    answer = client.completions.create(model=MODEL, prompt=[one, two])
    assert [choice.text for choice in answer.choices] == ["a", "b"]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(one) + len(two)


def test_echo(client: OpenAI) -> None:
    asked = prompt("Hello.")
    answer = client.completions.create(model=MODEL, prompt=asked, echo=True)
    assert answer.choices[0].text == asked + "Hello."
    assert text_of(chunks_of(client, asked, echo=True)) == asked + "Hello."


def test_stop(client: OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt("one END two"), stop=["END"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert text_of(chunks_of(client, prompt("one END two"), stop=["END"])) == "one "


def test_logprobs(client: OpenAI) -> None:
    answer = checked(client.completions.create(model=MODEL, prompt=prompt("ab the c"), logprobs=2, seed=3))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", " the", " c"]
    assert logprobs.text_offset == [0, 1, 2, 6]
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    for token, logprob, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert logprob <= 0
        assert len(top) == 2
        assert top[token] == logprob
    told = [
        choice.logprobs
        for chunk in chunks_of(client, prompt("ab the c"), logprobs=2, seed=3)
        for choice in chunk.choices
    ]
    assert [token for each in told if each for token in each.tokens or ()] == logprobs.tokens
    assert [offset for each in told if each for offset in each.text_offset or ()] == logprobs.text_offset


def test_logprobs_of_an_echoed_prompt(client: OpenAI, server: Server) -> None:
    """What evaluation harnesses ask for; the first token has no probability, which the SDK's type does not know."""
    asked = prompt("ab")
    answer = client.completions.create(model=MODEL, prompt=asked, logprobs=1, echo=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == asked + "ab"
    assert len(logprobs.tokens) == len(server.token_ids(asked)) + 2
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    assert logprobs.text_offset is not None
    assert [logprobs.text_offset[0], logprobs.text_offset[-1]] == [0, len(asked) + 1]
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs) == len(logprobs.tokens)


def test_logprobs_of_an_echoed_prompt_in_a_stream(client: OpenAI) -> None:
    more: dict[str, Any] = {"logprobs": 1, "echo": True}
    whole = client.completions.create(model=MODEL, prompt=prompt("ab"), **more).choices[0].logprobs
    told = [choice.logprobs for chunk in chunks_of(client, prompt("ab"), **more) for choice in chunk.choices]
    assert whole is not None
    assert [token for each in told if each for token in each.tokens or ()] == whole.tokens
    assert [offset for each in told if each for offset in each.text_offset or ()] == whole.text_offset
    assert [logprob for each in told if each for logprob in each.token_logprobs or ()] == whole.token_logprobs


def test_text_offsets_are_those_of_the_text(client: OpenAI) -> None:
    """A character of three tokens moves what comes after it by one."""
    answer = client.completions.create(model=MODEL, prompt=prompt("a東b"), logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert (logprobs.tokens or ())[-1] == "b"
    assert (logprobs.text_offset or ())[-1] == 2
    told = [
        choice.logprobs for chunk in chunks_of(client, prompt("a東b"), logprobs=1) for choice in chunk.choices
    ]
    assert [offset for each in told if each for offset in each.text_offset or ()] == logprobs.text_offset


async def test_async(aclient: AsyncOpenAI) -> None:
    answer = await aclient.completions.create(model=MODEL, prompt=prompt("Hello."))
    assert answer.choices[0].text == "Hello."
    stream = await aclient.completions.create(model=MODEL, prompt=prompt("Hello."), stream=True)
    async with stream:
        assert text_of([chunk async for chunk in stream]) == "Hello."


@pytest.mark.parametrize("wrong", [[], "", [[]], ["a", 1], [10**6], [-1]])
def test_wrong_prompts(client: OpenAI, wrong: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=wrong)
    assert (caught.value.param or "").startswith("prompt")


def test_models(client: OpenAI) -> None:
    models = client.models.list()
    assert [checked(model).id for model in models] == [MODEL]
    model = checked(client.models.retrieve(MODEL))
    assert (model.id, model.object) == (MODEL, "model")
    assert model == models.data[0]
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"


async def test_async_models(aclient: AsyncOpenAI) -> None:
    assert [model.id async for model in aclient.models.list()] == [MODEL]
