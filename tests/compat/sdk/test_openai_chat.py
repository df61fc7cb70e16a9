"""The openai SDK: chats, whole and streamed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk
from tests.compat.sdk.server import WEATHER, Server, ask, call, checked, counts_of, say
from tests.integration.processes import MODEL, sim_text

TEXTS = {
    "words": "The quick brown fox. And then? Nothing.",
    "lines": 'one\n\n  two\t"three" \\four {five}\r\n',
    "many bytes": "naïve 東京 👩‍👩‍👧‍👦 ✓ Ω é e\u0301 \u2028 end",
    "half a tag": "a < b, <b>, <think, </tool, <tool_cal",
}


def chunks_of(client: OpenAI, messages: list[dict[str, Any]], **more: Any) -> list[ChatCompletionChunk]:
    with client.chat.completions.create(model=MODEL, messages=messages, stream=True, **more) as stream:
        return [checked(chunk) for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


@pytest.mark.parametrize("what", TEXTS)
def test_whole_and_streamed_say_the_same(client: OpenAI, what: str) -> None:
    whole = checked(client.chat.completions.create(model=MODEL, messages=say(TEXTS[what])))
    assert whole.choices[0].message.content == TEXTS[what]
    assert text_of(chunks_of(client, say(TEXTS[what]))) == TEXTS[what]


def test_fields_of_an_answer(client: OpenAI) -> None:
    answer = checked(client.chat.completions.create(model=MODEL, messages=say("Hello.")))
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    [choice] = answer.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    message = choice.message
    assert (message.role, message.tool_calls, message.refusal) == ("assistant", None, None)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello.") + 1, "one token for each letter, and the end"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_events_of_a_stream(client: OpenAI) -> None:
    chunks = chunks_of(client, say("Hello."))
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    choices = [chunk.choices[0] for chunk in chunks]
    assert [choice.delta.role for choice in choices] == ["assistant"] + [None] * (len(choices) - 1)
    finishes = [choice.finish_reason for choice in choices]
    assert finishes == [None] * (len(choices) - 1) + ["stop"]
    assert all(len(choice.delta.content or "") <= 1 for choice in choices), "more than a token in an event"
    assert all(chunk.usage is None for chunk in chunks)


async def test_async_and_many_at_once(aclient: AsyncOpenAI) -> None:
    async def whole(number: int) -> str | None:
        messages = say(f"answer {number}")
        answer = await aclient.chat.completions.create(model=MODEL, messages=messages)
        return checked(answer).choices[0].message.content

    async def streamed(number: int) -> str:
        messages = say(f"stream {number}")
        stream = await aclient.chat.completions.create(model=MODEL, messages=messages, stream=True)
        async with stream:
            return text_of([checked(chunk) async for chunk in stream])

    answers = await asyncio.gather(*map(whole, range(12)), *map(streamed, range(12)))
    assert answers == [f"answer {number}" for number in range(12)] + [
        f"stream {number}" for number in range(12)
    ]


PROMPT = "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n"
"""`ask()` as the model's template renders it."""


@pytest.mark.parametrize("limit", ["max_tokens", "max_completion_tokens"])
def test_length(client: OpenAI, limit: str) -> None:
    more: dict[str, Any] = {limit: 3, "seed": 4}
    answer = client.chat.completions.create(model=MODEL, messages=ask(), **more)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content == sim_text(PROMPT, 4, 3)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    chunks = chunks_of(client, ask(), **more)
    assert text_of(chunks) == sim_text(PROMPT, 4, 3)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_seed(client: OpenAI) -> None:
    def answer(seed: int) -> str | None:
        found = client.chat.completions.create(model=MODEL, messages=ask(), seed=seed, max_tokens=20)
        return found.choices[0].message.content

    first = answer(1)
    assert all(answer(1) == first for _ in range(4)), "both workers say the same"
    assert answer(2) != first


def test_usage_of_a_stream(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=say("Hello."))
    *before, last = chunks_of(client, say("Hello."), stream_options={"include_usage": True})
    assert last.choices == []
    assert counts_of(last.usage) == counts_of(whole.usage)
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in before)


def test_continuous_usage(client: OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(client, say("Hello."), extra_body={"stream_options": options})
    counts = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len("Hello.") + 1


def test_several_choices(client: OpenAI) -> None:
    texts = ["first", "the second", "3"]
    answer = checked(client.chat.completions.create(model=MODEL, messages=say(*texts), n=3))
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == texts
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(text.replace(" second", "_")) + 1 for text in texts)
    chunks = chunks_of(client, say(*texts), n=3, stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert counts_of(chunks[-1].usage) == counts_of(answer.usage)
    choices = [choice for chunk in chunks for choice in chunk.choices]
    for index in range(3):
        mine = [choice for choice in choices if choice.index == index]
        assert [choice.delta.role for choice in mine if choice.delta.role] == ["assistant"]
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]


