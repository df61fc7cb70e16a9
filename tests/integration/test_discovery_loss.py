"""Discovery goes away under load: nothing ends, nothing is disturbed, and all come back by themselves."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
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
    sim_text,
    until,
    until_ready,
)

TTL_S = 1.5
OUTAGE_S = 3.5
"""Over two ttls: whoever mixes up "not seen" with "gone" has time to do so."""

MNT_DETACH = 2

NAMES = ("frontend", "worker-0", "worker-1")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path, KVOLT_DISCOVERY_TTL_S=str(TTL_S)) as bench:
        yield bench


async def removed_again_and_again(directory: Path) -> None:
    """Each time its users have just put everything back: they renew three times per ttl."""
    for _ in range(4):
        remove(directory)
        await asyncio.sleep(OUTAGE_S / 4)


async def replaced_by_a_file(directory: Path) -> None:
    directory.rename(directory.with_name("before"))
    directory.touch()
    await asyncio.sleep(OUTAGE_S)
    directory.unlink()


async def hung(directory: Path) -> None:
    with hung_file_system(directory):
        await asyncio.sleep(OUTAGE_S)


@contextmanager
def hung_file_system(folder: Path) -> Iterator[None]:
    """Over the folder lies a file system whose server never answers: whoever touches it waits."""
    libc = ctypes.CDLL(None)
    try:
        server = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("this system has no FUSE")
    options = f"fd={server},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    try:
        if libc.mount(b"hung", os.fsencode(folder), b"fuse", 0, options.encode()) != 0:
            pytest.skip("mounting needs more rights")
        try:
            yield
        finally:
            assert libc.umount2(os.fsencode(folder), MNT_DETACH) == 0
    finally:
        os.close(server)


Loss = Callable[[Path], Awaitable[None]]


@pytest.mark.parametrize("lose", [removed_again_and_again, replaced_by_a_file, hung])
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
    assert "discovery lost" in frontend.err or lose is removed_again_and_again


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
    """Streams that last as long as the block, without a gap."""
    texts = [""] * 10

    async def read(seed: int) -> None:
        body = {
            "model": MODEL,
            "prompt": "Hi",
            "max_tokens": 3000,
            "ignore_eos": True,
            "stream": True,
            "seed": seed,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            async for line in response.aiter_lines():
                if line:
                    texts[seed] += json.loads(line.removeprefix("data: "))["choices"][0]["text"]

    async def all_go_on() -> None:
        before = [len(text) for text in texts]
        grown = lambda: all(len(text) > length for text, length in zip(texts, before, strict=True))  # noqa: E731
        await until(lambda: grown() or any(task.done() for task in reading), what="more of each stream")
        assert not any(task.done() for task in reading), [task for task in reading if task.done()]

    reading = [asyncio.ensure_future(read(seed)) for seed in range(len(texts))]
    try:
        await all_go_on()
        yield
        await all_go_on()
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    for seed, text in enumerate(texts):
        assert sim_text("Hi", seed, 3000).startswith(text)


async def test_a_process_stops_while_discovery_hangs(bench: Bench) -> None:
    worker = bench.worker("worker", "--set", "discovery.ttl_s=60", "--log-level", "debug", speed=0.5)
    async with bench.runtime() as runtime:
        client = await runtime.client(GENERATE)
        await until(lambda: bool(client.candidates()), what="the worker")
        async with await client.stream(sim_request(0, 5000), decode=decode_delta) as stream:
            await anext(stream)
            worker.send(signal.SIGTERM)
            await worker.says("draining: timeout")
            # Its last act is to look at what it registered, and to open a pipe is to wait for its writer.
            for path in bench.discovery.glob("keys/*"):
                pipe = bench.folder / "pipe"
                os.mkfifo(pipe)
                pipe.rename(path)
        assert await worker.ended() == 0


async def test_a_worker_that_crashes_meanwhile_waits_for_discovery(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text(
        '[[workers]]\nengine = "sim"\nmodel = "sim-tiny"\ncount = 2\nargs = {speed = 5}\n'
    )
    serve, _ = await bench.serve(
        "--set", "runtime.start_timeout_s=2", "--set", "supervisor.restart_backoff_s=0.2"
    )
    await bench.until_seen(*NAMES)
    bench.discovery.rename(bench.folder / "before")
    bench.discovery.symlink_to("/nowhere/at/all")
    os.kill(bench.child_pid("worker-0"), signal.SIGKILL)
    await serve.says("worker-0 exited with code 2")
    assert "since a restart cannot help" not in serve.out, serve.out
    bench.discovery.unlink()
    await bench.until_seen(*NAMES)
