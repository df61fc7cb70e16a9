"""A cluster without shared disk: one process serves discovery, the others join it."""

from __future__ import annotations

import asyncio
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

from kvolt.runtime.endpoint.client import EndpointClient

TTL_S = "1.5"
LONG = 3000
"""Tokens: more than any test waits for."""

ASK = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S=TTL_S) as bench:
        yield bench


class Reading:
    """A stream from the worker `other` that goes on until it is left; every token is checked as it comes."""

    def __init__(self, client: EndpointClient, number: int) -> None:
        self.num_tokens = 0
        self._task = asyncio.ensure_future(self._run(client, number))

    async def _run(self, client: EndpointClient, number: int) -> None:
        [instance] = [instance for instance in client.candidates() if instance.process == "other"]
        expected = sim_tokens(number, LONG)
        async with await client.stream(sim_request(number, LONG), instance, decode=decode_delta) as stream:
            async for delta in stream:
                for token in delta.token_ids:
                    assert token == expected[self.num_tokens]
                    self.num_tokens += 1

    async def goes_on(self) -> None:
        before = self.num_tokens
        await until(lambda: self._task.done() or self.num_tokens > before, what="the next token")
        assert not self._task.done(), self._task.exception()

    async def leave(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_the_frontend_that_serves_discovery_is_killed(bench: Bench) -> None:
    join = f"127.0.0.1:{free_port()}"
    hosting = ("--set", "discovery.kind=file", "--discovery-join-listen", join)
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
        streams = [Reading(client, number) for number in range(20)]
        await bench.until_computing(20, **joined)
        host.kill()
        await asyncio.sleep(float(TTL_S) + 1)
        # Discovery is away: what is known stays, and calls go on.
        assert len(client.candidates()) == 2
        streams.append(Reading(client, 20))
        for stream in streams:
            await stream.goes_on()
        _, url = await bench.frontend(*hosting, name="frontend-again")
        await until_ready(url)
        await bench.until_seen("frontend-again", "worker", "other", **joined)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            for _ in range(4):
                assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        assert len(client.candidates()) == 2
        for stream in streams:
            await stream.goes_on()
            await stream.leave()
    assert [worker.exit_code for worker in workers] == [None, None]


async def test_the_worker_that_serves_discovery_is_killed(bench: Bench) -> None:
    join = f"127.0.0.1:{free_port()}"
    hosting = ("--set", "discovery.kind=mem", "--discovery-join-listen", join)
    host = bench.worker("host", *hosting, speed=0.5)
    await host.says("worker serving: model=sim-tiny")
    other = bench.worker("other", "--join", join, speed=0.5)
    frontend, url = await bench.frontend("--join", join)
    joined = {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join"}
    await bench.until_seen("frontend", "host", "other", **joined)
    await until_ready(url)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        body = {**ASK, "max_tokens": 150, "ignore_eos": True, "stream": True}
        running = [asyncio.ensure_future(http.post("/v1/completions", json=body)) for _ in range(10)]
        await bench.until_computing(10, **joined)
        lost, kept = await bench.open_requests("host", "other", **joined)
        assert min(lost, kept) > 0
        host.kill()
        answers = [(await task).text for task in running]
        # Those of which nothing had come yet may have been tried again and answered.
        whole = [answer for answer in answers if answer.endswith("data: [DONE]\n\n")]
        assert len(whole) >= kept
        assert all('"code":"worker_unreachable"' in answer for answer in answers if answer not in whole)
        for _ in range(4):
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
        bench.worker("host", *hosting, speed=0.5)
        await bench.until_seen("frontend", "host", "other", **joined)
        for _ in range(4):
            assert (await http.post("/v1/completions", json=ASK)).status_code == 200
    assert [process.exit_code for process in (other, frontend)] == [None, None]
    assert [view["name"] for view in bench.status("--join", join)] == ["frontend", "host", "other"]