def test_logprobs(client: OpenAI) -> None:
    text = "one 東 two"
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "seed": 1}
    answer = checked(client.chat.completions.create(model=MODEL, messages=say(text), **more))
    [choice] = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content
    assert entries is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == text
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (top.logprob for top in entry.top_logprobs), reverse=True
        )
        assert (entry.token, entry.logprob) in [(top.token, top.logprob) for top in entry.top_logprobs]
    streamed = [choice.logprobs for chunk in chunks_of(client, say(text), **more) for choice in chunk.choices]
    told = [entry for each in streamed if each is not None for entry in each.content or ()]
    assert told == entries


def test_logprobs_without_alternatives(client: OpenAI) -> None:
    answer = checked(client.chat.completions.create(model=MODEL, messages=say("ab"), logprobs=True))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert [entry.token for entry in logprobs.content or ()] == ["a", "b"]
    assert [entry.top_logprobs for entry in logprobs.content or ()] == [[], []]


def test_logprobs_of_all_that_is_said(client: OpenAI) -> None:
    """Thoughts and markup are tokens too; a stream tells of the same ones as the whole."""
    said = "<think>\nhm\n</think>\n\nyes " + call("get_weather", "{}")
    more: dict[str, Any] = {"tools": [WEATHER], "logprobs": True, "top_logprobs": 1}
    answer = client.chat.completions.create(model=MODEL, messages=say(said), **more)
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content or []
    assert "".join(entry.token for entry in entries) == said
    streamed = [choice.logprobs for chunk in chunks_of(client, say(said), **more) for choice in chunk.choices]
    assert [entry for each in streamed if each is not None for entry in each.content or ()] == entries


@pytest.mark.parametrize(
    ("text", "stop", "left"),
    [
        ("one two END three", "END", "one two "),
        ("EEN one ENENDx", ["END"], "EEN one EN"),
        ("a\n\nb", ["\n\n"], "a"),
        ("abcdef", ["cde", "bc", "f"], "a"),
        ("no stop here EN", ["END"], "no stop here EN"),
        ("ABCDE", [f"{letter}x" for letter in "abcdefghijklmnopqrstuvwxyzABCDE"] + ["DE"], "ABC"),
    ],
)
def test_stop_strings(client: OpenAI, text: str, stop: str | list[str], left: str) -> None:
    answer = checked(client.chat.completions.create(model=MODEL, messages=say(text), stop=stop))
    assert answer.choices[0].message.content == left
    assert answer.choices[0].finish_reason == "stop"
    chunks = chunks_of(client, say(text), stop=stop, logprobs=True)
    assert text_of(chunks) == left
    assert chunks[-1].choices[0].finish_reason == "stop"
    streamed = [choice.logprobs for chunk in chunks for choice in chunk.choices]
    told = [entry.token for each in streamed if each is not None for entry in each.content or ()]
    assert "".join(told) == left, "the tokens of a stop string are told"


def test_one_choice_stops_before_the_other(client: OpenAI) -> None:
    messages = say("one END two", "three and four, without a stop", "fiveEND")
    answer = client.chat.completions.create(model=MODEL, messages=messages, n=3, stop="END")
    texts = ["one ", "three and four, without a stop", "five"]
    assert [choice.message.content for choice in answer.choices] == texts
    chunks = chunks_of(client, messages, n=3, stop="END", stream_options={"include_usage": True})
    assert [text_of(chunks, index) for index in range(3)] == texts
    assert counts_of(chunks[-1].usage) == counts_of(answer.usage)


def test_stop_token(client: OpenAI, server: Server) -> None:
    body = {"stop_token_ids": server.token_ids("c")}
    answer = client.chat.completions.create(model=MODEL, messages=say("abcd"), extra_body=body)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("ab", "stop")


