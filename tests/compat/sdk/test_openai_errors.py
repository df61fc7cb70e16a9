"""The openai SDK: what goes wrong comes as the SDK's own exceptions, with the fields that programs read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.compat.sdk.server import SPEAKS, Server, ask, occupied, say
from tests.integration.processes import MODEL, PATIENCE_S, until

WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "temperature": ({"temperature": 9}, "temperature", "2"),
    "type": ({"max_tokens": "many"}, "max_tokens", "integer"),
    "top_p": ({"top_p": 0}, "top_p", "0"),
    "n": ({"n": 129}, "n", "128"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "logprobs"),
    "stop": ({"stop": ["x"] * 33}, "stop", "32"),
    "logit_bias": ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
    "role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "boss"),
    "no messages": ({"messages": []}, "messages", "1"),
    "stream_options": ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
    "context": ({"messages": ask("x " * 40_000)}, "messages", "32768"),
    "room": ({"max_tokens": 32_768}, "max_tokens", "32768"),
}
"""What is sent, the `param` that names it, and what the message must say of it."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("what", WRONG)
def test_wrong_request(client: OpenAI, what: str, stream: bool) -> None:
    """A stream is refused by its status too: nothing is sent before the request is known to be right."""
    more, param, said = WRONG[what]
    if what == "stream_options" and stream:
        more = {"stream_options": {"include_usage": "perhaps"}}
        param, said = "stream_options.include_usage", "boolean"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": MODEL, "messages": say("x"), "stream": stream, **more})
    error = caught.value
    assert error.param == param
    assert said in error.message
    assert error.type == "invalid_request_error"
    assert error.code
    assert error.request_id == error.response.headers["x-request-id"]
    if what in ("context", "room"):
        assert error.code == "context_length_exceeded"


