"""`kvolt serve` as a user meets it: start, ask, stop."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import (
    MODEL,
    PATIENCE_S,
    Bench,
    Kvolt,
    free_port,
    read_status,
    until,
    until_ready,
)

from kvolt.core.endpoints import InstanceState

FAST = """
[[workers]]
engine = "sim"
model = "sim-tiny"
count = 2
args = {speed = 20, context_length = 512}
"""
DRAIN_S = 20
"""A stop that takes less waits for no deadline."""
SLOW = f"""
[runtime]
drain_timeout_s = {DRAIN_S}

[[workers]]
engine = "sim"
model = "sim-tiny"
count = 2
args = {{speed = 0.5}}
"""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Kvolt, str]]:
    """A `kvolt serve` of two quick workers that several tests ask."""
    with Bench(tmp_path_factory.mktemp("served")) as bench:
        (bench.folder / "kvolt.toml").write_text(FAST)
        serve, url = asyncio.run(bench.serve())
        yield bench, serve, url


@pytest.fixture
async def client(served: tuple[Bench, Kvolt, str]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=served[2], timeout=PATIENCE_S) as client:
        yield client


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello there", "max_tokens": 8, **more}


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, **more}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def events(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; it must end with [DONE]."""
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


async def until_closed(url: str) -> None:
    """Wait until new clients are not let in."""
    async with asyncio.timeout(10):
        while True:
            try:
                async with httpx.AsyncClient(base_url=url) as late:
                    await late.get("/health")
            except httpx.TransportError:
                return


async def test_it_says_where_it_is_and_how_to_ask(
    served: tuple[Bench, Kvolt, str], client: httpx.AsyncClient
) -> None:
    bench, serve, url = served
    found = await serve.says(r"\n  (curl .*)\n")
    words = shlex.split(found[1])
    assert words[:3] == ["curl", "-N", f"{url}/v1/chat/completions"]
    answer = await client.post(words[2], content=words[words.index("-d") + 1])
    assert answer.status_code == 200
    assert answer.text.endswith("data: [DONE]\n\n")
    await bench.until_seen("frontend", "worker-0", "worker-1")


