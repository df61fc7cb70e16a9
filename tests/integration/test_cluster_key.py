"""A cluster with a key: its own processes work together, and strangers get nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import (
    GENERATE,
    MODEL,
    PATIENCE_S,
    Bench,
    free_port,
    sim_request,
    until,
    until_ready,
)
from tests.integration.test_prefill_decode import metric

from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import AccessDenied, KvoltError
from kvolt.runtime.network import split_address
from kvolt.runtime.security.identity import ProcessRole

ASK = {"model": MODEL, "prompt": "Hi", "max_tokens": 5}


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        for name in ("kvolt.key", "other.key"):
            created = bench.run("cluster", "init", name)
            assert created.returncode == 0, created.stderr
        yield bench


def joined(bench: Bench, join: str, key: str | None = "kvolt.key") -> dict[str, str]:
    """Settings of a process of the test itself."""
    named = {} if key is None else {"KVOLT_CLUSTER_KEY": str(bench.folder / key)}
    return {"KVOLT_DISCOVERY_JOIN": join, "KVOLT_DISCOVERY_KIND": "join", **named}


async def start(bench: Bench) -> tuple[str, str]:
    """A frontend with a join server and a worker that joins it: the URL and the join address."""
    join = f"127.0.0.1:{free_port()}"
    hosting = ("--set", "discovery.kind=file", "--discovery-join-listen", join)
    _, url = await bench.frontend(*hosting, "--cluster-key", "kvolt.key")
    bench.worker("worker", "--join", join, "--cluster-key", "kvolt.key")
    await until_ready(url)
    return url, join


async def until_counted(url: str, name: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await metric(url, name):
            await asyncio.sleep(0.1)


async def test_members_work_together_and_strangers_get_nothing(bench: Bench) -> None:
    url, join = await start(bench)
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", json=ASK, timeout=PATIENCE_S)).status_code == 200
    views = await bench.until_seen("frontend", "worker", **joined(bench, join))
    worker = views["worker"].address
    async with httpx.AsyncClient(base_url=url) as client:
        blocks = {**ASK, "prompt": "again " * 100}
        assert (await client.post("/v1/completions", json=blocks, timeout=PATIENCE_S)).status_code == 200
    for topic in ("kv", "load"):  # the router knows what the worker holds and does
        await until_counted(url, f'kvolt_events_received_total{{topic="{topic}"}}')
    assert await metric(url, "kvolt_router_forged_events_total") == 0

    # Without the key or with that of another cluster there is no answer, and the command names the remedy.
    for flags in ((), ("--cluster-key", "other.key")):
        refused = bench.run("status", "--join", join, *flags)
        assert refused.returncode == 1
        assert "worker" not in refused.stdout
    assert "--cluster-key" in refused.stderr

    # Garbage and silence at the ports cost nothing: the cluster goes on.
    sockets = [socket.create_connection(split_address(address)) for address in (join, worker) * 20]
    for number, each in enumerate(sockets):
        with contextlib.suppress(OSError):
            each.sendall(bytes(range(256)) * 64 if number % 2 else b"GET / HTTP/1.1\r\n\r\n")
    async with httpx.AsyncClient(base_url=url) as client:
        assert (await client.post("/v1/completions", json=ASK, timeout=PATIENCE_S)).status_code == 200
    for each in sockets:
        each.close()


async def test_a_worker_can_neither_control_nor_replace_others(bench: Bench) -> None:
    url, join = await start(bench)
    settings = joined(bench, join)
    async with bench.runtime(ProcessRole.WORKER, **settings) as intruder:
        client = await intruder.client(GENERATE)
        await until(lambda: len(client.candidates()) == 1, what="the worker")
        [instance] = client.candidates()
        with pytest.raises(AccessDenied, match="may not call"):
            async with await client.stream(sim_request(1, 5), instance) as stream:
                await anext(aiter(stream))
        for component, name in (("router", "route"), ("frontend", "http")):

            async def serve(request: object):  # type: ignore[no-untyped-def]
                yield request

            with pytest.raises(KvoltError, match="may not register"):
                await intruder.serve(EndpointAddress("default", component, name), serve)
    async with httpx.AsyncClient(base_url=url) as client_of_all:
        assert (await client_of_all.post("/v1/completions", json=ASK, timeout=PATIENCE_S)).status_code == 200


async def test_a_key_is_rotated_while_the_cluster_runs(bench: Bench) -> None:
    url, join = await start(bench)
    old = (bench.folder / "kvolt.key").read_bytes()
    rotated = bench.run("cluster", "rotate", "kvolt.key")
    assert rotated.returncode == 0, rotated.stderr
    (bench.folder / "old.key").touch(0o600)
    (bench.folder / "old.key").write_bytes(old)
    # A machine that has the new file and one that has the old one join.
    bench.worker("new", "--join", join, "--cluster-key", "kvolt.key")
    bench.worker("old", "--join", join, "--cluster-key", "old.key")
    await bench.until_seen("frontend", "worker", "new", "old", **joined(bench, join))
    async with httpx.AsyncClient(base_url=url) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ASK, timeout=PATIENCE_S) for _ in range(30))
        )
        assert [each.status_code for each in answers] == [200] * 30


async def test_a_machine_without_the_key_joins_with_a_certificate(bench: Bench) -> None:
    url, join = await start(bench)
    issued = bench.run("cluster", "issue", "--role", "worker", "--name", "gpu-7", "kvolt.key")
    assert issued.returncode == 0, issued.stderr
    (bench.folder / "gpu-7.toml").write_text("[cluster]\n" + issued.stdout.split("[cluster]\n")[1])
    bench.worker("certified", "--join", join, "--config", "gpu-7.toml")
    await bench.until_seen("frontend", "worker", "certified", **joined(bench, join))
    async with httpx.AsyncClient(base_url=url) as client:
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ASK, timeout=PATIENCE_S) for _ in range(20))
        )
        assert [each.status_code for each in answers] == [200] * 20
    posing = bench.run("frontend", "--port", "0", "--join", join, "--config", "gpu-7.toml")
    assert posing.returncode == 1
    assert "a worker may not register" in posing.stderr


def test_a_listener_for_other_machines_needs_a_key(bench: Bench) -> None:
    for flags in (
        ("--discovery-join-listen", f"0.0.0.0:{free_port()}", "--set", "runtime.advertise=127.0.0.1"),
        ("--set", "runtime.host=0.0.0.0", "--set", "runtime.advertise=127.0.0.1"),
        ("--set", "admin.host=0.0.0.0"),
        ("--set", "events.host=0.0.0.0", "--set", "runtime.advertise=127.0.0.1"),
    ):
        refused = bench.run("frontend", "--port", "0", *flags)
        assert refused.returncode == 2
        assert "--cluster-key" in refused.stderr
        assert "--insecure-network" in refused.stderr
    refused = bench.run("router", "--http-port", "0", "--http-host", "0.0.0.0")
    assert (refused.returncode, "--cluster-key" in refused.stderr) == (2, True)


def test_a_key_file_that_is_missing_or_open_is_named(bench: Bench) -> None:
    missing = bench.run("worker", "--cluster-key", "none.key")
    assert (missing.returncode, "none.key: no such file" in missing.stderr) == (2, True)
    (bench.folder / "kvolt.key").chmod(0o644)
    opened = bench.run("worker", "--cluster-key", "kvolt.key")
    assert (opened.returncode, "chmod 600" in opened.stderr) == (2, True)
    again = bench.run("cluster", "init", "kvolt.key")
    assert (again.returncode, "exists" in again.stderr) == (2, True)
