"""An answer as a stream: events of plain tokens and of all others, usage, echo, errors, back-pressure."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.unit.frontend.answer_lab import WORDS, Live, Watch, encode, make_plan, text_of, vocabulary

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs, Usage
from kvolt.core.errors import DeadlineExceeded, Overloaded, WorkerLost
from kvolt.frontend.parsers.calls import HermesParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.reasoning import ThinkParser

LENGTH = FinishReason.LENGTH
A, B, C, D = WORDS[:4]


def last(token: int, **fields: Any) -> Delta:
    return Delta((token,), finish=LENGTH, **fields)


def say(live: Live, text: str, fast: bool, finish: FinishReason = LENGTH) -> None:
    """All of a text: the first token and the last as deltas, what is between as steps or as deltas."""
    first, *between, end = encode(text)
    live.give(Delta((first,)))
    for token in between:
        if fast:
            live.step(token)
        else:
            live.give(Delta((token,), cached_tokens=0))  # says more than a token: the long way
    live.give(Delta((end,), finish=finish))
    live.receivers[0].on_end(None)


# --- the two ways of a token


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("include_usage", [True, False])
async def test_both_ways_write_the_same_bytes(chat: bool, include_usage: bool) -> None:
    texts = [' the "water"\n of\tit \\ é€😀 done', "ab é", " the of and to in is"]
    for text in texts:
        fast, slow = (Live(make_plan(chat, include_usage=include_usage)) for _ in range(2))
        say(fast, text, True)
        say(slow, text, False)
        assert await fast.body() == await slow.body()
        assert await fast.text() == text


async def test_random_tokens_by_steps_deltas_and_merged_deltas_are_the_batch_decoding() -> None:
    rng = random.Random(4)
    for _ in range(60):
        tokens = [rng.choice((rng.choice(WORDS), rng.randrange(259))) for _ in range(rng.randint(2, 30))]
        live = Live(make_plan())
        position = 0
        while position < len(tokens):
            size = min(rng.choice((1, 1, 1, 3)), len(tokens) - position)
            part = tuple(tokens[position : position + size])
            position += size
            if size == 1 and position < len(tokens) and rng.random() < 0.7:
                live.step(part[0])
            else:
                live.give(Delta(part, finish=LENGTH if position == len(tokens) else None))
        live.receivers[0].on_end(None)
        assert await live.text() == vocabulary().decode(tokens)
        assert live.answer.states[0].choice.num_tokens == len(tokens)


async def test_a_plain_token_goes_past_everything_and_is_counted_all_the_same() -> None:
    watch = Watch()
    live = Live(make_plan(watch=watch, include_usage=True))
    live.give(Delta((A,)))
    assert live.receivers[0].write is not None
    state = live.answer.states[0]
    for token in (B, C):
        live.step(token)
    live.give(Delta((B, C)))  # merged on the way, and nothing but tokens: an event each
    assert state.choice.num_tokens == 1  # the others went past it
    live.give(last(D))
    live.receivers[0].on_end(None)
    events = await live.events()
    assert events[-2]["usage"]["completion_tokens"] == 6
    assert [choice["delta"]["content"] for choice in await live.choices()] == [
        text_of(token) for token in (A, B, C, B, C, D)
    ]
    assert watch.num_firsts == 1
    assert sum(number for _, number in watch.gaps) == 5  # one between each two tokens


async def test_a_token_that_is_no_text_by_itself_is_observed_once() -> None:
    watch = Watch()
    live = Live(make_plan(watch=watch))
    half, rest = encode("é")
    live.give(Delta((A,)))
    live.step(half)
    assert live.receivers[0].write is None
    live.step(rest)
    live.give(Delta((B, half, rest)))
    assert sum(number for _, number in watch.gaps) == 5
    assert await live.text() == text_of(A, half, rest, B, half, rest)
    assert live.receivers[0].write is not None


async def test_a_special_token_says_nothing() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)))
    live.step(0)
    live.step(B)
    live.give(last(C))
    assert len(await live.choices()) == 3
    assert live.answer.states[0].choice.num_tokens == 4


async def test_an_event_longer_than_any_table() -> None:
    live = Live(make_plan(), True)
    live.answer.spec.vocabulary.plain_json[A]  # known
    live.give(Delta((A,)))
    receiver = live.receivers[0]
    receiver.plain_json = {A: b"x" * 5000, B: b"y" * 4000}
    live.step(A)
    live.give(Delta((A, B)))
    assert await live.text() == text_of(A) + 2 * "x" * 5000 + "y" * 4000


@pytest.mark.parametrize(
    ("chunked", "fields"),
    [
        (False, {}),
        (True, {"with_logprobs": True}),
        (True, {"continuous_usage": True}),
        (True, {"stop": ("zz",)}),
        (True, {"num_choices": 2}),
        (True, {"skip_special_tokens": False}),
        (True, {"extra_fields": frozenset({"completion_token_ids"})}),
        (True, {"new_parser": lambda: ParserChain(None, HermesParser())}),
    ],
    ids=lambda value: next(iter(value), "nothing") if isinstance(value, dict) else str(value),
)
async def test_who_may_not_take_the_short_way(chunked: bool, fields: dict[str, Any]) -> None:
    live = Live(make_plan(**fields), chunked)
    live.give(Delta((A,)))
    assert live.receivers[0].write is None
    live.step(B)
    assert await live.text() == text_of(A, B)
    assert live.answer.states[0].choice.num_tokens == 2


async def test_one_write_per_tick() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)), Delta((B,)))
    live.step(C)
    assert live.wire.num_writes == 0
    await asyncio.sleep(0)
    assert live.wire.num_writes == 1
    live.give(last(D))
    live.receivers[0].on_end(None)
    await asyncio.sleep(0)
    assert live.wire.num_writes == 2
    assert live.answer.done.done()


# --- what events say


async def test_the_role_comes_once_and_the_end_with_the_last_text() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)), Delta((B,)), Delta((C, D), finish=LENGTH))
    choices = await live.choices()
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None, None]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]
    assert [choice["delta"]["content"] for choice in choices] == [text_of(token) for token in (A, B, C, D)]


async def test_an_answer_of_nothing_has_a_role_and_an_end() -> None:
    live = Live(make_plan())
    live.give(Delta((2,), finish=FinishReason.STOP))
    (choice,) = await live.choices()
    assert choice["delta"] == {"role": "assistant", "content": ""}
    assert choice["finish_reason"] == "stop"


async def test_usage_only_when_asked_for_and_null_before_the_end() -> None:
    plain = Live(make_plan())
    plain.give(Delta((A,)), last(B))
    plain.receivers[0].on_end(None)
    assert not any("usage" in event for event in (await plain.events())[:-1])
    live = Live(make_plan(include_usage=True))
    live.give(Delta((A,), cached_tokens=2))
    live.step(B)
    live.give(last(C, usage=Usage(3, 3)))
    live.receivers[0].on_end(None)
    *chunks, told, done = await live.events()
    assert [chunk["usage"] for chunk in chunks] == [None] * 3
    assert (told["choices"], done) == ([], "[DONE]")
    assert told["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 2},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_continuous_usage_counts_as_it_goes() -> None:
    live = Live(make_plan(continuous_usage=True, include_usage=True))
    live.give(Delta((A,)))
    live.step(B)
    live.give(last(C))
    live.receivers[0].on_end(None)
    *chunks, _ = await live.events()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 3]


async def test_cached_tokens_of_a_prompt_count_once_for_all_its_choices() -> None:
    live = Live(make_plan(num_choices=2, include_usage=True))
    for index in range(2):
        live.give(Delta((A,), index=index, cached_tokens=3), Delta((B,), index=index, finish=LENGTH))
    assert (await live.events())[-2]["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_several_choices_and_several_prompts() -> None:
    live = Live(make_plan(chat=False, prompts=2, num_choices=2, include_usage=True))
    for prompt in range(2):
        for index in range(2):
            live.give(Delta((WORDS[prompt],), index=index), prompt=prompt)
            live.give(Delta((WORDS[4 + index],), index=index, finish=LENGTH), prompt=prompt)
        if prompt == 0:
            assert not live.answer.done.done()
    assert live.answer.done.done()
    for prompt in range(2):
        for index in range(2):
            assert await live.text(2 * prompt + index) == text_of(WORDS[prompt], WORDS[4 + index])
    usage = (await live.events())[-2]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (6, 8)
    ended = [choice["index"] for choice in await live.choices() if choice["finish_reason"]]
    assert sorted(ended) == [0, 1, 2, 3]


async def test_an_unrequested_choice_is_ignored() -> None:
    live = Live(make_plan())
    live.give(Delta((A,), index=1), Delta((A,), index=-1), Delta((B,)))
    assert await live.text() == text_of(B)
    assert len(await live.events()) == 1


async def test_echo_comes_first_once_per_choice() -> None:
    live = Live(make_plan(chat=False, prompts=2, num_choices=2, echo=["one", "two"]))
    live.give(Delta((A,), index=1))
    live.give(Delta((B,)), prompt=1)
    whole = ["one", "one" + text_of(A), "two" + text_of(B), "two"]
    assert [await live.text(index) for index in range(4)] == whole
    live.answer.send_headers()
    assert await live.text(0) == "one"


async def test_echo_brings_what_is_known_of_the_prompt() -> None:
    plan = make_plan(chat=False, echo=[text_of(A, B)], with_logprobs=True)
    plan.prompts = [(A, B)]
    live = Live(plan)
    live.give(Delta((C,), logprobs=(TokenLogprobs(C, -1.0),), prompt_logprobs=(None, TokenLogprobs(B, -0.5))))
    echoed, said = [choice["logprobs"] for choice in await live.choices()]
    assert echoed["token_logprobs"] == [None, -0.5]
    assert echoed["text_offset"] == [0, len(text_of(A))]
    assert said["text_offset"] == [len(text_of(A, B))]


async def test_offsets_count_from_the_beginning_of_the_echo() -> None:
    live = Live(make_plan(chat=False, echo=["one"], with_logprobs=True))
    for token in (A, B, C):
        live.give(Delta((token,), logprobs=(TokenLogprobs(token, -0.5),)))
    told = [choice["logprobs"]["text_offset"] for choice in (await live.choices())[1:]]
    lengths = [3, 3 + len(text_of(A)), 3 + len(text_of(A, B))]
    assert told == [[length] for length in lengths]


async def test_annotations_come_before_everything() -> None:
    live = Live(make_plan(annotations=[("request_id", "r"), ("token_ids", [1, 2])]))
    live.give(Delta((A,)))
    first, second, third, _ = (await live.body()).split(b"\n\n")
    assert first == b'event: request_id\n: "r"'
    assert second == b"event: token_ids\n: [1,2]"
    assert third.startswith(b"data: {")


async def test_extras_come_with_the_last_event() -> None:
    wanted = frozenset({"worker_id", "timing", "completion_token_ids", "stop_reason"})
    live = Live(make_plan(extra_fields=wanted, timing=lambda: {"ttft_ms": 1.5}))
    live.give(Delta((A,)))
    live.step(B)
    live.give(Delta((C,), finish=FinishReason.STOP, stop_reason=C))
    live.receivers[0].on_end(None)
    *_, told, done = await live.events()
    assert done == "[DONE]"
    assert told["choices"] == []
    assert told["nvext"] == {
        "worker_id": {"decode_worker_id": "w1"},
        "timing": {"ttft_ms": 1.5},
        "completion_token_ids": [A, B, C],
        "stop_reason": C,
    }
    assert "usage" not in told


async def test_log_probabilities_stay_with_their_text() -> None:
    def entry(token: int) -> tuple[TokenLogprobs, ...]:
        return (TokenLogprobs(token, -0.5),)

    live = Live(make_plan(with_logprobs=True))
    half, rest = encode("é")
    live.give(Delta((A,), logprobs=entry(A)))
    live.give(Delta((half,), logprobs=entry(half)))
    live.give(Delta((rest,), logprobs=entry(rest), finish=LENGTH))
    first, second = await live.choices()
    assert [each["token"] for each in first["logprobs"]["content"]] == [text_of(A)]
    assert len(second["logprobs"]["content"]) == 2  # both halves, with the character they make
    said = [byte for each in second["logprobs"]["content"] for byte in each["bytes"]]
    assert bytes(said).decode() == "é"


async def test_log_probabilities_without_text_come_with_the_end() -> None:
    live = Live(make_plan(with_logprobs=True, new_parser=lambda: ParserChain(None, HermesParser())))
    tokens = encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>')
    for token in tokens[:-1]:
        live.give(Delta((token,), logprobs=(TokenLogprobs(token, -0.5),)))
    live.give(Delta(tokens[-1:], finish=FinishReason.LENGTH, logprobs=(TokenLogprobs(tokens[-1], -0.5),)))
    *_, told = await live.choices()
    assert told["delta"] == {}
    assert len(told["logprobs"]["content"]) == len(tokens)


async def test_reasoning_and_tool_calls() -> None:
    live = Live(make_plan(new_parser=lambda: ParserChain(ThinkParser(starts_inside=True), HermesParser())))
    said = 'hm</think>ok<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    say(live, said + "!", True, FinishReason.STOP)
    deltas = [choice["delta"] for choice in await live.choices()]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
    assert await live.text() == "ok"
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert calls[0] == {
        "index": 0,
        "id": "call_0",
        "type": "function",
        "function": {"name": "f", "arguments": ""},
    }
    assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    assert len(calls) > 3  # as they came
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert (await live.choices())[-1]["finish_reason"] == "tool_calls"
    named = Live(make_plan(named_call=True, new_parser=lambda: ParserChain(None, HermesParser())))
    say(named, said + "!", True, FinishReason.STOP)
    assert (await named.choices())[-1]["finish_reason"] == "stop"


# --- ends


async def test_a_stop_string_ends_the_journey() -> None:
    live = Live(make_plan(stop=("water",)))
    for token in encode(" the water of"):
        live.step(token)
    assert live.journeys[0].cancelled == 1
    assert live.answer.done.done()
    assert await live.text() == " the "
    assert (await live.choices())[-1]["finish_reason"] == "stop"
    assert (await live.choices())[-1]["stop_reason"] == "water"
    assert (await live.events())[-1] == "[DONE]"


async def test_the_worker_stops_when_the_last_choice_has_ended() -> None:
    """A stop string ended one, the worker the other: the worker still thinks that it has one to go on with."""
    for first, second in ((0, 1), (1, 0)):
        live = Live(make_plan(num_choices=2, stop=("water",)))
        live.give(Delta(encode(" the water"), index=first))
        assert not live.answer.done.done()
        live.give(Delta(encode(" of"), index=first))  # it does not know yet
        live.give(Delta(encode(" it"), index=second, finish=LENGTH))
        assert live.answer.done.done()
        assert live.journeys[0].cancelled == 1
        assert await live.text(first) == " the "
        assert await live.text(second) == " it"


async def test_an_end_by_the_worker_is_not_cancelled() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)), last(B))
    assert not live.answer.done.done()
    live.receivers[0].on_end(None)
    assert live.answer.done.done()
    assert live.journeys[0].cancelled == 0


async def test_an_error_before_the_head_is_for_whoever_waits() -> None:
    live = Live(make_plan(prompts=2))
    live.receivers[0].on_end(Overloaded("full"))
    with pytest.raises(Overloaded):
        await live.answer.done
    assert await live.body() == b""
    assert live.answer.failure is None
    assert [journey.cancelled for journey in live.journeys] == [1, 1]
    live.receivers[1].on_end(WorkerLost("gone"))  # nobody hears of it
    live.answer.send_headers()  # headers that waited too long must not follow
    assert await live.body() == b""


async def test_an_error_after_the_head_is_an_event() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)))
    live.step(B)
    error = WorkerLost("gone")
    live.receivers[0].on_end(error)
    await live.answer.done
    assert live.answer.failure is error
    *_, told = await live.events()
    assert told["error"]["code"] == "worker_unreachable"  # and no [DONE]: it is not
    assert live.answer.states[0].choice.num_tokens == 2


async def test_a_deadline_keeps_the_text_of_all_prompts_and_what_was_held_back() -> None:
    live = Live(make_plan(chat=False, prompts=2, stop=(text_of(A, B, C),), echo=["one ", "two "]))
    live.give(Delta((A,)), Delta((B,)))
    error = DeadlineExceeded("too slow", stage="between", after_s=30.0)
    for receiver in live.receivers:
        receiver.on_end(error)
    await live.answer.done
    assert live.answer.failure is None
    assert await live.text(0) == "one " + text_of(A, B)
    assert await live.text(1) == "two "
    *_, last, done = await live.events()
    assert last["nvext"] == {"ended_by": {"reason": "deadline", "stage": "between"}}
    assert done == "[DONE]"


async def test_a_deadline_without_any_text_is_an_error() -> None:
    live = Live(make_plan())
    live.answer.send_headers()
    error = DeadlineExceeded("too slow", stage="first", after_s=60.0)
    live.receivers[0].on_end(error)
    await live.answer.done
    assert live.answer.failure is error
    assert [event["error"]["code"] for event in await live.events()] == ["timeout"]


async def test_opening_early_sends_the_head_and_turns_errors_into_events() -> None:
    live = Live(make_plan())
    live.answer.send_headers()
    assert live.writer.head_sent
    assert await live.body() == b""
    live.answer.send_headers()
    live.receivers[0].on_end(Overloaded("full"))
    assert (await live.events())[0]["error"]["code"] == "overloaded"


async def test_one_prompt_that_fails_ends_the_others() -> None:
    live = Live(make_plan(chat=False, prompts=2))
    live.give(Delta((A,)), prompt=0)
    live.give(Delta((A,)), prompt=1)
    live.receivers[1].on_end(WorkerLost("gone"))
    assert live.answer.done.done()
    assert live.journeys[0].cancelled
    assert (await live.events())[-1]["error"]


async def test_back_pressure_reaches_all_journeys() -> None:
    live = Live(make_plan(chat=False, prompts=2))
    live.writer.on_pause()
    assert [journey.held for journey in live.journeys] == [1, 1]
    live.writer.on_resume()
    assert [journey.held for journey in live.journeys] == [0, 0]


async def test_a_client_that_left_is_written_nothing() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)))
    before = await live.body()
    live.step(B)
    live.writer.disconnected = True
    live.step(C)
    live.answer.cancel()
    assert live.answer.states[0].choice.num_tokens == 3  # made, if not read
    assert live.receivers[0].write is None
    live.give(last(D))
    assert await live.body() == before


async def test_an_answer_without_an_end_is_an_error() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)))
    live.receivers[0].on_end(None)
    assert (await live.events())[-1]["error"]["code"] == "engine_failed"


async def test_it_fails_once() -> None:
    live = Live(make_plan())
    live.give(Delta((A,)))
    live.answer.fail(WorkerLost("gone"))
    live.answer.fail(WorkerLost("gone again"))
    events = await live.events()  # which also checks that nothing came after the last chunk
    assert [event for event in events if "error" in event] == events[-1:]


async def test_a_stop_string_before_min_tokens_is_text() -> None:
    live = Live(make_plan(stop=(text_of(B),), min_tokens=2))
    for token in (A, B, C):
        live.give(Delta((token,)))
    live.give(Delta((B,)))
    assert await live.text() == text_of(A, B, C)
    assert (await live.choices())[-1]["finish_reason"] == "stop"
