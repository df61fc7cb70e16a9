"""Discovery goes away under load: nothing ends, nothing is disturbed, and all come back by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import (
    GENERATE,
    MODEL,
    PATIENCE_S,
    Bench,
    decode_delta,
    remove,
    sim_request,
    until,
    until_ready,
)

TTL_S = 1.5
OUTAGE_S = 3.5
"""Over two ttls: whoever mixes up "not seen" with "gone" has time to do so."""

NAMES = ("frontend", "worker-0", "worker-1")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S=str(TTL_S)) as bench:
        yield bench


async def removed_again_and_again(directory: Path) -> None:
    ends_at = time.monotonic() + OUTAGE_S
    while time.monotonic() < ends_at:
        remove(directory)
        await asyncio.sleep(0.05)


async def replaced(directory: Path, make: Callable[[Path], object]) -> None:
    """Something else is in its place for a while, and afterwards nothing."""
    directory.rename(directory.with_name("before"))
    make(directory)
    await asyncio.sleep(OUTAGE_S)
    directory.unlink()


async def by_a_file(directory: Path) -> None:
    await replaced(directory, Path.touch)


async def by_a_pipe(directory: Path) -> None:
    await replaced(directory, os.mkfifo)


Loss = Callable[[Path], asyncio.Future[None]]


@pytest.mark.parametrize("lose", [removed_again_and_again, by_a_file, by_a_pipe])
async def test_discovery_is_lost_under_load(bench: Bench, lose: Loss) -> None:
    processes = [bench.worker("worker-0", speed=0.5), bench.worker("worker-1", speed=0.5)]
    frontend, url = await bench.frontend()
    processes.append(frontend)
    await until_ready(url)
    await bench.until_seen(*NAMES)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        async with load(client) as num_done, long_streams(client):
            await lose(bench.discovery)
            before = num_done()
            await until(lambda: num_done() > before + 4, what="new requests to be answered")
        assert [process.exit_code for process in processes] == [None] * 3
    views = await bench.until_seen(*NAMES)
    for view in views.values():
        assert view.status is not None
        assert {endpoint.state for endpoint in view.status.endpoints} == {"ready"}
    assert [view["name"] for view in bench.status()] == list(NAMES)
    assert "is lost, going on" in frontend.err or lose is removed_again_and_again


@asynccontextmanager
async def load(client: httpx.AsyncClient) -> AsyncIterator[Callable[[], int]]:
    """Short requests one after the other; each must be answered. Yields how many were so far."""
    num_done = 0

    async def ask() -> None:
        nonlocal num_done
        while True:
            response = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": "Hi", "max_tokens": 5}
            )
            assert response.status_code == 200, response.text
            num_done += 1

    asking = [asyncio.ensure_future(ask()) for _ in range(2)]
    try:
        yield lambda: num_done
        assert not any(task.done() for task in asking), [task.exception() for task in asking if task.done()]
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


@asynccontextmanager
async def long_streams(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Streams that last as long as the block and come out whole."""
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 330, "stream": True}

    async def read(seed: int) -> str:
        return (await client.post("/v1/completions", json={**body, "seed": seed})).text

    reading = [asyncio.ensure_future(read(seed)) for seed in range(10)]
    await asyncio.sleep(0.2)
    yield
    for text in await asyncio.gather(*reading):
        assert text.endswith("data: [DONE]\n\n")
        assert text.count("data: ") == 331


async def test_a_process_stops_while_discovery_hangs(bench: Bench) -> None:
    worker = bench.worker("worker", "--discovery-ttl-s", "60", speed=0.5)
    async with bench.runtime() as runtime:
        client = await runtime.client(GENERATE)
        await until(lambda: bool(client.candidates()), what="the worker")
        async with await client.stream(sim_request(0, 5000), decode=decode_delta) as stream:
            await anext(stream)
            worker.send(signal.SIGTERM)
            await worker.says("finishing what runs")
            # Its last act is to look at what it registered, and to open a pipe is to wait for its writer.
            for path in bench.discovery.glob("keys/*"):
                pipe = bench.folder / "pipe"
                os.mkfifo(pipe)
                pipe.rename(path)
        assert await worker.ended(10.0) == 0


@pytest.mark.xfail(
    strict=True, reason="the supervisor takes a restarted worker that finds no discovery for a config error"
)
async def test_a_worker_that_crashes_meanwhile_waits_for_discovery(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text("[[workers]]\ncount = 2\nargs = {speed = 5}\n")
    serve, _ = await bench.serve("--runtime-start-timeout-s", "1", "--supervisor-restart-backoff-s", "0.2")
    bench.discovery.rename(bench.folder / "before")
    bench.discovery.symlink_to("/nowhere/at/all")
    os.kill(bench.child_pid("worker-0"), signal.SIGKILL)
    await serve.says("worker-0 .*discovery cannot be reached")
    await asyncio.sleep(0.5)
    assert serve.exit_code is None, serve.out
    bench.discovery.unlink()
    await bench.until_seen(*NAMES)
