"""An edge of several processes on one port, with a router of its own: to a client it is one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, Kvolt, read_status, until

HTTP = ("frontend-0", "frontend-1")
ALL = (*HTTP, "router", "worker-0", "worker-1")

FAST = '[[workers]]\nengine = "sim"\nmodel = "sim-tiny"\ncount = 2\nargs = {speed = 50}\n'
SLOW = """
[frontend]
max_requests = 6

[supervisor]
restart_backoff_s = 0.2

[[workers]]
engine = "sim"
model = "sim-tiny"
count = 2
args = {speed = 0.5}
"""


class Connection:
    """One kept connection to the shared port, and the process that has the other end of it."""

    def __init__(self, client: httpx.AsyncClient, process: str) -> None:
        self.client = client
        self.process = process

    async def complete(self, **more: Any) -> httpx.Response:
        return await self.client.post("/v1/completions", json=completion(**more))

    async def metrics(self) -> dict[str, float]:
        return parse((await self.client.get("/metrics")).text)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.client.aclose()


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Hello", "max_tokens": 2, **more}


def is_whole(answer: str) -> bool:
    return answer.endswith("data: [DONE]\n\n") and '"error"' not in answer


def parse(text: str) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {series: float(value) for series, _, value in lines}


async def connect(bench: Bench, url: str) -> Connection:
    """A new connection; the system chooses the process."""
    limits = httpx.Limits(max_connections=1)
    client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)
    async with client.stream("GET", "/live") as answer:
        local = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        owner = next(name for name in HTTP if local in remote_ports(bench.child_pid(name)))
        await answer.aread()
    return Connection(client, owner)


def remote_ports(pid: int) -> set[int]:
    return {found.raddr.port for found in psutil.Process(pid).net_connections("tcp") if found.raddr}


@asynccontextmanager
async def both(bench: Bench, url: str, each: int = 1) -> AsyncIterator[list[list[Connection]]]:
    """This many connections to each of the two processes."""
    found: dict[str, list[Connection]] = {name: [] for name in HTTP}
    unwanted: list[Connection] = []
    try:
        for _ in range(200):
            connection = await connect(bench, url)
            room = len(found[connection.process]) < each
            (found[connection.process] if room else unwanted).append(connection)
            if all(len(connections) == each for connections in found.values()):
                yield list(found.values())
                return
        raise AssertionError(f"connections are not spread: {Counter(one.process for one in unwanted)}")
    finally:
        for connection in (*unwanted, *(one for some in found.values() for one in some)):
            await connection.client.aclose()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, Kvolt, str]]:
    with Bench(tmp_path_factory.mktemp("served")) as bench:
        (bench.folder / "kvolt.toml").write_text(FAST)
        serve, url = asyncio.run(
            bench.serve(
                *("--processes", "2", "--router", "round-robin", "--set", "supervisor.restart_backoff_s=0.2")
            )
        )
        yield bench, serve, url


async def test_one_rotation_and_one_set_of_metrics(served: tuple[Bench, Kvolt, str]) -> None:
    bench, _, url = served
    async with both(bench, url) as ([first], [second]):
        before = await first.metrics()
        workers: Counter[str] = Counter()
        # Unevenly, so that two rotations would not come out even by chance.
        for connection, number in ((first, 13), (second, 4), (first, 2), (second, 21)):
            for _ in range(number):
                answer = (await connection.complete(nvext={"extra_fields": ["worker_id"]})).json()
                workers[json.dumps(answer["nvext"]["worker_id"])] += 1
        assert sorted(workers.values()) == [20, 20]

        labels = f'endpoint="completions",error_type="",model="{MODEL}",request_type="unary",status="success"'
        series = f"kvolt_frontend_requests_total{{{labels}}}"
        seen = [await connection.metrics() for connection in (first, second)]
        assert seen[0][series] - before.get(series, 0) == 40
        assert seen[0]["kvolt_router_answers_total"] - before["kvolt_router_answers_total"] == 40
        own = [
            {name: value for name, value in one.items() if name.startswith("kvolt_frontend_")} for one in seen
        ]
        assert own[0] == own[1]
        assert len(own[0]) > 100
        for one in seen:
            assert one['kvolt_frontend_processes{response="received"}'] == 2
            assert all(one[f'process_resident_memory_bytes{{process="{name}"}}'] > 0 for name in HTTP)
            assert one["kvolt_router_present"] == 1
        views = await bench.look()
        async with httpx.AsyncClient() as client:  # behind the public port each tells its own
            alone = [parse((await client.get(f"http://{views[name].admin}/metrics")).text) for name in HTTP]
        assert sum(one[series] for one in alone) == seen[0][series]
        assert all(0 < one[series] < seen[0][series] for one in alone)


async def test_a_threshold_reaches_all_of_them(served: tuple[Bench, Kvolt, str]) -> None:
    bench, _, url = served
    async with both(bench, url) as ([first], [second]):
        for connection, value in ((first, 0.9), (second, 0.95)):
            wanted = {"model": MODEL, "active_decode_blocks_threshold": value}
            assert (await connection.client.post("/busy_threshold", json=wanted)).status_code == 200
            for asked in (first, second):
                [told] = (await asked.client.get("/busy_threshold")).json()["thresholds"]
                assert told["active_decode_blocks_threshold"] == value


def restarts(bench: Bench, name: str) -> int:
    status = read_status(bench.folder / "logs")
    assert status is not None
    return next(child.restarts for child in status.children if child.name == name)


async def test_a_killed_router_costs_no_request(served: tuple[Bench, Kvolt, str]) -> None:
    bench, serve, url = served
    stop = asyncio.Event()
    statuses: Counter[int] = Counter()

    async def ask(connection: Connection) -> None:
        while not stop.is_set():
            statuses[(await connection.complete()).status_code] += 1

    async with both(bench, url, each=4) as groups:
        asking = [asyncio.ensure_future(ask(connection)) for group in groups for connection in group]
        await until(lambda: statuses.total() > 100, what="load")
        os.kill(bench.child_pid("router"), signal.SIGKILL)
        before = statuses.total()
        await until(lambda: statuses.total() > before + 100, what="answers without a router")
        await until(lambda: restarts(bench, "router") == 1, what="the restart")
        stop.set()
        await asyncio.gather(*asking)
        assert set(statuses) == {200}

        async with asyncio.timeout(PATIENCE_S):
            while (figures := await groups[0][0].metrics())["kvolt_router_present"] == 0:
                await asyncio.sleep(0.1)
        await groups[0][0].complete()
        await groups[1][0].complete()
        after = await groups[1][0].metrics()
        assert after["kvolt_router_answers_total"] == figures["kvolt_router_answers_total"] + 2
    assert serve.out.count("router process unavailable, routing locally") == 2  # once by each process


async def test_limits_hold_over_all_and_a_killed_process_takes_only_its_own_along(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text(SLOW)
    _, url = await bench.serve("--processes", "2", "--set", "discovery.ttl_s=5")
    await bench.until_seen(*ALL)
    async with both(bench, url, each=4) as (first, second):

        async def stream(connection: Connection) -> str:
            return (await connection.complete(max_tokens=150, stream=True)).text

        mine, others = first[:3], second[:3]
        running = [asyncio.ensure_future(stream(connection)) for connection in (*mine, *others)]
        await bench.until_computing(6)
        for connection in (first[3], second[3]):
            refused = await connection.complete()
            assert refused.status_code == 429
            assert refused.headers["retry-after"]
            figures = await connection.metrics()
            assert figures[f'kvolt_frontend_active_requests{{model="{MODEL}"}}'] == 6

        os.kill(bench.child_pid(mine[0].process), signal.SIGKILL)
        answers = await asyncio.gather(*running, return_exceptions=True)
        assert all(isinstance(answer, httpx.TransportError) for answer in answers[:3]), answers[:3]
        assert all(is_whole(str(answer)) for answer in answers[3:]), answers[3:]
        # Its places are free again, and the other one goes on by itself.
        answers = await asyncio.gather(*(stream(connection) for connection in second))
        assert all(is_whole(answer) for answer in answers)

    await until(lambda: restarts(bench, first[0].process) == 1, what="the restart")
    await bench.until_seen(*ALL)
    assert [restarts(bench, name) for name in ALL if name != first[0].process] == [0] * 4
    async with both(bench, url) as ([one], [other]):
        assert {one.process, other.process} == set(HTTP)
        for connection in (one, other):
            assert (await connection.complete()).status_code == 200
            assert (await connection.metrics())['kvolt_frontend_processes{response="missing"}'] == 0


async def test_it_stops_in_order_and_finishes_what_runs(bench: Bench) -> None:
    """The edge alone: `kvolt frontend --processes`, with a worker that joins."""
    edge = bench.start("frontend", "--port", "0", "--processes", "2", name="edge")
    bench.worker("worker", speed=0.5)
    url = (await edge.says(r"ready at (http://[\d.:]+) "))[1]
    async with both(bench, url) as groups:
        asked = [asyncio.ensure_future(connection.complete(max_tokens=100)) for [connection] in groups]
        await bench.until_computing(2)
        edge.send(signal.SIGINT)
        for answer in await asyncio.gather(*asked):
            assert answer.json()["usage"]["completion_tokens"] == 100
    assert await edge.ended() == 0
    assert list((bench.folder / "logs").glob("*.counts")) == []
    await bench.until_seen("worker")