async def test_async(aclient: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await aclient.chat.completions.create(model=MODEL, messages=say("x"), temperature=9)
    assert caught.value.param == "temperature"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_model(client: OpenAI, stream: bool) -> None:
    for create, asked in (
        (client.chat.completions.create, {"messages": say("x")}),
        (client.completions.create, {"prompt": "x"}),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            create(model="nobody", stream=stream, **asked)  # type: ignore[operator]
        assert "nobody" in caught.value.message
        assert (caught.value.code, caught.value.type) == ("model_not_found", "invalid_request_error")


def test_endpoints_that_are_not_there(client: OpenAI) -> None:
    for ask_it in (
        lambda: client.embeddings.create(model=MODEL, input="x"),
        lambda: client.images.generate(prompt="x"),
        client.files.list,
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            ask_it()
        assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize(
    ("part", "named"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "image"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, "audio"),
    ],
)
def test_what_has_no_mechanism_yet(client: OpenAI, part: dict[str, Any], named: str) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages)
    assert caught.value.status_code == 501
    assert named in caught.value.message
    assert caught.value.response.headers["x-should-retry"] == "false"


def test_not_json(client: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=say("x"), extra_headers={"content-type": "text/plain"}
        )
    assert caught.value.status_code == 415


def test_too_large(narrow: OpenAI) -> None:
    """Also when the refusal comes while the client still sends."""
    with pytest.raises(openai.APIStatusError) as caught:
        narrow.chat.completions.create(model=MODEL, messages=ask("x" * 1_000_000))
    assert caught.value.status_code == 413
    assert "65536" in caught.value.message
    answer = narrow.chat.completions.create(model=MODEL, messages=say("ok"))
    assert answer.choices[0].message.content == "ok"


def test_strict_about_fields(narrow: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        narrow.chat.completions.create(model=MODEL, messages=say("x"), extra_body={"colour": "red"})
    assert (caught.value.param, caught.value.code) == ("colour", "unknown_parameter")


def test_too_many_at_once(narrow: OpenAI) -> None:
    with occupied(narrow):
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                narrow.chat.completions.create(model=MODEL, messages=say("x"), stream=streamed)
            assert (caught.value.type, caught.value.status_code) == ("rate_limit_error", 429)
            assert int(caught.value.response.headers["retry-after"]) >= 1
            assert caught.value.code


def test_the_sdk_tries_again(narrow: OpenAI) -> None:
    """It waits as long as `retry-after` says; by then there is room."""
    answers: list[int] = []

    def leave(response: httpx.Response) -> None:
        answers.append(response.status_code)
        stream.close()

    with (
        occupied(narrow) as stream,
        httpx.Client(event_hooks={"response": [leave]}) as http,
        narrow.with_options(max_retries=1, http_client=http) as patient,
    ):
        answer = patient.chat.completions.create(model=MODEL, messages=say("ok"))
    assert answer.choices[0].message.content == "ok"
    assert answers == [429, 200]


async def test_busy_workers(server: Server, narrow: OpenAI, aclient: AsyncOpenAI) -> None:
    """Thresholds are each frontend's own, and of what workers last said of their load."""
    threshold = "active_decode_blocks_threshold"

    def refused() -> bool:
        try:
            narrow.chat.completions.create(model=MODEL, messages=say("x"), max_tokens=1)
        except openai.RateLimitError as error:
            return "busy" in error.message
        return False

    url = f"{server.narrow_url}/busy_threshold"
    async with httpx.AsyncClient() as http:
        streams = []
        try:
            (await http.post(url, json={"model": MODEL, threshold: 0.0})).raise_for_status()
            deadline = time.monotonic() + PATIENCE_S
            while not refused():  # until both workers have some: the router may prefer one for a while
                assert time.monotonic() < deadline, "no refusal"
                streams.append(
                    await aclient.chat.completions.create(model=MODEL, messages=ask(), stream=True)
                )
                await asyncio.sleep(0.1)
        finally:
            for stream in streams:
                await stream.close()
            (await http.post(url, json={"model": MODEL, threshold: 1.0})).raise_for_status()
    assert not refused()


def test_no_time(client: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=ask("a story " * 8_000), extra_headers={"x-kvolt-timeout-ms": "1"}
        )
    assert (caught.value.status_code, caught.value.code, caught.value.type) == (
        504,
        "timeout",
        "server_error",
    )


def test_wrong_header(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model=MODEL, messages=say("x"), extra_headers={"x-kvolt-timeout-ms": "soon"}
        )
    assert caught.value.param == "x-kvolt-timeout-ms"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_deadline_keeps_the_text_that_there_is(client: OpenAI, is_stream: bool) -> None:
    headers = {"x-request-timeout-ms": "800"}
    create = client.chat.completions.create
    if is_stream:
        chunks = list(create(model=MODEL, messages=ask(), stream=True, extra_headers=headers))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
        extras = [chunk.model_extra["nvext"] for chunk in chunks if "nvext" in (chunk.model_extra or {})]
    else:
        answer = create(model=MODEL, messages=ask(), extra_headers=headers)
        text = answer.choices[0].message.content or ""
        ends = [answer.choices[0].finish_reason]
        extras = [(answer.model_extra or {})["nvext"]]
    assert text
    assert ends == ["length"]
    assert extras[-1]["ended_by"] == {"reason": "deadline", "stage": "total"}


async def test_worker_lost_in_a_stream(server: Server, client: OpenAI) -> None:
    worker = server.bench.start("worker", "sim-mortal", "--name", "sim-mortal", *SPEAKS, name="sim-mortal")
    await until(lambda: "sim-mortal" in [model.id for model in client.models.list()], what="the model")
    with client.chat.completions.create(model="sim-mortal", messages=ask(), stream=True) as stream:
        next(stream)
        worker.kill()
        with pytest.raises(openai.APIError) as caught:
            for _ in stream:
                pass
    assert caught.value.type == "server_error"
    assert caught.value.code == "worker_unreachable"
    with pytest.raises((openai.NotFoundError, openai.InternalServerError)) as refused:
        client.chat.completions.create(model="sim-mortal", messages=say("x"))
    assert refused.value.status_code in (404, 503)
    await until(
        lambda: "sim-mortal" not in [model.id for model in client.models.list()], what="the end of the model"
    )
