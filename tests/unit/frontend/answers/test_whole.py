"""An answer in one piece: the same text as a stream, told at the end."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.unit.frontend.answer_lab import (
    WORDS,
    Live,
    Watch,
    Whole,
    encode,
    make_plan,
    shown,
    text_of,
)

from kvolt.core.delta import Delta, FinishReason, StageTimes, TokenLogprobs, Usage
from kvolt.core.errors import DeadlineExceeded, EngineFailed, KvoltError, Overloaded, WorkerLost
from kvolt.frontend.answers.answer import journey_fields
from kvolt.frontend.parsers.calls import HermesParser
from kvolt.frontend.parsers.chain import ParserChain
from kvolt.frontend.parsers.port import Piece
from kvolt.frontend.parsers.reasoning import ThinkParser

A, B, C, D = WORDS[:4]
LENGTH = FinishReason.LENGTH
STOP = FinishReason.STOP


async def test_tokens_are_kept_and_turned_into_text_at_the_end() -> None:
    watch = Watch()
    whole = Whole(make_plan(watch=watch))
    whole.give(Delta((A,), cached_tokens=2))
    whole.step(B)
    whole.step(C)
    assert whole.answer.states[0].choice.num_tokens == 0
    whole.give(Delta((D,), finish=LENGTH, usage=Usage(3, 4)))
    assert not whole.answer.done.done()
    whole.end()
    await whole.answer.done
    body = whole.body
    assert (body["id"], body["object"], body["model"]) == ("chatcmpl-r", "chat.completion", "m")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": text_of(A, B, C, D), "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    assert body["usage"]["completion_tokens"] == 4
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert "nvext" not in body
    assert (watch.num_firsts, sum(number for _, number in watch.gaps)) == (1, 3)


@pytest.mark.parametrize("stop", [(), ("of",), (" the", "é")], ids=str)
@pytest.mark.parametrize("finish", [LENGTH, STOP])
@pytest.mark.parametrize("with_logprobs", [False, True])
@pytest.mark.parametrize("include_stop", [False, True])
async def test_the_same_as_a_stream(
    stop: tuple[str, ...], finish: FinishReason, with_logprobs: bool, include_stop: bool
) -> None:
    rng = random.Random(8)
    for _ in range(25):
        tokens = [rng.choice((rng.choice(WORDS[:8]), rng.randrange(259))) for _ in range(rng.randint(1, 20))]
        plan = make_plan(stop=stop, include_stop=include_stop, with_logprobs=with_logprobs)
        whole, live = Whole(plan), Live(plan)
        for position, token in enumerate(tokens):
            delta = Delta(
                (token,),
                finish=finish if position == len(tokens) - 1 else None,
                logprobs=(TokenLogprobs(token, -0.5),) if with_logprobs else None,
            )
            for answer in (whole, live):
                if not answer.answer.done.done():
                    answer.give(delta)
        for answer in (whole, live):
            if not answer.answer.done.done():
                answer.answer.receivers[0].on_end(None)
        (choice,) = whole.choices
        assert shown(choice) == await live.text()
        told = await live.choices()
        assert choice["finish_reason"] == told[-1]["finish_reason"]
        assert choice.get("stop_reason") == told[-1].get("stop_reason")
        counts = [state.choice.num_tokens for each in (whole, live) for state in each.answer.states]
        assert counts[0] == counts[1]
        if with_logprobs:
            streamed = [entry for each in told if each["logprobs"] for entry in each["logprobs"]["content"]]
            assert choice["logprobs"]["content"] == streamed


async def test_a_stop_string_ends_the_journey_and_an_end_by_the_worker_does_not() -> None:
    whole = Whole(make_plan(stop=("water",)))
    whole.give(Delta(encode(" the")))
    whole.give(Delta(encode(" water of")))
    assert whole.answer.done.done()
    assert whole.journeys[0].cancelled == 1
    assert shown(whole.choices[0]) == " the "
    assert whole.choices[0]["stop_reason"] == "water"
    other = Whole(make_plan(stop=("water",)))
    other.give(Delta((A,), finish=LENGTH))
    assert not other.answer.done.done()
    other.end()
    assert other.answer.done.done()
    assert other.journeys[0].cancelled == 0


async def test_the_worker_stops_when_the_last_choice_has_ended() -> None:
    for first, second in ((0, 1), (1, 0)):
        whole = Whole(make_plan(num_choices=2, stop=("water",)))
        whole.give(Delta(encode(" the water"), index=first))
        whole.give(Delta(encode(" of"), index=first))
        assert not whole.answer.done.done()
        whole.give(Delta(encode(" it"), index=second, finish=LENGTH))
        assert whole.answer.done.done()
        assert whole.journeys[0].cancelled == 1
        assert [shown(choice) for choice in whole.choices][first] == " the "


async def test_several_prompts_and_choices_in_the_order_of_their_indices() -> None:
    whole = Whole(make_plan(chat=False, prompts=2, num_choices=2))
    for prompt in (1, 0):
        for index in (1, 0):
            token = WORDS[2 * prompt + index]
            whole.give(Delta((token,), index=index, finish=LENGTH), prompt=prompt)
        whole.end(prompt)
    assert whole.answer.done.done()
    assert [choice["index"] for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in whole.choices] == [text_of(token) for token in (A, B, C, D)]
    assert whole.body["usage"]["prompt_tokens"] == 6


async def test_reasoning_and_tool_calls() -> None:
    whole = Whole(make_plan(new_parser=lambda: ParserChain(ThinkParser(starts_inside=True), HermesParser())))
    call = '<tool_call>{"name": "%s", "arguments": {"a": 1}}</tool_call>'
    for token in encode("hm</think>ok" + call % "f" + call % "g"):
        whole.step(token)
    whole.give(Delta((2,), finish=STOP))
    whole.end()
    (choice,) = whole.choices
    message = choice["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "ok")
    assert [(each["id"], each["function"]["name"]) for each in message["tool_calls"]] == [
        ("call_0", "f"),
        ("call_1", "g"),
    ]
    assert {each["function"]["arguments"] for each in message["tool_calls"]} == {'{"a": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    assert whole.body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def known(*tokens: int) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(token, -0.5) for token in tokens)


async def test_echo_and_the_log_probabilities_of_its_prompt() -> None:
    plan = make_plan(chat=False, echo=["abc"], with_logprobs=True)
    plan.prompts = [encode("abc")]
    whole = Whole(plan)
    _first, second, third = encode("abc")
    whole.give(
        Delta((A,), finish=LENGTH, logprobs=known(A), prompt_logprobs=(None, *known(second, third))),
    )
    whole.end()
    (choice,) = whole.choices
    assert choice["text"] == "abc" + text_of(A)
    told = choice["logprobs"]
    assert told["tokens"] == ["a", "b", "c", text_of(A)]
    assert told["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert told["top_logprobs"][0] is None
    assert told["text_offset"] == [0, 1, 2, 3]


async def test_echo_without_them_leaves_room_for_the_prompt() -> None:
    whole = Whole(make_plan(chat=False, echo=["abc"], with_logprobs=True))
    whole.give(Delta((A,), finish=LENGTH, logprobs=known(A)))
    whole.end()
    assert whole.choices[0]["logprobs"]["text_offset"] == [3]


async def test_extras() -> None:
    wanted = frozenset({"worker_id", "timing", "completion_token_ids", "stop_reason"})
    whole = Whole(make_plan(extra_fields=wanted, timing=lambda: {"ttft_ms": 1.500000000037}))
    whole.step(A)
    whole.give(Delta((B,), finish=STOP, stop_reason=B))
    whole.end()
    assert whole.body["nvext"] == {
        "worker_id": {"decode_worker_id": "w1"},
        "timing": {"ttft_ms": 1.5},
        "completion_token_ids": [A, B],
        "stop_reason": B,
    }


async def test_wait_and_retries_are_in_the_timing_and_in_the_log_line() -> None:
    whole = Whole(make_plan(extra_fields=frozenset({"timing"})))
    (journey,) = whole.journeys
    journey.stages = StageTimes(queue_ms=3000.0, prefill_ms=1500.4)
    journey.instances.append(SimpleNamespace(id="w2", process="worker-2"))
    journey.prefill_decision = SimpleNamespace(instance=SimpleNamespace(id="p1", process="prefill-0"))
    journey.num_retries = 1
    journey.decode_wait_s = 0.5
    whole.give(Delta((B,), finish=STOP))
    whole.end()
    assert whole.body["nvext"]["timing"] == {
        "prefill_wait_time_ms": 3000.0,
        "prefill_time_ms": 1500.4,
        "decode_wait_time_ms": 500.0,
        "retries": 1,
    }
    assert journey_fields(whole.answer.journeys) == {
        "prefill_worker": "prefill-0",
        "prefill_instance": "p1",
        "worker": "worker-1,worker-2",
        "instance": "w1,w2",
        "queue_s": 3.0,
        "prefill_s": 1.5,
        "decode_queue_s": 0.5,
        "retries": 1,
    }


async def test_only_the_first_error_is_reported() -> None:
    whole = Whole(make_plan(chat=False, prompts=2))
    whole.answer.receivers[1].on_end(Overloaded("full"))
    whole.answer.receivers[0].on_end(WorkerLost("gone"))
    with pytest.raises(Overloaded):
        await whole.answer.done


@pytest.mark.parametrize("fields", [{}, {"stop": ("zz",)}, {"with_logprobs": True}], ids=str)
async def test_a_deadline_keeps_the_text_there_is(fields: dict[str, Any]) -> None:
    whole = Whole(make_plan(chat=False, num_choices=2, **fields))
    whole.give(Delta((A,)), Delta((B,), index=1), Delta((C,), index=1, finish=STOP))
    whole.answer.receivers[0].on_end(DeadlineExceeded("too slow", stage="total", after_s=600.0))
    assert whole.answer.done.exception() is None
    assert [(shown(choice), choice["finish_reason"]) for choice in whole.choices] == [
        (text_of(A), "length"),
        (text_of(B), "stop"),
    ]
    assert whole.body["nvext"] == {"ended_by": {"reason": "deadline", "stage": "total"}}


async def test_a_deadline_without_any_text_is_an_error() -> None:
    whole = Whole(make_plan(prompts=2))
    whole.answer.receivers[0].on_end(DeadlineExceeded("too slow", stage="first", after_s=60.0))
    assert isinstance(whole.answer.done.exception(), DeadlineExceeded)


@pytest.mark.parametrize("fields", [{}, {"stop": ("zz",)}, {"with_logprobs": True}], ids=str)
async def test_an_unrequested_choice_is_ignored(fields: dict[str, Any]) -> None:
    whole = Whole(make_plan(**fields))
    whole.give(Delta((A,), index=1), Delta((A,), index=-1), Delta((B,), finish=LENGTH))
    whole.end()
    assert [shown(choice) for choice in whole.choices] == [text_of(B)]


@pytest.mark.parametrize("finish", [None, FinishReason.CANCELLED])
async def test_an_answer_that_did_not_end_well_is_no_answer(finish: FinishReason | None) -> None:
    whole = Whole(make_plan())
    whole.give(Delta((A,), finish=finish))
    whole.end()
    assert isinstance(whole.answer.done.exception(), EngineFailed)


async def test_a_parser_that_raises_costs_its_own_answer_only(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        passes_all = False

        def feed(self, text: str) -> list[Piece]:
            raise ZeroDivisionError

        def finish(self) -> list[Piece]:
            return []

    whole = Whole(make_plan(new_parser=Broken))
    whole.give(Delta((A,)))
    error = whole.answer.done.exception()
    assert isinstance(error, KvoltError)
    assert "ZeroDivisionError" in caplog.text
