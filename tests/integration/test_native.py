"""The native engine as processes: what is told of it, and what happens when a part of it dies, stops or never starts.

The engine computes in a process of its own beneath the worker's, so there is one more that can be lost or left.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from tests.integration.processes import PATIENCE_S, Bench, Kvolt, read_status, until, until_ready

from kvolt.core.endpoints import KV_TOPIC
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, KvEventBatch, Stored
from kvolt.runtime.events.port import EventStream
from kvolt.testing.tiny_models import tiny_checkpoint

MODEL = "tiny"
BLOCK_SIZE = 16
KV_BLOCKS = 1024
START_S = 50.0
"""torch takes seconds to import, and more of them on a busy machine."""


decode_batch = msgspec.msgpack.Decoder(KvEventBatch).decode


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


def configure(bench: Bench, checkpoint: Path, count: int = 1, **more: Any) -> None:
    """What every command that runs there finds."""
    arguments = {
        "served_name": MODEL,
        "dtype": "float32",
        "threads": 1,
        "kv_blocks": KV_BLOCKS,
        "block_size": BLOCK_SIZE,
        "measure_steps": False,
    }
    group = {"model": str(checkpoint), "count": count, **more}
    lines = [f"{key} = {json.dumps(value)}" for key, value in group.items()]
    inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    (bench.folder / "kvolt.toml").write_text(
        "\n".join(
            ["[[workers]]", *lines, f"args = {{{inner}}}", "[supervisor]", "restart_backoff_s = 0.1", ""]
        )
    )


def completion(prompt: str = "Hello there", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, **more}


def engine_of(pid: int) -> psutil.Process:
    """The process that computes for this worker."""
    children = psutil.Process(pid).children(recursive=True)
    [found] = [child for child in children if "kvolt.engines.native.shell.process" in child.cmdline()]
    return found


# --- a frontend and a worker


@dataclass(frozen=True, slots=True)
class Pair:
    bench: Bench
    worker: Kvolt
    url: str
    admin: dict[str, str]

    def health(self) -> httpx.Response:
        return httpx.get(f"{self.admin['worker']}/health")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Iterator[Pair]:
    with Bench(tmp_path_factory.mktemp("pair")) as bench:
        configure(bench, checkpoint, stuck_after_s=0.7)

        async def start() -> Pair:
            worker = bench.worker("worker")
            _, url = await bench.frontend()
            await until_ready(url, START_S)
            views = await bench.until_seen("frontend", "worker")
            return Pair(bench, worker, url, {name: f"http://{view.admin}" for name, view in views.items()})

        yield asyncio.run(start())


@pytest.fixture
async def client(pair: Pair) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=pair.url, timeout=PATIENCE_S) as client:
        yield client


async def post(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def figures(text: str) -> dict[str, float]:
    """Samples of a metrics page, without the labels that identify the worker."""
    text = re.sub(r',?(namespace|component|endpoint|worker_id)="[^"]*"', "", text).replace("{,", "{")
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def series(name: str, **labels: str) -> str:
    pairs = ",".join(f'{label}="{value}"' for label, value in sorted({"model": MODEL, **labels}.items()))
    return f"kvolt_worker_{name}{{{pairs}}}"


async def test_metrics_move(pair: Pair, client: httpx.AsyncClient) -> None:
    async def look() -> dict[str, float]:
        return figures((await client.get(f"{pair.admin['worker']}/metrics")).text)

    def moved(name: str, **labels: str) -> float:
        return after[series(name, **labels)] - before.get(series(name, **labels), 0.0)

    prompt = "a question that is some blocks long " * 3
    before = await look()
    first = await post(client, completion(prompt, max_tokens=20))
    again = await post(client, completion(prompt, max_tokens=20))
    after = await look()
    num_prompt = first["usage"]["prompt_tokens"]
    num_cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert num_cached > 2 * BLOCK_SIZE
    assert moved("prompt_tokens_total") == 2 * num_prompt
    assert moved("cached_tokens_total") == num_cached
    assert moved("prefill_tokens_total") == 2 * num_prompt - num_cached
    assert moved("decode_tokens_total") == 2 * 19
    assert moved("steps_total") == moved("step_seconds_count") == 2 * 20
    assert moved("step_seconds_sum") > 0
    assert moved("requests_total", outcome="finished") == 2
    assert moved("kv_events_total", kind="stored") >= num_cached // BLOCK_SIZE
    assert after[series("kv_total_blocks", dp_rank="0")] == KV_BLOCKS
    assert 0 < after[series("kv_hit_rate")] < 1
    assert after[series("load_seconds")] > 0


async def changes(news: EventStream) -> list[KvChange]:
    """Those of the next batch."""
    return [event.change for event in decode_batch((await anext(news)).payload).events]


async def test_kv_events_name_the_blocks_of_a_prompt(pair: Pair, client: httpx.AsyncClient) -> None:
    async with pair.bench.runtime() as runtime, asyncio.timeout(PATIENCE_S):
        news = runtime.events.subscribe(KV_TOPIC)
        hashes_by_prompt: list[list[SequenceHash]] = []
        while True:  # a new subscription may miss the first events
            prompt = f"{len(hashes_by_prompt)} is the number of this prompt. " * 4
            await post(client, completion(prompt, max_tokens=1))
            tokenized = await client.post("/tokenize", json={"model": MODEL, "prompt": prompt})
            hasher = SequenceHasher(BLOCK_SIZE, request_seed(None, None))
            hasher.extend(tokenized.json()["tokens"])
            hashes_by_prompt.append(list(hasher.sequence))
            try:
                async with asyncio.timeout(0.5):
                    [change] = await changes(news)
                break
            except TimeoutError:
                continue
        assert isinstance(change, Stored)
        assert change.parent is None
        assert list(change.sequence_hashes) in hashes_by_prompt
        assert len(change.sequence_hashes) > 2
        cleared = await client.post(f"{pair.admin['worker']}/clear_kv_blocks")
        assert cleared.json()["cleared_blocks"] >= len(change.sequence_hashes)
        while not any(isinstance(one, Cleared) for one in await changes(news)):
            pass  # events of the prompts before


async def test_a_step_that_does_not_end_is_unhealthy_until_it_does(
    pair: Pair, client: httpx.AsyncClient
) -> None:
    await post(client, completion())  # the first step may take longer than the others
    engine = engine_of(pair.worker.pid)
    assert pair.health().status_code == 200
    body = completion(max_tokens=1000, stream=True, stream_options={"include_usage": True})
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.aiter_lines()
        await anext(lines)
        engine.suspend()
        try:
            await until(lambda: pair.health().status_code == 503, what="the worker to notice")
            check = pair.health().json()["checks"]["engine"]
            assert check["state"] == "unhealthy"
            assert "no step for" in check["reason"]
        finally:
            engine.resume()
        await until(lambda: pair.health().status_code == 200, what="the worker to be well again")
        told = [line async for line in lines if line]
    assert told[-1] == "data: [DONE]"
    assert '"completion_tokens":1000' in told[-2]


# --- kvolt serve


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@asynccontextmanager
async def asking(
    url: str, num_streams: int, num_tokens: int
) -> AsyncIterator[tuple[httpx.AsyncClient, list[asyncio.Task[str]]]]:
    """Streams under way; each task's result is all that came."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def one() -> str:
            body = completion(max_tokens=num_tokens, stream=True)
            return (await client.post("/v1/completions", json=body)).text

        tasks = [asyncio.ensure_future(one()) for _ in range(num_streams)]
        try:
            yield client, tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def restarts(bench: Bench, name: str) -> int:
    """How often `kvolt serve` has started it again."""
    status = read_status(bench.folder / "logs")
    assert status is not None
    [count] = [child.restarts for child in status.children if child.name == name]
    return count


