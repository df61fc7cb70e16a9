"""What an operator sees and can do: health, metrics, status, cordon, drain, resume."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, POLL_S, Bench, Kvolt, until_ready


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    # A killed process stays registered for as long as it takes `kvolt status` to look for it.
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S="60") as bench:
        yield bench


@dataclass(frozen=True, slots=True)
class Cluster:
    """A frontend and two workers, with a client for all of them."""

    bench: Bench
    client: httpx.AsyncClient
    url: str
    admin: dict[str, str]
    """URL of each process's admin server."""
    workers: dict[str, Kvolt]

    async def ask(self, max_tokens: int = 2) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": max_tokens}
        return await self.client.post(f"{self.url}/v1/completions", json=body)

    async def control(self, name: str, path: str) -> dict[str, Any]:
        response = await self.client.post(self.admin[name] + path)
        assert response.status_code == 200, response.text
        status: dict[str, Any] = response.json()
        return status

    def states(self) -> dict[str, set[str]]:
        """As `kvolt status` prints them."""
        return {
            view["name"]: {endpoint["state"] for endpoint in view["status"]["endpoints"]}
            for view in self.bench.status()
        }


@asynccontextmanager
async def cluster(bench: Bench) -> AsyncIterator[Cluster]:
    workers = {name: bench.worker(name, speed=0.5) for name in ("worker-0", "worker-1")}
    _, url = await bench.frontend("--router", "round-robin")  # equal requests reach both
    await until_ready(url)
    views = await bench.until_seen("frontend", "worker-0", "worker-1")
    admin = {name: f"http://{view.admin}" for name, view in views.items()}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        yield Cluster(bench, client, url, admin, workers)


async def test_every_process_tells_of_itself(bench: Bench) -> None:
    async with cluster(bench) as running:
        await running.ask()
        assert {view["name"]: f"http://{view['admin']}" for view in bench.status()} == running.admin
        for name, admin in running.admin.items():
            for path in ("/health", "/live", "/ready"):
                response = await running.client.get(admin + path)
                assert (response.status_code, name, path) == (200, name, path)
            metrics = (await running.client.get(f"{admin}/metrics")).text
            for metric in (
                "kvolt_discovery_connected",
                "kvolt_plane_streams_total",
                "process_resident_memory_bytes",
            ):
                assert f"\n{metric}" in metrics, (name, metric)
            status = (await running.client.get(f"{admin}/status")).json()
            assert status["name"] == name
        table = bench.run("status")
        assert table.returncode == 0, table.stdout
        for word in ("frontend", "worker-0", "worker-1", MODEL, "aggregated", "sim", "ready"):
            assert word in table.stdout
        once = bench.run("top", "--once")
        assert (once.returncode, "3 processes" in once.stdout) == (0, True)

        running.workers["worker-1"].kill()
        broken = bench.run("status")
        assert broken.returncode == 1
        assert "unreachable" in broken.stdout
        assert "worker-1 at 127.0.0.1" in broken.stdout
        assert "does not answer: " in broken.stdout


def test_status_when_nothing_runs(bench: Bench) -> None:
    table = bench.run("status")
    assert table.returncode == 1
    assert "nothing runs in namespace 'default'" in table.stdout
    assert "kvolt serve" in table.stdout
    away = bench.run("status", "--join", "127.0.0.1:1")
    assert away.returncode == 1
    assert "127.0.0.1:1" in away.stderr


async def test_cordon_drain_and_resume(bench: Bench) -> None:
    async with cluster(bench) as running:
        before = [asyncio.ensure_future(running.ask(300)) for _ in range(4)]
        await bench.until_computing(4)
        mine, theirs = await bench.open_requests("worker-0", "worker-1")
        assert mine > 0
        status = await running.control("worker-0", "/cordon")
        assert {endpoint["state"] for endpoint in status["endpoints"]} == {"cordoned"}
        assert (await running.client.get(running.admin["worker-0"] + "/ready")).status_code == 503
        assert (await running.client.get(running.admin["worker-0"] + "/live")).status_code == 200
        await asyncio.sleep(5 * POLL_S)

        # What ran goes on; what is new goes elsewhere.
        new = [asyncio.ensure_future(running.ask(300)) for _ in range(4)]
        await bench.until_computing(8)
        assert await bench.open_requests("worker-0", "worker-1") == [mine, theirs + 4]
        status = await running.control("worker-0", "/drain?timeout_s=20")
        assert {endpoint["state"] for endpoint in status["endpoints"]} == {"draining"}
        assert status["details"]["engine"]["open"] == 0
        assert running.states() == {"frontend": {"ready"}, "worker-0": {"draining"}, "worker-1": {"ready"}}
        assert [response.status_code for response in await asyncio.gather(*before, *new)] == [200] * 8

        await running.control("worker-0", "/resume")
        assert (await running.client.get(running.admin["worker-0"] + "/ready")).status_code == 200
        await asyncio.sleep(5 * POLL_S)
        again = [asyncio.ensure_future(running.ask(100)) for _ in range(4)]
        await bench.until_computing(4)
        assert min(await bench.open_requests("worker-0", "worker-1")) > 0
        await asyncio.gather(*again)

        headers = {"origin": "http://example.com"}
        page = await running.client.post(running.admin["worker-0"] + "/cordon", headers=headers)
        assert page.status_code == 403


async def test_no_request_fails_when_a_worker_leaves(bench: Bench) -> None:
    async with cluster(bench) as running:
        statuses: list[int] = []

        async def load() -> None:
            while True:
                statuses.append((await running.ask()).status_code)

        loading = [asyncio.ensure_future(load()) for _ in range(8)]
        await asyncio.sleep(0.5)
        await running.control("worker-0", "/cordon")
        await asyncio.sleep(0.5)
        await running.control("worker-0", "/resume")
        await asyncio.sleep(0.5)
        running.workers["worker-0"].send(signal.SIGTERM)
        assert await running.workers["worker-0"].ended() == 0
        await asyncio.sleep(0.5)
        for task in loading:
            task.cancel()
        await asyncio.gather(*loading, return_exceptions=True)
        assert len(statuses) > 50
        assert {status: statuses.count(status) for status in statuses} == {200: len(statuses)}
