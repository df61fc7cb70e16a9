"""Chat and completions from HTTP bytes to HTTP bytes, through a worker and back, on virtual time."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import (
    ARGUMENTS,
    MODEL,
    Answer,
    Frontend,
    Lab,
    RunningWorker,
    ScriptedEngine,
    is_empty,
    sim,
    until,
)
from tests.unit.frontend.serving import TOOL, WHOLE, Answering, saying, served
from tokenizers import Tokenizer

from kvolt.core.delta import Delta, FinishReason, StepOutput, TokenLogprobs
from kvolt.core.endpoints import Instance, encode_instance
from kvolt.core.errors import ErrorInfo, InvalidRequest
from kvolt.core.hashing import local_hashes, request_seed, sequence_hashes
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request, Sampling
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.engines.sim.model import sim_card, word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.generate import GenerateOptions
from kvolt.frontend.metrics import request_log
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.openai_api.generation import GenerationOptions
from kvolt.frontend.openai_api.headers import NO_HINTS, RequestHints
from kvolt.frontend.tokenization import preprocess
from kvolt.frontend.tokenization.token_cache import CachedEncoder
from kvolt.frontend.worker_request import build_request, check_prompt_logprobs
from kvolt.runtime.http.server import HttpLimits
from kvolt.runtime.tasks import Scope
from kvolt.testing import InlineBlocking


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


CHAT = "<|im_start|>user\nthe water<|im_end|>\n<|im_start|>assistant\n"
"""The prompt that `edge.chat` asks by default, as the model's template renders it."""


def expected_text(seed: int, num_tokens: int, prompt: str | list[int] = "the water") -> str:
    tokenizer = sim().card.tokenizer_json
    prompt_ids = Tokenizer.from_buffer(tokenizer).encode(prompt).ids if isinstance(prompt, str) else prompt
    return Vocabulary(tokenizer).decode(answer_tokens(prompt_ids, seed, num_tokens, word_token_ids()))


# --- what is asked of the worker


CARD = sim_card("m", 200, 16)


def build(
    prompt: tuple[int, ...],
    said: RequestHints = NO_HINTS,
    most: int | None = None,
    lora: str | None = None,
    **options: Any,
) -> Request:
    wanted = GenerationOptions(sampling=Sampling(), **options)
    return build_request(RequestId("r"), CARD, prompt, wanted, said, default_max_tokens=most, lora=lora)


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 48, 100])
@pytest.mark.parametrize(("salt", "lora"), [(None, None), ("tenant", None), (None, "sql"), ("tenant", "sql")])
def test_the_hashes_are_those_of_core(num_tokens: int, salt: str | None, lora: str | None) -> None:
    prompt = tuple(range(3, 3 + num_tokens))
    request = build(prompt, RequestHints(salt=salt), lora=lora)
    local = local_hashes(prompt, 16, request_seed(lora, salt))
    assert (request.block_size, request.token_ids, request.salt) == (16, prompt, salt)
    assert (request.model, request.lora) == (CARD.name, lora)
    assert list(request.sequence_hashes) == list(sequence_hashes(local))
    assert len(request.sequence_hashes) == num_tokens // 16


def test_without_a_limit_there_is_the_room_that_is_left() -> None:
    assert build((5, 6, 7)).stop.max_tokens == 197
    assert build((5, 6, 7), most=64).stop.max_tokens == 64
    assert build((1,) * 150, most=64).stop.max_tokens == 50
    assert build((1,) * 150, most=-10).stop.max_tokens == 1, "the engine says that even that is too much"
    assert build((1,) * 199).stop.max_tokens == 1
    stop = build((5,), max_tokens=9, min_tokens=3, stop_token_ids=(7,), ignore_eos=True).stop
    assert (stop.max_tokens, stop.min_tokens, stop.stop_token_ids, stop.ignore_eos) == (9, 3, (7,), True)


