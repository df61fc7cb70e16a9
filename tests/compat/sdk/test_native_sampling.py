"""What is asked of each token and of the whole answer, where tokens are drawn from real probabilities."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.compat.sdk.native import BLOCK_SIZE, CONTEXT_LENGTH, KV_BLOCKS, MODEL, Native, ask
from tests.compat.sdk.server import checked

IDS = {"nvext": {"extra_fields": ["completion_token_ids"]}}


def chat(tiny: OpenAI, messages: list[Any] | None = None, **more: Any) -> Any:
    """The first choice."""
    given = {"model": MODEL, "messages": messages or ask(), "max_tokens": 30, **more}
    return checked(tiny.chat.completions.create(**given)).choices[0]


def text(tiny: OpenAI, **more: Any) -> str:
    said: str = chat(tiny, **more).message.content
    return said


# --- the same again


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"seed": 3}, {"seed": 4, "temperature": 2, "top_p": 0.9}]
)
def test_whole_and_streamed_say_the_same(tiny: OpenAI, how: dict[str, Any]) -> None:
    """Also where a character is cut in two, or was never one."""
    whole = tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=80, **how)
    usage = {"stream_options": {"include_usage": True}, "stream": True}
    chunks = list(tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=80, **how, **usage))
    told = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(told) == whole.choices[0].message.content
    assert len(told) > 40
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    completion = tiny.completions.create(model=MODEL, prompt="Once", max_tokens=80, **how)
    pieces = tiny.completions.create(model=MODEL, prompt="Once", max_tokens=80, stream=True, **how)
    assert "".join(piece.choices[0].text for piece in pieces) == completion.choices[0].text


async def test_a_seed_says_the_same_alone_and_in_a_batch(tiny: OpenAI, atiny: AsyncOpenAI) -> None:
    alone = [text(tiny, seed=seed) for seed in range(4)]
    assert len(set(alone)) == 4

    async def one(seed: int | None) -> str | None:
        answer = await atiny.chat.completions.create(
            model=MODEL, messages=ask(), max_tokens=30, seed=seed, temperature=1 if seed is not None else 0
        )
        return answer.choices[0].message.content

    together = await asyncio.gather(*map(one, range(4)), *(one(None) for _ in range(4)))
    assert together[:4] == alone
    assert set(together[4:]) == {text(tiny, temperature=0)}


def test_without_a_seed_answers_differ(tiny: OpenAI) -> None:
    assert text(tiny) != text(tiny)


def test_several_choices(tiny: OpenAI) -> None:
    def texts(**more: Any) -> list[str | None]:
        answer = tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=20, n=2, **more)
        assert [choice.index for choice in checked(answer).choices] == [0, 1]
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 40
        return [choice.message.content for choice in answer.choices]

    first, second = texts(seed=6)
    assert first != second
    assert texts(seed=6) == [first, second]
    assert text(tiny, seed=6, max_tokens=20) == first
    assert len(set(texts(temperature=0))) == 1


# --- log probabilities


def test_log_probabilities(tiny: OpenAI) -> None:
    choice = chat(tiny, logprobs=True, top_logprobs=20, seed=1)
    entries = choice.logprobs.content
    assert len(entries) == 30
    assert (
        b"".join(bytes(entry.bytes) for entry in entries).decode(errors="replace") == choice.message.content
    )
    for entry in entries:
        top = [one.logprob for one in entry.top_logprobs]
        assert len(top) == 20
        assert top == sorted(top, reverse=True)
        assert 0.1 < sum(map(math.exp, top)) <= 1
        assert entry.logprob <= top[0] <= 0
        if entry.logprob > top[-1]:
            assert entry.logprob in top
    assert any(entry.logprob < entry.top_logprobs[0].logprob for entry in entries), "drawn, not the likeliest"
    greedy = chat(tiny, logprobs=True, top_logprobs=1, temperature=0).logprobs.content
    assert all(
        (entry.token, entry.logprob) == (top.token, top.logprob)
        for entry in greedy
        for top in entry.top_logprobs
    )


def test_a_prompt_has_the_probabilities_that_it_was_drawn_with(tiny: OpenAI) -> None:
    """What was said goes back as the prompt, all at once instead of token by token, and not from the cache."""
    start = [70, 71, 72, 73]
    given: dict[str, Any] = {"model": MODEL, "logprobs": 1, "extra_body": IDS}
    said = tiny.completions.create(prompt=start, max_tokens=24, seed=9, **given)
    assert said.model_extra is not None
    ids = said.model_extra["nvext"]["completion_token_ids"]
    again = tiny.completions.create(prompt=[*start, *ids], max_tokens=1, echo=True, **given)
    drawn, read = said.choices[0].logprobs, again.choices[0].logprobs
    assert drawn is not None
    assert read is not None
    assert read.token_logprobs is not None
    assert read.token_logprobs[0] is None
    assert len(read.token_logprobs) == len(start) + 24 + 1
    assert read.token_logprobs[len(start) : -1] == pytest.approx(drawn.token_logprobs, abs=1e-3)
    assert (read.tokens or [])[len(start) : -1] == drawn.tokens


def test_echo(tiny: OpenAI, native: Native) -> None:
    prompt = "hello the water"
    answer = tiny.completions.create(
        model=MODEL, prompt=prompt, max_tokens=2, echo=True, logprobs=2, temperature=0
    )
    [choice] = answer.choices
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    tokens, top = choice.logprobs.tokens or [], choice.logprobs.top_logprobs or []
    assert len(tokens) == len(native.token_ids(prompt)) + 2
    assert "".join(tokens[:-2]) == prompt
    assert choice.logprobs.token_logprobs is not None
    for token, logprob, best in list(zip(tokens, choice.logprobs.token_logprobs, top, strict=True))[1:]:
        assert logprob <= 0
        assert best.get(token, logprob) == logprob
        assert sum(map(math.exp, best.values())) <= 1
    told = chat(tiny, max_tokens=1, extra_body={"prompt_logprobs": 0}).model_extra["prompt_logprobs"]
    assert told[0] is None
    assert all(entry["logprob"] <= 0 for each in told[1:] for entry in each.values())


# --- where it ends


def test_one_token(tiny: OpenAI) -> None:
    answer = tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=1, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert (answer.choices[0].message.content or "") == text(tiny, temperature=0, max_tokens=1)


def test_stop_strings(tiny: OpenAI) -> None:
    whole = text(tiny, temperature=0)
    stop = next(whole[at : at + 3] for at in range(8, len(whole)) if whole[at : at + 3].isascii())
    left = whole.partition(stop)[0]
    choice = chat(tiny, temperature=0, stop=["nowhere in it", stop])
    assert (choice.message.content, choice.finish_reason) == (left, "stop")
    chunks = tiny.chat.completions.create(
        model=MODEL, messages=ask(), max_tokens=30, temperature=0, stop=[stop], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == left


def test_stop_tokens_and_the_least_number_of_tokens(tiny: OpenAI, native: Native) -> None:
    wanted = native.token_id("C")
    bias = {str(wanted): 100}
    assert text(tiny, logit_bias=bias, max_tokens=5) == "CCCCC"
    choice = chat(tiny, logit_bias=bias, extra_body={"stop_token_ids": [wanted]})
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    assert choice.model_extra["stop_reason"] == wanted
    answer = tiny.chat.completions.create(
        model=MODEL,
        messages=ask(),
        max_tokens=30,
        logit_bias=bias,
        extra_body={"stop_token_ids": [wanted], "min_tokens": 6},
    )
    assert "C" not in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert (answer.choices[0].finish_reason, answer.usage.completion_tokens) == ("stop", 7)


def test_the_end_of_sequence(tiny: OpenAI, native: Native) -> None:
    bias = {str(native.token_id("<|im_end|>")): 100}
    choice = chat(tiny, logit_bias=bias)
    assert (choice.message.content, choice.finish_reason) == ("", "stop")
    choice = chat(tiny, logit_bias=bias, extra_body={"min_tokens": 4})
    assert choice.message.content
    assert choice.finish_reason == "stop"
    choice = chat(tiny, logit_bias=bias, extra_body={"ignore_eos": True})
    assert (choice.message.content, choice.finish_reason) == ("", "length")


def test_a_banned_token_never_comes(tiny: OpenAI) -> None:
    given: dict[str, Any] = {"model": MODEL, "messages": ask(), "max_tokens": 1, "temperature": 0}
    answer = tiny.chat.completions.create(**given, logprobs=True, top_logprobs=2, extra_body=IDS)
    assert answer.model_extra is not None
    [banned] = answer.model_extra["nvext"]["completion_token_ids"]
    assert answer.choices[0].logprobs is not None
    [entry] = answer.choices[0].logprobs.content or []
    assert text(tiny, **given) == entry.token
    assert text(tiny, **given, logit_bias={str(banned): -100}) == entry.top_logprobs[1].token


# --- memory


def test_what_was_asked_before_is_cached_until_it_is_cleared(tiny: OpenAI, native: Native) -> None:
    prompt = ask("A long question about the water and the sea. " * 10)

    def ask_it() -> tuple[int, int, str | None]:
        answer = tiny.chat.completions.create(model=MODEL, messages=prompt, max_tokens=8, temperature=0)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens or 0
        return answer.usage.prompt_tokens, cached, answer.choices[0].message.content

    def clear(name: str) -> Any:
        return httpx.post(f"{native.admin[name]}/clear_kv_blocks").raise_for_status().json()

    clear("worker")
    num_tokens, cached, said = ask_it()
    assert cached == 0
    full_blocks = (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert full_blocks > 100
    assert ask_it() == (num_tokens, full_blocks, said)
    assert clear("worker")["cleared_blocks"] >= full_blocks // BLOCK_SIZE
    assert ask_it() == (num_tokens, 0, said)
    assert ask_it() == (num_tokens, full_blocks, said)
    [cleared] = clear("frontend")
    assert (cleared["model"], cleared["process"]) == (MODEL, "worker")
    assert cleared["cleared_blocks"] >= full_blocks // BLOCK_SIZE
    assert ask_it() == (num_tokens, 0, said)


def test_a_salt_keeps_caches_apart(tiny: OpenAI) -> None:
    prompt = ask("What only one tenant may find again. " * 8)

    def cached(salt: str) -> int | None:
        answer = tiny.chat.completions.create(
            model=MODEL, messages=prompt, max_tokens=1, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("one") == 0
    assert cached("one") != 0
    assert cached("another") == 0


def test_less_memory_than_context(tiny: OpenAI, native: Native) -> None:
    """Who names no limit gets what there is; who names one that cannot be met is told."""
    assert KV_BLOCKS * BLOCK_SIZE < CONTEXT_LENGTH
    end = {str(native.token_id("<|im_end|>")): 100}
    answer = tiny.chat.completions.create(model=MODEL, messages=ask(), logit_bias=end)
    assert answer.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError) as caught:
        tiny.chat.completions.create(model=MODEL, messages=ask(), max_tokens=CONTEXT_LENGTH - 100)
    assert caught.value.param == "max_tokens"
    assert f"{KV_BLOCKS}" in caught.value.message


async def test_more_than_fits_at_once(tiny: OpenAI, atiny: AsyncOpenAI) -> None:
    """Together they need twice the blocks: some wait or begin again, and none says anything else."""
    asked = {"model": MODEL, "max_tokens": 200, "temperature": 0.0, "extra_body": {"ignore_eos": True}}

    def prompt(number: int) -> list[Any]:
        return ask(f"{number} " * 10)

    async def one(number: int) -> str | None:
        answer = await atiny.chat.completions.create(messages=prompt(number), **asked)
        return answer.choices[0].message.content

    together = await asyncio.gather(*map(one, range(12)))
    assert len(set(together)) == 12
    for number in (0, 5, 11):
        alone = tiny.chat.completions.create(messages=prompt(number), **asked)  # type: ignore[call-overload]
        assert alone.choices[0].message.content == together[number]


# --- plug-ins


def test_a_logits_processor_by_name(tiny: OpenAI) -> None:
    """No token twice, where they come several times without it."""
    asked: dict[str, Any] = {"model": MODEL, "messages": ask(), "max_tokens": 60, "temperature": 0}
    banning = {"logits_processors": [{"name": "ban_repeated_ngrams", "args": {"n": 1}}]}
    found = []
    for more in ({}, banning):
        answer = tiny.chat.completions.create(**asked, extra_body={**IDS, **more})
        assert answer.model_extra is not None
        found.append(answer.model_extra["nvext"]["completion_token_ids"])
    plain, banned = found
    assert len(set(plain)) < len(plain)
    assert len(set(banned)) == len(banned)


@pytest.mark.parametrize(
    ("processor", "status"),
    [("no_such_processor", 400), ({"name": "ban_repeated_ngrams", "args": {"n": 0}}, 400), ({}, 400)],
)
def test_a_logits_processor_that_cannot_be_had(tiny: OpenAI, processor: object, status: int) -> None:
    with pytest.raises(openai.APIStatusError, match="processor") as caught:
        chat(tiny, extra_body={"logits_processors": [processor]})
    assert caught.value.status_code == status
