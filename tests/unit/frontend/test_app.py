"""The HTTP edge as a client sees it: bytes in, bytes out, through a real worker to the sim engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.engines.lab import (
    ARGUMENTS,
    MODEL,
    Frontend,
    Lab,
    RunningWorker,
    ScriptedEngine,
    is_empty,
    sim,
    until,
)

from kvolt.core.delta import Delta, StepOutput
from kvolt.core.errors import DeadlineExceeded
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.sim import SimArguments
from kvolt.engines.sim_model import next_token
from kvolt.frontend import app
from kvolt.frontend.text import Codec
from kvolt.runtime.tasks import Scope
from kvolt.testing import InlineBlocking, run_virtual

Body = Callable[[Lab, Frontend, RunningWorker], Coroutine[Any, Any, None]]


def served(body: Body, engine: Callable[[], Any] = sim) -> None:
    """Run `body` with one worker and a frontend that is ready."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine())
            edge = await lab.frontend()
            await edge.ready()
            await body(lab, edge, running)

    run_virtual(scenario)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def expected_text(seed: int, num_tokens: int) -> str:
    ids = [next_token(seed % 2**64, position) for position in range(num_tokens)]
    return Codec(sim().card).decoder().step(ids)


# --- answers


def test_a_completion_whole_and_streamed() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = await edge.complete(max_tokens=12, seed=5)
        assert whole.status == 200
        assert whole.json["object"] == "text_completion"
        assert whole.json["id"] == "cmpl-" + whole.headers["x-request-id"]
        assert whole.json["model"] == MODEL
        assert whole.json["choices"][0]["finish_reason"] == "length"
        prompt = len(edge.models.get(MODEL).codec.encode("the water"))
        assert whole.json["usage"] == {
            "prompt_tokens": prompt,
            "completion_tokens": 12,
            "total_tokens": prompt + 12,
        }
        assert whole.text() == expected_text(5, 12)
        streamed = await edge.complete(max_tokens=12, seed=5, stream=True)
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.whole
        assert streamed.events[-1] == "[DONE]"
        assert streamed.text() == whole.text()
        finishes = [event["choices"][0]["finish_reason"] for event in streamed.events[:-1]]
        assert finishes == [None] * (len(finishes) - 1) + ["length"]
        assert len(finishes) > 6  # as it came, not at the end
        assert {event["id"] for event in streamed.events[:-1]} == {"cmpl-" + streamed.headers["x-request-id"]}

    served(body)


def test_a_chat_whole_and_streamed() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        whole = await edge.chat(max_tokens=12, seed=-5)
        assert whole.json["object"] == "chat.completion"
        assert whole.json["id"].startswith("chatcmpl-")
        assert whole.json["choices"][0]["message"]["role"] == "assistant"
        streamed = await edge.chat(max_tokens=12, seed=-5, stream=True)
        assert streamed.text() == whole.text() == expected_text(-5, 12)
        chunks = streamed.events[:-1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
        assert roles == ["assistant"] + [None] * (len(chunks) - 1)
        limit = await edge.chat(max_tokens=12, max_completion_tokens=3)
        assert limit.json["usage"]["completion_tokens"] == 3

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
            for event in streamed.events[:-1]
            for choice in event["choices"]
            if choice["finish_reason"]
        ]
        assert sorted(ended) == [0, 1, 2]

    served(body)


def test_usage_comes_with_a_stream_only_when_asked_for() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        plain = await edge.chat(max_tokens=5, stream=True)
        assert not any("usage" in event for event in plain.events[:-1])
        no = await edge.chat(max_tokens=5, stream=True, stream_options={"include_usage": False})
        assert not any("usage" in event for event in no.events[:-1])
        asked = await edge.chat(max_tokens=5, n=2, stream=True, stream_options={"include_usage": True})
        *chunks, last, done = asked.events
        assert done == "[DONE]"
        assert last["choices"] == []
        whole = await edge.chat(max_tokens=5, n=2)
        assert last["usage"] == whole.json["usage"]
        assert all(chunk["choices"] for chunk in chunks)

    served(body)


def test_token_ids_as_a_prompt() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        size = edge.models.get(MODEL).codec.vocabulary_size
        good = await edge.complete(prompt=[3, 4, size - 1], max_tokens=2)
        assert good.json["usage"]["prompt_tokens"] == 3
        bad = await edge.complete(prompt=[3, size], max_tokens=2)
        assert (bad.status, bad.json["error"]["param"]) == (400, "prompt")
        assert str(size) in bad.json["error"]["message"]

    served(body)


def test_what_else_is_served() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        models = (await edge.ask("/v1/models")).json
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert (await edge.ask("/health")).json == {
            "status": "ready",
            "models": [MODEL],
            "workers": {MODEL: 1},
        }
        assert (await edge.ask("/ready")).status == 200
        await running.runtime.close()
        await until(lambda: not edge.models.ready())
        health = await edge.ask("/health")
        assert (health.status, health.json["models"]) == (503, [])
        assert (await edge.ask("/live")).status == 200
        assert (await edge.ask("/v1/models")).json["data"] == []
        assert (await edge.complete()).status == 503

    served(body)


