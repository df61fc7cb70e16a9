"""A cluster without shared disk: one process serves discovery, the others join it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import (
    GENERATE,
    MODEL,
    PATIENCE_S,
    Bench,
    decode_delta,
    free_port,
    sim_request,
    sim_tokens,
    until,
    until_ready,
)

from kvolt.runtime.client import EndpointClient

TTL_S = "1.5"
ASK = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S=TTL_S) as bench:
        yield bench


async def read(client: EndpointClient, number: int, num_tokens: int) -> float:
    """One stream from the worker `other`, whole; when it ended."""
    [instance] = [instance for instance in client.candidates() if instance.process == "other"]
    request = sim_request(number, num_tokens)
    tokens: list[int] = []
    async with await client.stream(request, instance, decode=decode_delta) as stream:
        async for delta in stream:
            tokens += delta.token_ids
    assert tokens == sim_tokens(number, num_tokens)
    return time.monotonic()


@pytest.mark.parametrize("store", ["mem", "file"])
async def test_the_frontend_that_serves_discovery_is_killed(bench: Bench, store: str) -> None:
    join = f"127.0.0.1:{free_port()}"
    hosting = ("--discovery-kind", store, "--discovery-join-listen", join)
    host, url = await bench.frontend(*hosting)
    workers = [
        bench.worker("worker", "--join", join, speed=0.5),
        bench.worker("other", "--join", join, speed=0.5),
    ]
    await until_ready(url)
    joined = {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join"}
    await bench.until_seen("frontend", "worker", "other", **joined)
    async with bench.runtime(**joined) as runtime:
        client = await runtime.client(GENERATE)
        await until(lambda: len(client.candidates()) == 2, what="both workers")
        streams = [asyncio.ensure_future(read(client, number, 250)) for number in range(20)]
        await bench.until_computing(20, **joined)
        host.kill()
        await asyncio.sleep(float(TTL_S) + 1)
        # Discovery is away: what is known stays, and calls go on.
        assert len(client.candidates()) == 2
        await read(client, 0, 5)
        _, url = await bench.frontend(*hosting, name="frontend-again")
        restarted_at = time.monotonic()
        await until_ready(url)
        await bench.until_seen("frontend-again", "worker", "other", **joined)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            for _ in range(4):
                assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        assert max(await asyncio.gather(*streams)) > restarted_at, "the streams were too short"
        assert len(client.candidates()) == 2
    assert [worker.exit_code for worker in workers] == [None, None]


async def test_the_worker_that_serves_discovery_is_killed(bench: Bench) -> None:
    join = f"127.0.0.1:{free_port()}"
    hosting = ("--discovery-kind", "mem", "--discovery-join-listen", join)
    host = bench.worker("host", *hosting, speed=0.5)
    await host.says("serving sim-tiny")
    other = bench.worker("other", "--join", join, speed=0.5)
    frontend, url = await bench.frontend("--join", join)
    joined = {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join"}
    await bench.until_seen("frontend", "host", "other", **joined)
    await until_ready(url)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {**ASK, "max_tokens": 150, "stream": True}
        running = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(10)]
        await bench.until_computing(10, **joined)
        host.kill()
        answers = [(await task).text for task in running]
        assert sum(answer.endswith("data: [DONE]\n\n") for answer in answers) == 5
        assert sum('"code":"worker_lost"' in answer for answer in answers) == 5
        for _ in range(4):
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        bench.worker("host", *hosting, speed=0.5)
        await bench.until_seen("frontend", "host", "other", **joined)
        for _ in range(4):
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    assert [process.exit_code for process in (other, frontend)] == [None, None]
    assert [view["name"] for view in bench.status("--join", join)] == ["frontend", "host", "other"]