def test_reasoning(client: OpenAI) -> None:
    messages = say("<think>\nwhy, why?\n</think>\n\nbecause")
    answer = checked(client.chat.completions.create(model=MODEL, messages=messages))
    message = answer.choices[0].message
    assert message.content is not None
    assert message.content.strip() == "because"
    assert message.model_extra is not None
    assert message.model_extra["reasoning_content"].strip() == "why, why?"
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert details.reasoning_tokens is not None
    assert len("why, why?") // 2 < details.reasoning_tokens < answer.usage.completion_tokens
    chunks = chunks_of(client, messages, stream_options={"include_usage": True})
    assert text_of(chunks) == message.content
    extras = [choice.delta.model_extra or {} for chunk in chunks for choice in chunk.choices]
    thoughts = [extra["reasoning_content"] for extra in extras if "reasoning_content" in extra]
    assert "".join(thoughts) == message.model_extra["reasoning_content"]
    assert len(thoughts) > 3
    assert counts_of(chunks[-1].usage) == counts_of(answer.usage)


def test_thinking_turned_off(client: OpenAI) -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    answer = client.chat.completions.create(model=MODEL, messages=say("just this"), extra_body=body)
    assert answer.choices[0].message.content == "just this"
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


def test_kinds_of_messages(client: OpenAI) -> None:
    [last] = say("yes")
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Are you"}, {"type": "text", "text": " there?"}],
        },
        {"role": "assistant", "content": [{"type": "text", "text": "I am."}]},
        {"role": "user", "content": "<say>no</say>", "name": "anna"},
        {"role": "assistant", "content": None, "refusal": "I would rather not."},
        {"role": "user", "content": [{"type": "text", "text": last["content"]}]},
    ]
    answer = client.chat.completions.create(model=MODEL, messages=messages)
    assert answer.choices[0].message.content == "yes"


def test_everything_that_the_sdk_can_set(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=say("ok"),
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=-0.1,
        logit_bias={"5": 10},
        user="anna",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        reasoning_effort="low",
        verbosity="low",
        prompt_cache_key="key",
        safety_identifier="id",
        prediction={"type": "content", "content": "ok"},
        response_format={"type": "text"},
        modalities=["text"],
        parallel_tool_calls=True,
        extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1},
    )
    assert answer.choices[0].message.content == "ok"


def test_stream_helper(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=say("Hello."), stream_options={"include_usage": True}
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = [event.delta for event in events if event.type == "content.delta"]
    assert deltas == list("Hello.")
    assert [event.content for event in events if event.type == "content.done"] == ["Hello."]
    assert final.choices[0].message.content == "Hello."
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None


async def test_async_stream_helper(aclient: AsyncOpenAI) -> None:
    async with aclient.beta.chat.completions.stream(
        model=MODEL, messages=say("Hello."), logprobs=True
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello."
    assert final.choices[0].logprobs is not None
    assert [entry.token for entry in final.choices[0].logprobs.content or ()] == list("Hello.")


def test_request_ids(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response
    answer = raw.create(model=MODEL, messages=say("ok"), extra_headers={"x-request-id": "my-own-id"})
    assert answer.headers["x-request-id"] == "my-own-id"
    assert answer.parse().choices[0].message.content == "ok"
    one, two = (raw.create(model=MODEL, messages=say("ok")) for _ in range(2))
    assert one.headers["x-request-id"] != two.headers["x-request-id"]
    assert one.parse()._request_id == one.headers["x-request-id"]
    streamed = client.chat.completions.with_streaming_response
    with streamed.create(model=MODEL, messages=say("ok"), stream=True) as response:
        assert response.headers["x-request-id"]
        assert response.headers["content-type"].startswith("text/event-stream")
        assert "".join(response.iter_text()).endswith("data: [DONE]\n\n")


def test_unknown_fields_are_named(client: OpenAI) -> None:
    raw = client.chat.completions.with_raw_response
    answer = raw.create(model=MODEL, messages=say("ok"), extra_body={"colour": "red"})
    assert "colour" in answer.headers["x-kvolt-warning"]
    assert answer.parse().choices[0].message.content == "ok"


def test_extra_fields_of_an_answer(client: OpenAI) -> None:
    body = {"nvext": {"extra_fields": ["worker_id", "timing", "completion_token_ids", "stop_reason"]}}
    answer = client.chat.completions.create(model=MODEL, messages=say("ab"), stop="b", extra_body=body)
    assert answer.model_extra is not None
    told = answer.model_extra["nvext"]
    assert told["worker_id"]["decode_worker_id"]
    assert told["timing"]["total_time_ms"] > 0
    assert told["stop_reason"] == "b"
    *_, last = chunks_of(client, say("ab"), stop="b", extra_body=body)
    assert last.model_extra is not None
    assert last.model_extra["nvext"]["completion_token_ids"] == told["completion_token_ids"]