async def test_what_dies_comes_back_and_nothing_is_left(bench: Bench, checkpoint: Path) -> None:
    """An engine is killed under its worker, then a worker above its engine, then all of it is stopped by Ctrl-C while
    one part loads and the other computes."""
    configure(bench, checkpoint, count=2)
    routed = (
        "--router",
        "least-loaded",
    )  # `latency` may prefer the one whose steps were measured on a quieter machine
    serve = bench.start(
        "serve", str(checkpoint), "--port", "0", "--set", "discovery.ttl_s=1.5", *routed, name="serve"
    )
    url = (await serve.says(r"ready at (http://[\d.:]+) with tiny \(2 workers\)", START_S))[1]
    engines = [engine_of(bench.child_pid(f"worker-{number}")) for number in range(2)]
    async with asking(url, 8, 1500) as (client, running):
        await bench.until_computing(8)
        lost, kept = await bench.open_requests("worker-0", "worker-1")
        assert min(lost, kept) > 0
        engines[0].kill()
        await serve.says(r"worker-0 \| kvolt: .*the engine process was killed by SIGKILL")
        await serve.says(r"worker-0 exited with code 1")
        # What comes now is answered by the other one.
        later = await asyncio.gather(*(post(client, completion()) for _ in range(20)))
        assert [answer["usage"]["completion_tokens"] for answer in later] == [8] * 20
        answers = await asyncio.gather(*running)
    assert all(
        answer.endswith("data: [DONE]\n\n") for answer in answers
    )  # the other one has gone on with them
    await bench.until_seen("frontend", "worker-0", "worker-1", timeout_s=START_S)
    assert [restarts(bench, f"worker-{number}") for number in range(2)] == [1, 0]

    async with asking(url, 4, 1500) as (_, running):
        await bench.until_computing(4)
        os.kill(bench.child_pid("worker-1"), signal.SIGKILL)
        await until(lambda: not engines[1].is_running(), what="the end of the engine")
        answers = await asyncio.gather(*running)
    assert all(
        answer.endswith("data: [DONE]\n\n") or '"code":"worker_unreachable"' in answer for answer in answers
    )
    await until(lambda: restarts(bench, "worker-1") == 1, what="the restart")

    async with asking(url, 2, 1500) as (_, running):
        await bench.until_computing(2)
        serve.send(signal.SIGINT)
        assert all(answer.endswith("data: [DONE]\n\n") for answer in await asyncio.gather(*running))
    assert await serve.ended() == 0
    await bench.nothing_left()
    left = [path.name for path in (bench.folder / "tmp").rglob("*") if path.is_file()]
    assert {name for name in left if not name.endswith(".lock")} == set(), (
        "but the locks of measuring in turn"
    )
    assert "kvolt: stopped" in serve.out


def test_a_name_that_is_no_models(bench: Bench) -> None:
    """Told at once, in one line that says what to do: nothing was started."""
    ended = bench.run("serve", "no-such-model", "--port", "0")
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert line.startswith("kvolt: unknown model 'no-such-model' (use smollm2-135m (built in), a path, or ")
    assert ended.stdout == ""


async def test_a_model_that_cannot_be_loaded(bench: Bench, checkpoint: Path, tmp_path: Path) -> None:
    """What only the engine finds out: the worker says it in one line, and no restart is tried."""
    other = shutil.copytree(checkpoint, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    configure(bench, other)
    serve = bench.start("serve", "--port", "0", name="serve")
    assert await serve.ended(START_S) == 2
    (said,) = [line for line in serve.out.splitlines() if "MambaForCausalLM" in line]
    assert said.startswith("worker-0 | kvolt: ")
    assert "stopping, since a restart cannot help" in serve.out
    assert "restarting in" not in serve.out
    await bench.nothing_left()