# --- refusals and failures


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"model": "nobody"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"max_tokens": 600}, 400, "max_tokens"),
        ({"prompt": [5] * 512}, 400, "max_tokens"),
        ({"n": 0}, 400, "n"),
        ({"temperature": "hot"}, 400, "temperature"),
    ],
    ids=str,
)
def test_a_bad_request_has_a_status_and_names_its_field(
    fields: dict[str, Any], status: int, param: str
) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for stream in (False, True):
            answer = await edge.complete(**fields, stream=stream)
            assert answer.status == status
            assert answer.json["error"]["param"] == param
        assert running.engine._running == {}

    served(body)


def test_bytes_that_are_no_request_are_a_400() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for raw in (b"{", b"\xff", b"[" * 50_000):
                assert (await edge.ask(path, raw)).status == 400

    served(body)


class Silent(ScriptedEngine):
    """Takes requests and never answers: the deadline has to."""


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_byte_is_a_status(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(max_tokens=5, stream=stream)
        assert answer.status == 504
        assert answer.json["error"]["code"] == DeadlineExceeded.code
        assert running.engine.submitted
        await until(lambda: bool(running.engine.aborted))

    served(body, Silent)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_a_status(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(max_tokens=100, n=100, stream=stream)
        assert (answer.status, answer.json["error"]["param"]) == (400, "n")

    served(body, lambda: sim(SimArguments(context_length=512, kv_blocks=64)))


class FirstToken(ScriptedEngine):
    """Gives every request one token, then dies when told."""

    def submit(self, request: Request) -> None:
        super().submit(request)
        self.put(StepOutput(((RequestId(request.request_id), Delta(token_ids=(300,))),)))


def test_an_error_after_the_first_byte_is_an_event_in_the_stream() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=5, stream=True), "complete")
            await until(lambda: bool(running.engine.submitted))
            await asyncio.sleep(1)
            running.engine.put(RuntimeError("the engine's own words"))
        answer = asking.result()
        assert answer.status == 200
        first, last = answer.events
        assert first["choices"]
        assert last["error"]["code"] == "engine_failed"
        assert "own words" not in last["error"]["message"]
        assert answer.whole  # the HTTP body is sound, and there is no [DONE]

    served(body, FirstToken)


def test_a_crashed_worker_is_an_error_for_one_request_and_a_503_for_the_next() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        async with Scope("ask") as scope:
            asking = scope.start(edge.complete(max_tokens=400, stream=True), "complete")
            await until(lambda: bool(running.engine._running))
            await asyncio.sleep(0.5)
            lab.network.crash("w0", silent=False)
        answer = asking.result()
        assert answer.events[-1]["error"]["code"] == "worker_lost"
        assert (await edge.complete()).status == 503

    served(body)


# --- a client that leaves


@pytest.mark.parametrize("stream", [b"true", b"false"])
@pytest.mark.parametrize("after_s", [0.002, 0.3])
def test_hanging_up_cancels_up_to_the_engine(stream: bytes, after_s: float) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        raw = b'{"model":"sim-tiny","prompt":"the water","max_tokens":400,"n":3,"stream":%b}' % stream
        async with edge.send("POST", "/v1/completions", raw):
            await until(lambda: not is_empty(running.engine))
            await asyncio.sleep(after_s)
            assert not is_empty(running.engine)
        await until(lambda: is_empty(running.engine), 0.5)
        assert running.worker._open == {}

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

    served(body)


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
    encode = Codec.encode
    monkeypatch.setattr(
        Codec, "encode", lambda self, text: (encoded.append(len(text)), encode(self, text))[1]
    )

    def fields(text: str) -> dict[str, Any]:
        return {"prompt": text} if ask == "complete" else {"messages": [{"role": "user", "content": text}]}

    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        blocking = edge.runtime.ports.blocking = CountingBlocking()
        call = getattr(edge, ask)
        assert (await call(**fields("the water"), max_tokens=1)).status == 200
        assert blocking.calls == 0
        long = " important" * 2000
        assert len(long) > app._ENCODE_INLINE_CHARACTERS
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
        most = edge.models.get(MODEL).codec.most_characters
        encoded.clear()
        refused = await call(**fields("x" * (most + 1)), max_tokens=1)
        assert refused.status == 400
        assert refused.json["error"]["param"] in ("prompt", "messages")
        assert (blocking.calls, encoded) == (1, [])

    served(body, lambda: sim(SimArguments(context_length=4096, latency=ARGUMENTS.latency)))


def test_a_prompt_over_the_context_is_refused_after_tokenizing() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        answer = await edge.complete(prompt=" the" * 600)
        assert answer.status == 400
        assert "600" in answer.json["error"]["message"]

    served(body)