def test_the_context_is_a_limit() -> None:
    assert build((1,) * 100, max_tokens=100).stop.max_tokens == 100
    for num_prompt, max_tokens, param in (
        (100, 101, "max_tokens"),
        (200, 1, "prompt"),
        (200, None, "prompt"),
        (201, None, "prompt"),
        (1, 10**30, "max_tokens"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            build((1,) * num_prompt, max_tokens=max_tokens)
        assert "200" in caught.value.message
        assert str(num_prompt) in caught.value.message
        assert caught.value.fields == {"param": param, "code": "context_length_exceeded"}
        requested = f" and {max_tokens} output tokens were requested"
        assert ("were requested" in caught.value.message) == (max_tokens is not None)
        assert max_tokens is None or requested in caught.value.message
    with pytest.raises(InvalidRequest) as caught:
        build(())
    assert caught.value.fields["param"] == "prompt"


def test_only_so_many_log_probabilities_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvolt.frontend.worker_request._MAX_PROMPT_LOGPROBS", 100)
    check_prompt_logprobs(20, 4)
    check_prompt_logprobs(10, 4, num_choices=2)
    with pytest.raises(InvalidRequest, match="in 3 choices"):
        check_prompt_logprobs(10, 4, num_choices=3)
    check_prompt_logprobs(1000, None)
    with pytest.raises(
        InvalidRequest, match="21 prompt tokens with 4 alternatives each require 105"
    ) as caught:
        check_prompt_logprobs(21, 4)
    assert caught.value.fields["param"] == "prompt_logprobs"


def test_one_prompt_of_a_batch_that_is_too_long() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        refused = await edge.complete(prompt=["the", "x" * 600, "water"], max_tokens=1)
        assert refused.status == 400
        assert "the prompt has 600 tokens and 1 output tokens" in refused.json["error"]["message"]

    served(body)


def test_a_batch_is_tokenized_off_the_loop_when_all_of_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []
    encode = CachedEncoder.encode

    def watched(self: CachedEncoder, text: str, by_words: bool = True, **options: int) -> tuple[int, ...]:
        ran.append(by_words)
        return encode(self, text, by_words, **options)

    monkeypatch.setattr(CachedEncoder, "encode", watched)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert (await edge.complete(prompt=["the water " * 10] * 100, max_tokens=1)).status == 200
        assert set(ran) == {True}
        ran.clear()
        assert (await edge.complete(prompt=["the water " * 20] * 100, max_tokens=1)).status == 200
        assert set(ran) == {False}

    served(body)


# --- answers


def test_a_completion_whole_and_streamed() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = await edge.complete(max_tokens=12, seed=5)
        assert whole.status == 200
        assert whole.json["object"] == "text_completion"
        assert whole.json["id"] == "cmpl-" + whole.headers["x-request-id"]
        assert whole.json["model"] == MODEL
        assert whole.json["choices"][0]["finish_reason"] == "length"
        usage = whole.json["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 12, 16)
        assert whole.text() == expected_text(5, 12)
        streamed = await edge.complete(max_tokens=12, seed=5, stream=True)
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.headers["cache-control"] == "no-cache"
        assert streamed.whole
        assert streamed.text() == whole.text()
        finishes = [event["choices"][0]["finish_reason"] for event in streamed.chunks]
        assert finishes == [None] * 11 + ["length"]  # an event per token
        assert {event["id"] for event in streamed.chunks} == {"cmpl-" + streamed.headers["x-request-id"]}

    served(body)


def test_a_chat_whole_and_streamed() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = await edge.chat(max_tokens=12, seed=-5)
        assert whole.json["object"] == "chat.completion"
        assert whole.json["id"] == "chatcmpl-" + whole.headers["x-request-id"]
        assert whole.json["choices"][0]["message"]["role"] == "assistant"
        streamed = await edge.chat(max_tokens=12, seed=-5, stream=True)
        assert streamed.text() == whole.text() == expected_text(-5, 12, CHAT)
        chunks = streamed.chunks
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
        assert roles == ["assistant"] + [None] * 11
        limit = await edge.chat(max_completion_tokens=3)
        assert limit.json["usage"]["completion_tokens"] == 3

    served(body)


@pytest.mark.parametrize("ask", ["complete", "chat"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_without_a_model_is_for_the_only_one(ask: str, stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await getattr(edge, ask)(model=None, max_tokens=3, stream=stream)
        assert answer.status == 200
        names = {chunk["model"] for chunk in answer.chunks} if stream else {answer.json["model"]}
        assert names == {MODEL}

    served(body)


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_several_choices(ask: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        call = getattr(edge, ask)
        whole = await call(max_tokens=7, seed=1, n=3)
        assert [choice["index"] for choice in whole.json["choices"]] == [0, 1, 2]
        assert whole.json["usage"]["completion_tokens"] == 21
        texts = [whole.text(index) for index in range(3)]
        assert len(set(texts)) == 3
        streamed = await call(max_tokens=7, seed=1, n=3, stream=True)
        assert [streamed.text(index) for index in range(3)] == texts
        ended = [
            choice["index"]
            for event in streamed.chunks
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(ended) == [0, 1, 2]

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_prompts_in_every_form(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async def ask(prompt: Any, **fields: Any) -> Answer:
            return await edge.complete(prompt=prompt, max_tokens=3, seed=2, stream=stream, **fields)

        text = (await ask("the water")).text()
        assert text == expected_text(2, 3)
        assert (await ask([87, 4, 5])).text() == expected_text(2, 3, [87, 4, 5])
        several = await ask(["the water", "the land"])
        assert [several.text(index) for index in range(2)] == [text, expected_text(2, 3, "the land")]
        lists = await ask([[5, 6], [7, 8, 9]], n=2, echo=True)
        assert lists.status == 200
        for index in range(4):
            start = edge.models.get(MODEL).processor.vocabulary.decode([[5, 6], [7, 8, 9]][index // 2])
            assert lists.text(index).startswith(start)
        with_data = await ask("unused", nvext={"token_data": [5, 6, 7]}, echo=True)
        decode = edge.models.get(MODEL).processor.vocabulary.decode
        assert with_data.text() == decode([5, 6, 7]) + expected_text(2, 3, [5, 6, 7])

    served(body)


def test_usage_comes_with_a_stream_only_when_asked_for() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for options in (None, {"include_usage": False}):
            plain = await edge.chat(max_tokens=5, stream=True, stream_options=options)
            assert not any("usage" in event for event in plain.chunks)
        asked = await edge.chat(max_tokens=5, n=2, stream=True, stream_options={"include_usage": True})
        *chunks, last = asked.chunks
        assert last["choices"] == []
        whole = await edge.chat(max_tokens=5, n=2)
        assert last["usage"] == whole.json["usage"]
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
        options = {"include_usage": True, "continuous_usage_stats": True}
        each = await edge.chat(max_tokens=4, stream=True, stream_options=options)
        assert [chunk["usage"]["completion_tokens"] for chunk in each.chunks] == [1, 2, 3, 4, 4]

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings_end_the_work_of_the_engine(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(max_tokens=400, stop=["never", "wor"], stream=stream)
        assert answer.text() == "hello "
        choice = answer.chunks[-1]["choices"][0] if stream else answer.json["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "wor")
        await until(lambda: is_empty(running.engine), 0.5)
        assert not running.worker._open

    served(body, saying("hello world " * 30))


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_name_tokens_by_id_when_asked(stream: bool) -> None:
    decode = Vocabulary(sim().card.tokenizer_json).decode

    def logprobs(answer: Answer) -> list[Any]:
        bodies = answer.chunks if stream else [answer.json]
        return [choice["logprobs"] for body in bodies for choice in body["choices"] if choice["logprobs"]]

    def text_of(names: list[str]) -> str:
        return decode([int(name.removeprefix("token_id:")) for name in names])

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        fields = {"max_tokens": 5, "seed": 1, "stream": stream, "return_tokens_as_token_ids": True}
        chat = await edge.chat(logprobs=True, top_logprobs=1, **fields)
        entries = [entry for each in logprobs(chat) for entry in each["content"]]
        assert text_of([entry["token"] for entry in entries]) == chat.text() != ""
        assert all(top["token"].startswith("token_id:") for entry in entries for top in entry["top_logprobs"])
        text = await edge.complete(logprobs=1, **fields)
        assert text_of([token for each in logprobs(text) for token in each["tokens"]]) == text.text() != ""
        tops = [top for each in logprobs(text) for top in each["top_logprobs"]]
        assert all(name.startswith("token_id:") for top in tops for name in top)

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        chat = await edge.chat(max_tokens=5, logprobs=True, top_logprobs=2, seed=1, stream=stream)
        bodies = chat.chunks if stream else [chat.json]
        entries = [
            entry
            for each in bodies
            for choice in each["choices"]
            for entry in (choice["logprobs"] or {"content": []})["content"]
        ]
        assert "".join(entry["token"] for entry in entries) == chat.text()
        assert [len(entry["top_logprobs"]) for entry in entries] == [2] * 5
        text = await edge.complete(max_tokens=5, logprobs=1, seed=1, stream=stream)
        bodies = text.chunks if stream else [text.json]
        told = [choice["logprobs"] for each in bodies for choice in each["choices"]]
        assert "".join(token for each in told for token in each["tokens"]) == text.text()
        offsets = [offset for each in told for offset in each["text_offset"]]
        tokens = [token for each in told for token in each["tokens"]]
        pairs = zip(offsets, tokens, strict=True)
        assert all(text.text()[offset:].startswith(token) for offset, token in pairs)
        assert offsets[0] == 0

    served(body)


def test_reasoning_and_tool_calls_through_a_real_worker() -> None:
    said = 'ok <tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = await edge.chat(tools=[TOOL])
        (choice,) = whole.json["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
        assert call["id"].startswith("call_")
        assert choice["finish_reason"] == "tool_calls"
        streamed = await edge.chat(tools=[TOOL], stream=True)
        deltas = [chunk["choices"][0]["delta"] for chunk in streamed.chunks]
        parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
        assert "".join(part["function"]["arguments"] for part in parts) == '{"city": "Bonn"}'
        assert len(parts) > 4
        assert streamed.chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        assert streamed.text() == whole.text()
        plain = await edge.chat()  # without tools it is text
        assert plain.text() == said

    served(body, saying(said, context_length=4096))


def test_cached_tokens_and_extras() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        wanted = ["worker_id", "timing", "completion_token_ids", "stop_reason"]
        whole = await edge.chat(nvext={"extra_fields": wanted})
        assert whole.json["usage"]["prompt_tokens_details"] == {"cached_tokens": 8}
        told = whole.json["nvext"]
        assert told["completion_token_ids"] == [300, 301, 302]
        assert told["worker_id"] == {"decode_worker_id": running.worker._instance}
        assert told["timing"]["total_time_ms"] >= told["timing"]["ttft_ms"] > 0
        streamed = await edge.chat(nvext={"extra_fields": wanted}, stream=True)
        assert streamed.chunks[-1]["nvext"]["completion_token_ids"] == [300, 301, 302]

    served(body, lambda: Answering(*WHOLE))


def test_annotations() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        names = ["request_id", "formatted_prompt", "token_ids"]
        answer = await edge.chat(nvext={"annotations": names}, stream=True, max_tokens=2)
        blocks = answer.body.decode().split("\n\n")[:3]
        told = {}
        for block in blocks:
            event, value = block.split("\n")
            told[event.removeprefix("event: ")] = json.loads(value.removeprefix(": "))
        assert list(told) == names
        assert told["request_id"] == answer.headers["x-request-id"]
        assert told["formatted_prompt"].endswith("<|im_start|>assistant\n")
        assert told["token_ids"] == list(running.engine.submitted[0].token_ids)

    served(body, lambda: Answering(*WHOLE))


def test_a_request_that_uses_its_own_id_twice_at_once() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        headers = {"x-request-id": "mine"}
        async with Scope("ask") as scope:
            asked = [scope.start(edge.chat(headers, max_tokens=20), "ask") for _ in range(3)]
        answers = [task.result() for task in asked]
        assert [answer.status for answer in answers] == [200] * 3
        assert {answer.headers["x-request-id"] for answer in answers} == {"mine"}
        assert len({answer.json["id"] for answer in answers}) == 3
        # Log lines have the internal ids: a search for the client's id finds them. Engines may read their prefixes.
        assert all(answer.json["id"].endswith("-mine") for answer in answers)

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_log_line_of_a_request_names_its_worker(stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=request_log.__name__)

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        await edge.chat({"x-request-id": "mine"}, max_tokens=2, stream=stream)

    served(body)
    [line] = caplog.messages
    assert line.startswith("request finished: request_id=mine ")
    assert " worker=w0 instance=" in line
    assert " queue_s=" in line


def test_timing_headers_when_asked_for() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        assert "server-timing" not in (await edge.chat(max_tokens=2)).headers
        answer = await edge.chat({"x-kvolt-timing": "1"}, max_tokens=2)
        assert answer.headers["server-timing"].startswith("total;dur=")
        assert "ttft;dur=" in answer.headers["server-timing"]

    served(body)


def test_hints_reach_the_worker() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        headers = {"x-tenant-id": "acme", "x-dynamo-request-priority": "7", "x-session-id": "s1"}
        await edge.chat(headers, nvext={"agent_hints": {"osl": 9}}, cache_salt="salt")
        request = running.engine.submitted[0]
        routing = request.routing
        assert (routing.tenant, routing.priority, routing.session) == ("acme", 7, "s1")
        assert routing.expected_output_tokens == 9
        assert request.salt == "acme\nsalt"

    served(body, lambda: Answering(*WHOLE))


@pytest.mark.parametrize(
    ("headers", "fields", "asked"),
    [
        ({"x-kvolt-request-priority": "9"}, {}, 9),
        ({}, {"nvext": {"agent_hints": {"priority": 8}}}, 8),
        ({}, {"priority": 2**31 - 1}, 2**31 - 1),
        ({}, {"priority": 3}, 3),
        ({}, {"priority": -4}, -4),
    ],
)
def test_a_priority_above_the_highest_allowed_counts_as_that(
    headers: dict[str, str], fields: dict[str, Any], asked: int
) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(headers, **fields)
        assert answer.status == 200
        assert running.engine.submitted[0].routing.priority == min(asked, 3)
        warning = f"priority {asked} reduced to 3, the maximum of this server"
        assert answer.headers.get("x-kvolt-warning") == (warning if asked > 3 else None)

    served(body, lambda: Answering(*WHOLE), options=GenerateOptions(max_priority=3))


@pytest.mark.parametrize(
    ("choice", "effect"),
    [("auto", "tools ignored"), ("required", "only the form of the call is forced")],
)
def test_tools_that_the_template_does_not_show_are_a_warning(choice: str, effect: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(tools=[TOOL], tool_choice=choice)
        warning = f"the model's chat template does not show the tools to the model: {effect}"
        assert answer.headers["x-kvolt-warning"] == warning
        assert (running.engine.submitted[0].grammar is not None) == (choice == "required")

    def engine() -> Answering:
        answering = Answering(*WHOLE)
        answering._inner = sim(replace(ARGUMENTS, chat_template="{{ messages[0].content }}"))
        return answering

    served(body, engine)


# --- where it goes


def test_a_query_names_the_worker_and_sends_nothing() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        worker = {"decode_worker_id": running.worker._instance}
        whole = await edge.chat({"x-kvolt-query-only": "1"}, max_tokens=5)
        assert (whole.status, whole.json["choices"], whole.json["object"]) == (200, [], "chat.completion")
        assert whole.json["nvext"]["worker_id"] == worker
        tokens = whole.json["nvext"]["token_ids"]
        assert whole.json["usage"]["prompt_tokens"] == len(tokens) > 0
        streamed = await edge.chat(nvext={"annotations": ["query_instance_id:"]}, stream=True)
        assert streamed.headers["content-type"] == "text/event-stream"
        (chunk,) = streamed.chunks
        assert (chunk["nvext"]["worker_id"], chunk["nvext"]["token_ids"]) == (worker, tokens)
        several = await edge.complete({"x-kvolt-query-only": "1"}, prompt=["a", "b"])
        assert (several.status, several.json["error"]["param"]) == (400, "prompt")
        assert running.engine.submitted == []
        # What it named can be asked for.
        answer = await edge.chat(nvext={"backend_instance_id": worker["decode_worker_id"]})
        assert answer.status == 200

    served(body, lambda: Answering(*WHOLE))


def test_a_worker_that_is_not_there_is_a_503_that_says_so() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for headers in (
            {"x-dynamo-worker-instance-id": "nobody"},
            {"x-kvolt-allowed-instance-ids": "nobody"},
            {"x-kvolt-required-taints": "gpu"},
            {"x-kvolt-dp-rank": "4"},
        ):
            for query in ({}, {"x-kvolt-query-only": "1"}):
                answer = await edge.chat({**headers, **query}, max_tokens=2)
                assert answer.status == 503
                assert "reached" in answer.json["error"]["message"]

    served(body)


def test_bad_values_for_the_router_are_a_400_with_the_fields_name() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for nvext, name in (
            ({"router": {"temperature": -1}}, "nvext.router.temperature"),
            ({"dp_rank": -1}, "nvext.dp_rank"),
            ({"router": {"allowed_worker_ids": "a"}}, "nvext.router.allowed_worker_ids"),
            (
                {"routing_constraints": {"required_taints": "gpu"}},
                "nvext.routing_constraints.required_taints",
            ),
        ):
            answer = await edge.chat(nvext=nvext, max_tokens=2)
            assert (answer.status, answer.json["error"]["param"]) == (400, name)

    served(body)


# --- unknown fields


def test_unknown_fields_are_named_in_a_header() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for ask in (edge.chat, edge.complete):
            for stream in (False, True):
                answer = await ask(max_tokens=2, magic=1, stream=stream, **{"we\r\nird": 2})
                assert answer.status == 200
                assert answer.headers["x-kvolt-warning"] == "ignored unknown fields: magic, we\\r\\nird"
                assert "x-kvolt-warning" not in (await ask(max_tokens=2)).headers

    served(body)


def test_strict_mode_refuses_them() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for ask in (edge.chat, edge.complete):
            answer = await ask(max_tokens=2, magic=1)
            assert (answer.status, answer.json["error"]["param"]) == (400, "magic")
            assert answer.json["error"]["code"] == "unknown_parameter"
            assert (await ask(max_tokens=2)).status == 200

    served(body, options=GenerateOptions(strict_fields=True))


# --- refusals


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [5, 10**6]}, 400, "prompt"),
        ({"nvext": {"token_data": [5, 10**6]}}, 400, "nvext.token_data"),
        ({"logit_bias": {"1000000": 1}}, 400, "logit_bias"),
        ({"max_tokens": 600}, 400, "max_tokens"),
        ({"prompt": [5] * 512}, 400, "prompt"),
        ({"prompt": " the" * 600}, 400, "prompt"),
        ({"n": 0}, 400, "n"),
        ({"temperature": "hot"}, 400, "temperature"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_bad_request_has_a_status_and_names_its_field(
    fields: dict[str, Any], status: int, param: str
) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for stream in (False, True):
            answer = await edge.complete(**fields, stream=stream)
            assert answer.status == status
            assert answer.json["error"]["param"] == param
        assert is_empty(running.engine)

    served(body)


def test_a_chat_over_the_context_says_so_with_the_numbers() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(messages=[{"role": "user", "content": " the" * 600}])
        error = answer.json["error"]
        assert (answer.status, error["param"]) == (400, "messages")
        assert error["code"] == "context_length_exceeded"
        assert "512" in error["message"]
        prompt = {"model": MODEL, "messages": [{"role": "user", "content": " the" * 600}]}
        count = (await edge.ask("/tokenize", prompt)).json["count"]
        assert str(count) in error["message"]

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_a_status(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(max_tokens=100, stream=stream)
        assert (answer.status, answer.json["error"]["param"]) == (400, "max_tokens")

    served(body, lambda: sim(SimArguments(context_length=512, kv_blocks=4)))


@pytest.mark.parametrize("stream", [False, True])
def test_more_requests_than_allowed_are_a_429(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asked = [
                scope.start(edge.chat(max_tokens=20, stream=index % 2 == 0), "ask") for index in range(2)
            ]
            await until(lambda: edge.admission.num_running == 2)
            refused = await edge.chat(max_tokens=2, stream=stream)
            assert refused.status == 429
            assert refused.json["error"]["type"] == "rate_limit_error"
            assert refused.headers["retry-after"] == "1"
        assert [task.result().status for task in asked] == [200, 200]
        assert (await edge.chat(max_tokens=2, stream=stream)).status == 200

    served(body, max_requests=2)


def test_busy_workers_are_a_429() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        threshold = {"model": MODEL, "active_decode_blocks_threshold": 0.0}
        assert (await edge.ask("/busy_threshold", threshold)).status == 200
        assert (await edge.chat(max_tokens=2)).status == 200  # nothing is known of its load yet
        async with Scope("ask") as scope:
            scope.start(edge.chat(max_tokens=50), "ask")
            await until(lambda: running.engine.load().running > 0)
            await asyncio.sleep(0.3)
            refused = await edge.chat(max_tokens=2)
            assert refused.status == 429
            assert "busy" in refused.json["error"]["message"]
        assert (await edge.chat(max_tokens=2)).status == 200

    served(body)


# --- deadlines and headers that wait


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("header", ["x-kvolt-timeout-ms", "x-request-timeout-ms"])
def test_a_deadline_of_the_client_is_a_504(stream: bool, header: str) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        answer = await edge.chat({header: "700"}, max_tokens=5, stream=stream)
        assert answer.status == 504
        assert answer.json["error"]["code"] == "timeout"
        assert 0.7 <= loop.time() - started < 0.8
        assert running.engine.submitted[0].deadline_s <= 0.7
        await until(lambda: bool(running.engine.aborted))
        for bad in ("0", "soon", "-5", "1e3", str(10**12)):
            refused = await edge.chat({header: bad}, max_tokens=5)
            assert (refused.status, refused.json["error"]["param"]) == (400, header)

    served(body, ScriptedEngine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_at_a_deadline_an_answer_with_text_ends_as_at_its_limit(
    ask: str, num_choices: int, stream: bool
) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        fields = {"max_tokens": 400, "stream": stream, "n": num_choices, "seed": 1}
        answer = await getattr(edge, ask)({"x-kvolt-timeout-ms": "300"}, **fields)
        assert (answer.status, answer.whole) == (200, True)
        if stream:
            *chunks, last, done = answer.events
            assert done == "[DONE]"
            assert last["nvext"] == {"ended_by": {"reason": "deadline", "stage": "total"}}
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
        else:
            assert answer.json["nvext"] == {"ended_by": {"reason": "deadline", "stage": "total"}}
            assert 10 < answer.json["usage"]["completion_tokens"] < 400 * num_choices
            choices = answer.json["choices"]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
        assert reasons == ["length"] * num_choices
        texts = [answer.text(index) for index in range(num_choices)]
        assert all(len(text) > 30 for text in texts)
        await until(lambda: is_empty(running.engine), 0.5)
        whole = await getattr(edge, ask)(**(fields | {"stream": False}))
        assert "nvext" not in whole.json
        assert all(whole.text(index).startswith(text) for index, text in enumerate(texts))

    served(body)


@pytest.mark.parametrize("stream", [False, True])
def test_at_a_deadline_between_tokens_an_answer_with_text_ends_as_at_its_limit(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.chat(max_tokens=9, stream=stream)
        told = answer.events[-2] if stream else answer.json
        assert told["nvext"]["ended_by"] == {"reason": "deadline", "stage": "between"}
        assert answer.text(0)

    served(body, lambda: Answering(*WHOLE[:2]))


def test_a_chat_without_a_limit_ends_at_the_default_of_its_model() -> None:
    def limited() -> SimEngine:
        engine = sim(replace(ARGUMENTS, context_length=900))
        engine.card = replace(engine.card, default_max_tokens=40)
        return engine

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for fields, most in (({}, 40), ({"max_tokens": 60}, 60), ({"min_tokens": 50}, 50)):
            answer = await edge.chat(ignore_eos=True, **fields)
            assert answer.json["usage"]["completion_tokens"] == most
            assert answer.json["choices"][0]["finish_reason"] == "length"
        text = await edge.complete(ignore_eos=True)
        assert text.json["usage"]["completion_tokens"] == 16

    served(body, limited)


def test_the_server_s_own_deadline() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        answer = await edge.chat({"x-kvolt-timeout-ms": "60000"}, max_tokens=5)  # cannot be prolonged
        assert answer.status == 504
        assert 2 <= loop.time() - started < 2.1

    served(body, ScriptedEngine, options=GenerateOptions(request_timeout_s=2.0))


def test_headers_wait_for_the_first_token_but_not_for_ever() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        raw = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": 4}).encode()
        async with edge.send("POST", "/v1/completions", raw) as browser:
            await asyncio.sleep(0.9)
            assert browser.received == b""
            await asyncio.sleep(0.2)
            assert browser.received.startswith(b"HTTP/1.1 200 OK")
            assert browser.received.endswith(b"\r\n\r\n")
            (request,) = running.engine.submitted
            failure = ErrorInfo("overloaded", "full now")
            running.engine.put(StepOutput(failed=((RequestId(request.request_id), failure),)))
            await asyncio.wait_for(browser.closed.wait(), 5)
            assert b'"code":"overloaded"' in browser.received
            assert b"[DONE]" not in browser.received
            assert browser.received.endswith(b"\r\n0\r\n\r\n")

    served(body, ScriptedEngine, options=GenerateOptions(hold_headers_s=1.0))


def test_an_error_of_the_way_there_after_the_headers_went_is_an_event_too() -> None:
    """No worker has the request yet when the headers must go: what then fails is told in the stream."""

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        ghost = await lab.runtime("ghost")
        info = msgspec.msgpack.encode(running.worker.info)
        instance = Instance(
            id=InstanceId("ghost"), endpoint=running.endpoint, address="ghost:9", info=msgspec.Raw(info)
        )
        lease = await ghost.discovery.lease(5.0)
        await ghost.discovery.put(instance.key, encode_instance(instance), lease)
        client = edge.models.get(MODEL).client
        await until(lambda: len(client.candidates()) == 2)
        lab.network.crash("ghost", silent=True)  # dialled in vain until the time for it is over
        answers = [await edge.complete(max_tokens=4, stream=True) for _ in range(2)]
        answers.sort(key=lambda answer: len(answer.events))
        failed, good = answers
        assert good.text()
        assert (failed.status, failed.whole) == (200, True)
        (last,) = failed.events
        assert last["error"]["code"] == "worker_unreachable"
        status = {"status": "error", "error_type": "unavailable", "request_type": "stream"}
        assert edge.sample("kvolt_frontend_requests_total", **status) == 1

    options = GenerateOptions(hold_headers_s=0.05)
    served(body, options=options, model_options=ModelOptions(max_attempts=1))


# --- workers that fail


class FirstToken(ScriptedEngine):
    """Gives every request one token, then dies when told."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.put(StepOutput(((RequestId(request.request_id), Delta(token_ids=(300,))),)))


class Gone(ScriptedEngine):
    """As an attached server that has just died: each request ends with it."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        died = ErrorInfo("engine_died", "http://10.0.0.7:8000 broke off")
        self.put(StepOutput(failed=((RequestId(request.request_id), died),)))


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_is_gone_is_a_503_where_no_other_is(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        alone = await edge.complete(max_tokens=5, stream=stream)
        assert (alone.status, alone.json["error"]["code"]) == (503, "engine_died")
        assert alone.headers["retry-after"] == "1"
        await lab.worker("w1")
        await until(lambda: len(edge.models.get(MODEL).candidates()) == 2)
        for _ in range(4):
            assert (await edge.complete(max_tokens=5, stream=stream)).status == 200

    served(body, Gone)


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_engine_is_a_status_before_the_first_token(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=5, stream=stream), "complete")
            await until(lambda: bool(running.engine.submitted))
            (request,) = running.engine.submitted
            failure = ErrorInfo("engine_failed", "the engine's own words")
            running.engine.put(StepOutput(failed=((RequestId(request.request_id), failure),)))
        answer = asking.result()
        assert (answer.status, answer.json["error"]["code"]) == (500, "engine_failed")
        assert "own words" not in answer.json["error"]["message"]

    served(body, ScriptedEngine)


def test_a_failing_engine_after_the_first_token_is_an_event_in_the_stream() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=5, stream=True), "complete")
            await until(lambda: bool(running.engine.submitted))
            await asyncio.sleep(1)
            running.engine.put(RuntimeError("the engine's own words"))
        lab.errors.clear()
        answer = asking.result()
        assert answer.status == 200
        first, last = answer.events
        assert first["choices"]
        assert last["error"]["code"] == "engine_died"
        assert "own words" not in last["error"]["message"]
        assert answer.whole

    served(body, FirstToken)


@pytest.mark.parametrize("stream", [False, True])
def test_a_worker_lost_before_its_first_token_is_replaced(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=6, seed=3, stream=stream), "complete")
            await until(lambda: bool(running.engine.submitted))
            await lab.worker("w1")
            client = edge.models.get(MODEL).client
            await until(lambda: len(client.candidates()) == 2)
            lab.network.crash("w0", silent=False)
        answer = asking.result()
        assert answer.status == 200
        assert answer.text() == expected_text(3, 6)
        assert edge.sample("kvolt_frontend_model_migration_total", model=MODEL) == 1

    served(body, ScriptedEngine)


@pytest.mark.parametrize("stream", [False, True])
def test_an_overloaded_worker_is_replaced(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        await lab.worker("w1", sim(replace(ARGUMENTS, max_waiting=1, max_num_seqs=1)))
        await lab.worker("w2")
        client = edge.models.get(MODEL).client
        await until(lambda: len(client.candidates()) == 3)
        async with Scope("ask") as scope:
            asked = [
                scope.start(edge.complete(max_tokens=6, seed=3, stream=stream), "ask") for _ in range(12)
            ]
        answers = [task.result() for task in asked]
        assert [answer.status for answer in answers] == [200] * 12
        assert {answer.text() for answer in answers} == {expected_text(3, 6)}
        assert edge.sample("kvolt_frontend_model_migration_total") > 2

    served(body, lambda: sim(replace(ARGUMENTS, max_waiting=1, max_num_seqs=1)))


def test_attempts_can_be_limited_to_one() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=6), "complete")
            await until(lambda: bool(running.engine.submitted))
            await lab.worker("w1")
            client = edge.models.get(MODEL).client
            await until(lambda: len(client.candidates()) == 2)
            lab.network.crash("w0", silent=False)
        answer = asking.result()
        assert (answer.status, answer.json["error"]["code"]) == (503, "worker_unreachable")

    served(body, ScriptedEngine, model_options=ModelOptions(max_attempts=1))


def test_a_worker_lost_after_its_first_token_is_an_event_and_a_503_for_the_next() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=400, stream=True), "stream")
            unary = scope.start(edge.complete(max_tokens=400), "unary")
            await until(lambda: running.engine.load().running == 2)
            await asyncio.sleep(0.5)
            lab.network.crash("w0", silent=False)
        answer = asking.result()
        assert answer.status == 200
        assert answer.events[-1]["error"]["code"] == "worker_unreachable"
        assert unary.result().status == 503
        assert (await edge.complete()).status == 503

    served(body)


# --- clients that leave, and clients that are slow


@pytest.mark.parametrize("fields", ['"n":3', '"n":1', '"stop":["zzz"]', '"logprobs":1', '"prompt":["a","b"]'])
@pytest.mark.parametrize("stream", ["true", "false"])
@pytest.mark.parametrize("after_s", [0.002, 0.3])
def test_hanging_up_cancels_up_to_the_engine(fields: str, stream: str, after_s: float) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        prompt = "" if "prompt" in fields else '"prompt":"the water",'
        raw = f'{{"model":"sim-tiny",{prompt}"max_tokens":400,{fields},"stream":{stream}}}'
        async with edge.send("POST", "/v1/completions", raw.encode()):
            await until(lambda: not is_empty(running.engine))
            await asyncio.sleep(after_s)
            assert not is_empty(running.engine)
        await until(lambda: is_empty(running.engine), 0.5)
        assert not running.worker._open
        assert edge.sample("kvolt_frontend_active_requests") == 0
        assert edge.sample("kvolt_frontend_disconnected_clients") == 1

    served(body)


def test_hanging_up_before_a_worker_has_the_request() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        lab.network.crash("w0", silent=True)
        raw = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 4}).encode()
        async with edge.send("POST", "/v1/completions", raw):
            await asyncio.sleep(0.2)
        await asyncio.sleep(1)
        assert edge.admission.num_running == 0
        assert edge.sample("kvolt_frontend_active_requests") == 0

    served(body)


def test_a_crowd_that_hangs_up_leaves_nothing() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        raw = b'{"model":"sim-tiny","prompt":"the water","max_tokens":300,"stream":true}'

        async def visit(stay_s: float) -> None:
            async with edge.send("POST", "/v1/completions", raw):
                await asyncio.sleep(stay_s)

        async with Scope("crowd") as crowd:
            for index in range(60):
                crowd.start(visit(0.0007 * index), f"visit {index}")
            answer = crowd.start(edge.complete(max_tokens=50, seed=3), "stays")
        assert answer.result().text() == expected_text(3, 50)
        await until(lambda: is_empty(running.engine), 0.5)
        assert edge.sample("kvolt_frontend_active_requests") == 0

    served(body)


def test_a_client_that_does_not_read_holds_its_tokens_at_the_worker_and_then_gets_all() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        raw = json.dumps(
            {"model": MODEL, "prompt": "x", "max_tokens": 400, "seed": 3, "stream": True}
        ).encode()
        async with edge.send("POST", "/v1/completions", raw) as browser:
            browser.transport.pause_reading()
            await asyncio.sleep(10)
            browser.transport.resume_reading()
            await asyncio.wait_for(browser.closed.wait(), 20)
            events = bytes(browser.received).count(b"data: {")
            assert events == 400
            assert b"data: [DONE]" in browser.received

    served(body, limits=HttpLimits(write_buffer_bytes=4096))


def test_one_prompt_of_a_batch_that_fails_early_fails_all_with_its_own_error() -> None:
    class Picky(ScriptedEngine):
        def submit(self, request: Request) -> None:
            super().submit(request)
            if len(request.token_ids) > 3:
                failure = ErrorInfo("invalid_request", "too long for me", {"param": "prompt"})
                self.put(StepOutput(failed=((RequestId(request.request_id), failure),)))

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for stream in (False, True):
            answer = await edge.complete(prompt=[[5, 6], [5, 6, 7, 8]], max_tokens=5, stream=stream)
            assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")
        await until(lambda: not running.worker._open, 1.0)

    served(body, Picky)


# --- long prompts


class CountingBlocking(InlineBlocking):
    def __init__(self) -> None:
        super().__init__(latency_s=0.5)
        self.calls = 0

    async def run(self, call: Any, timeout_s: float) -> Any:
        self.calls += 1
        return await super().run(call, timeout_s)


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_long_prompts_are_tokenized_off_the_loop_and_too_long_ones_refused_early(
    ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    encode: Callable[..., tuple[int, ...]] = CachedEncoder.encode
    monkeypatch.setattr(
        CachedEncoder,
        "encode",
        lambda self, text, **options: (encoded.append(len(text)), encode(self, text, **options))[1],
    )

    def fields(text: str) -> dict[str, Any]:
        return {"prompt": text} if ask == "complete" else {"messages": [{"role": "user", "content": text}]}

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        processor = cast(preprocess.CardProcessor, edge.models.get(MODEL).processor)
        blocking = processor._blocking = CountingBlocking()
        call = getattr(edge, ask)
        assert (await call(**fields("the water"), max_tokens=1)).status == 200
        assert blocking.calls == 0
        long = " important" * 2000
        assert len(long) > preprocess._INLINE_CHARACTERS
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with Scope("ask") as scope:
            slow = scope.start(call(**fields(long), max_tokens=1), "long")
            await asyncio.sleep(0.1)
            assert (await call(**fields("the water"), max_tokens=1)).status == 200
            assert loop.time() - started < 0.5  # the others did not wait for it
        answer = slow.result()
        assert (answer.status, answer.json["usage"]["prompt_tokens"] >= 2000) == (200, True)
        assert blocking.calls == 1
        most = processor._max_characters
        encoded.clear()
        refused = await call(**fields("x" * (most + 1)), max_tokens=1)
        assert refused.status == 400
        assert refused.json["error"]["param"] in ("prompt", "messages")
        assert refused.json["error"]["code"] == "context_length_exceeded"
        assert encoded == []

    served(body, lambda: sim(SimArguments(context_length=4096, latency=ARGUMENTS.latency)))


def test_the_second_turn_of_a_chat_is_not_tokenized_again() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        turns: list[dict[str, str]] = [{"role": "user", "content": "the water and the land " * 4}]
        first = await edge.chat(messages=turns, max_tokens=4)
        stats = edge.models.get(MODEL).processor.stats
        before = stats.uncached_tokens
        turns += [{"role": "assistant", "content": first.text()}, {"role": "user", "content": "more"}]
        second = await edge.chat(messages=turns, max_tokens=4)
        added = second.json["usage"]["prompt_tokens"] - first.json["usage"]["prompt_tokens"]
        assert stats.uncached_tokens - before <= added

    served(body)


def test_unexpected_deltas_are_ignored() -> None:
    odd = (
        Delta((300,), index=5),
        Delta(()),
        Delta((10**6, 301), logprobs=(TokenLogprobs(300, -1.0),)),
        Delta((302,), finish=FinishReason.LENGTH),
    )

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for stream in (False, True):
            answer = await edge.chat(stream=stream)
            assert answer.status == 200
            assert answer.text() == Vocabulary(sim().card.tokenizer_json).decode([301, 302])

    served(body, lambda: Answering(*odd))