async def test_answers(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == [MODEL]

    whole = await post(client, "/v1/completions", completion())
    assert whole["object"] == "text_completion"
    assert whole["usage"]["completion_tokens"] == 8
    assert whole["usage"]["total_tokens"] == whole["usage"]["prompt_tokens"] + 8
    [choice] = whole["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["text"].split()) == 8

    two = await post(client, "/v1/completions", completion(n=2))
    assert [choice["index"] for choice in two["choices"]] == [0, 1]
    assert two["choices"][0]["text"] != two["choices"][1]["text"]
    assert two["usage"]["completion_tokens"] == 16

    by_ids = await post(client, "/v1/completions", completion(prompt=[70, 71, 72, 73]))
    counts = {name: value for name, value in by_ids["usage"].items() if isinstance(value, int)}
    assert counts == {"prompt_tokens": 4, "completion_tokens": 8, "total_tokens": 12}

    talk = await post(client, "/v1/chat/completions", chat())
    assert talk["object"] == "chat.completion"
    assert talk["choices"][0]["message"]["role"] == "assistant"
    assert len(talk["choices"][0]["message"]["content"].split()) == 8

    chunks = await events(client, "/v1/completions", completion(stream_options={"include_usage": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == choice["text"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == whole["usage"]

    chunks = await events(client, "/v1/chat/completions", chat(n=2))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        for part in chunk["choices"]:
            texts[part["index"]] += part["delta"].get("content", "")
    assert texts[0] == talk["choices"][0]["message"]["content"]
    assert len(texts[1].split()) == 8
    assert not any("usage" in chunk for chunk in chunks)


async def test_requests_that_are_wrong(client: httpx.AsyncClient) -> None:
    wrong: list[tuple[str, dict[str, Any] | bytes, int, str | None]] = [
        ("/v1/completions", completion(model="nobody"), 404, "model"),
        ("/v1/chat/completions", chat(model="nobody"), 404, "model"),
        ("/v1/nothing", completion(), 404, None),
        ("/v1/completions", b"{not json", 400, None),
        ("/v1/completions", b"", 400, None),
        ("/v1/completions", b"[]", 400, None),
        ("/v1/completions", {"model": MODEL}, 400, "prompt"),
        ("/v1/completions", completion(temperature=3), 400, "temperature"),
        ("/v1/completions", completion(temperature="hot"), 400, "temperature"),
        ("/v1/completions", completion(max_tokens=0), 400, "max_tokens"),
        ("/v1/completions", completion(n=0), 400, "n"),
        ("/v1/completions", completion(seed=10**30), 400, "seed"),
        ("/v1/completions", completion(prompt=[]), 400, "prompt"),
        ("/v1/completions", completion(prompt=[-1]), 400, "prompt[0]"),
        ("/v1/completions", completion(prompt=[1, 10**30]), 400, "prompt[1]"),
        ("/v1/completions", completion(prompt="word " * 600), 400, "prompt"),
        ("/v1/completions", completion(max_tokens=512), 400, "max_tokens"),
        ("/v1/chat/completions", chat(messages=[]), 400, "messages"),
    ]
    for path, body, status, param in wrong:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await client.post(path, content=content)
        assert (response.status_code, path, body) == (status, path, body)
        error = response.json()["error"]
        assert error["message"]
        assert error["param"] == param, body
    assert (await client.get("/v1/completions")).status_code == 405
    await post(client, "/v1/completions", completion())


async def test_a_frontend_that_has_just_started_knows_the_models_that_there_are(bench: Bench) -> None:
    """Its port opens when it does; on a machine that is too busy for that it says to try again."""
    _, first_url = await bench.frontend()
    bench.worker("worker", speed=20)
    await until_ready(first_url)
    _, url = await bench.frontend()
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/completions", json=completion())
        while answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
            await asyncio.sleep(0.1)
            answer = await client.post("/v1/completions", json=completion())
        assert answer.status_code == 200


async def test_health_follows_the_workers(bench: Bench) -> None:
    _, url = await bench.frontend()
    async with httpx.AsyncClient(base_url=url) as client:
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]) == (503, [])
        assert (await client.get("/live")).status_code == 200
        early = await client.post("/v1/completions", json=completion())
        assert (early.status_code, early.headers["retry-after"]) == (503, "1"), "a worker may be starting"
        worker = bench.worker("worker", speed=20)
        await until_ready(url)
        assert (await client.get("/health")).json()["models"] == [MODEL]
        assert (await client.post("/v1/completions", json=completion())).status_code == 200
        worker.send(signal.SIGTERM)
        assert await worker.ended() == 0
        health = await client.get("/health")
        assert (health.status_code, health.json()["models"]) == (503, [])
        assert (await client.post("/v1/completions", json=completion())).status_code == 503


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stop_lets_running_requests_finish(bench: Bench, number: signal.Signals) -> None:
    (bench.folder / "kvolt.toml").write_text(SLOW)
    serve, url = await bench.serve()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        running = [
            asyncio.ensure_future(events(client, "/v1/completions", completion(max_tokens=150, seed=seed)))
            for seed in range(4)
        ]
        await bench.until_computing(4)
        serve.send(number)
        await until_closed(url)
        states = {
            name: {endpoint.state for endpoint in view.status.endpoints}
            for name, view in (await bench.look()).items()
            if view.status is not None
        }
        assert states == {key: {InstanceState.DRAINING} for key in ("frontend", "worker-0", "worker-1")}
        assert not any(task.done() for task in running), "the requests were too short to say anything"
        for chunks in await asyncio.gather(*running):
            assert len("".join(chunk["choices"][0]["text"] for chunk in chunks).split()) == 150
    stopped_at = time.monotonic()
    assert await serve.ended() == 0
    assert time.monotonic() - stopped_at < DRAIN_S
    await bench.nothing_left()
    assert list((bench.folder / "tmp").iterdir()) == []
    left = {path.name for path in (bench.folder / "logs").iterdir()}
    assert left == {".lock", "supervisor.json", "frontend.log", "worker-0.log", "worker-1.log"}
    assert "kvolt: stopped" in serve.out


async def test_the_command_that_is_named_for_stop_stops_it(bench: Bench) -> None:
    bench.add_commands()
    serve, _ = await bench.serve("--workers", "1")
    bench.worker("other")  # has no supervisor
    await bench.until_seen("frontend", "worker-0", "other")
    hint = re.search("`(kvolt status .*kill)`", bench.run("stop").stderr)
    assert hint is not None
    command = partial(subprocess.run, hint[1], shell=True, executable="bash", cwd=bench.folder, env=bench.env)
    assert (await asyncio.to_thread(command)).returncode == 0
    assert await serve.ended() == 0
    await bench.until_seen("other")


async def test_a_second_signal_ends_it_at_once(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text(SLOW)
    serve, url = await bench.serve()
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        running = asyncio.ensure_future(events(client, "/v1/completions", completion(max_tokens=5000)))
        await bench.until_computing(1)
        serve.send(signal.SIGINT)
        await serve.says("stopping: SIGINT")
        asked_at = time.monotonic()
        serve.send(signal.SIGINT)
        assert await serve.ended() == 130
        await bench.nothing_left()
        assert time.monotonic() - asked_at < DRAIN_S
        with pytest.raises(httpx.TransportError):
            await running


async def test_others_join_it_and_a_restart_finds_its_config(bench: Bench) -> None:
    join = f"127.0.0.1:{free_port()}"
    await bench.serve("--discovery-join-listen", join)
    config = bench.folder / "logs" / "workers.toml"
    assert config.stat().st_mode & 0o777 == 0o600
    bench.worker("other", "--join", join)
    await bench.until_seen("frontend", "worker-0", "worker-1", "other")
    first = bench.child_pid("worker-0")
    os.kill(first, signal.SIGKILL)

    def has_restarted() -> bool:
        status = read_status(bench.folder / "logs")
        assert status is not None
        return any(child.name == "worker-0" and child.restarts and child.pid for child in status.children)

    await until(has_restarted, what="the restart")
    await bench.until_seen("frontend", "worker-0", "worker-1", "other")


async def test_a_second_one_says_whom_it_joins_and_keeps_its_logs_apart(bench: Bench) -> None:
    first, _ = await bench.serve("--workers", "1")
    logged = (bench.folder / "logs" / "worker-0.log").read_bytes()
    second = bench.start("serve", "--port", "0", "--workers", "1", name="second")
    await second.says("joins 2 processes already in namespace default; use --namespace to keep apart")
    await second.says("ready at ")
    logs = bench.folder / "logs"
    statuses = [read_status(logs), read_status(logs / "2")]
    assert [status.pid for status in statuses if status] == [first.pid, second.pid]
    assert (logs / "worker-0.log").read_bytes() == logged
    # The first one's worker makes the second one ready; its own may still be starting.
    await until(lambda: (logs / "2" / "worker-0.log").stat().st_size > 0, what="the second worker's log")
    apart = bench.start("serve", "--port", "0", "--namespace", "apart", name="apart")
    await apart.says("ready at ")
    assert "joins" not in apart.out


async def test_json_logs_are_all_that_it_prints(bench: Bench) -> None:
    serve, url = await bench.serve("--workers", "1", "--set", "log.format=json", "--log-level", "debug")
    async with httpx.AsyncClient(base_url=url) as client:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"})
    serve.send(signal.SIGTERM)
    assert await serve.ended() == 0
    records = [json.loads(line) for line in serve.out.splitlines()]
    assert {each["process"] for each in records} == {"kvolt", "frontend", "worker-0"}
    assert "debug" in {each["level"] for each in records}
    [finished] = [each for each in records if each.get("request_id") == "mine" and "status" in each]
    assert (finished["status"], finished["output_tokens"], finished["worker"]) == (200, 1, "worker-0")


async def test_it_says_what_it_waits_for(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text(
        '[runtime]\nstart_timeout_s = 15\n[[workers]]\nengine = "sim"\nmodel = "sim-tiny"\nrole = "prefill"\n'
    )
    serve = bench.start("serve", "--port", "0")
    await serve.says(
        r"not ready after 15 s: no worker has the role aggregated or decode, which requests need \(only prefill\)"
    )
    await asyncio.sleep(0.5)
    assert serve.exit_code is None
    assert serve.out.count("not ready") == 1
