"""API keys with real processes: several frontends on one port hold the limits of a tenant together."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench

WORKERS = '[[workers]]\nengine = "sim"\nmodel = "sim-tiny"\nargs = {speed = 50}\n'
RATE = 20


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        (bench.folder / "kvolt.toml").write_text(WORKERS)
        bench.add_commands()
        yield bench


def kvolt(bench: Bench, *arguments: str) -> str:
    done = subprocess.run(
        ["kvolt", *arguments], cwd=bench.folder, env=bench.env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def new_key(bench: Bench, *arguments: str) -> dict[str, str]:
    secret = kvolt(bench, "key", "create", *arguments).split()[-1]
    return {"authorization": f"Bearer {secret}"}


async def complete(url: str, headers: dict[str, str], **fields: object) -> httpx.Response:
    """On a connection of its own, so that the kernel chooses the process."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": 2, **fields}
        return await client.post("/v1/completions", json=body, headers=headers)


async def test_processes_hold_the_limits_together_and_follow_the_file(bench: Bench) -> None:
    limited = new_key(bench, "--tenant", "acme", "--requests-per-second", str(RATE))
    admin = new_key(bench, "--tenant", "ops", "--admin")
    _, url = await bench.serve("--processes", "3", "--api-keys", "api-keys.jsonl")
    assert (await complete(url, {})).status_code == 401
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/v1/models", headers=limited)).json()["data"][0]["id"] == MODEL

    start = time.monotonic()
    statuses: Counter[int] = Counter()
    for _ in range(10):
        answers = await asyncio.gather(*(complete(url, limited) for _ in range(20)))
        statuses.update(answer.status_code for answer in answers)
        for answer in answers:
            assert answer.headers["x-ratelimit-limit-requests"] == str(RATE)
            assert (answer.status_code == 429) == ("retry-after" in answer.headers)
    elapsed_s = time.monotonic() - start
    assert set(statuses) <= {200, 429}
    assert RATE / 2 <= statuses[200] <= RATE + RATE * elapsed_s + 3

    usage = msgspec.json.decode(kvolt(bench, "usage", "--json"))
    assert usage["acme"]["requests"] == statuses[200]
    assert usage["acme"]["refused"].get("requests", 0) == statuses[429]
    assert usage["acme"]["output_tokens"] == 2 * statuses[200]

    for line in kvolt(bench, "key", "list").splitlines():
        if " acme " in line and "inference" in line:
            kvolt(bench, "key", "revoke", line.split()[0])

    async def is_revoked_everywhere() -> bool:
        answers = await asyncio.gather(*(complete(url, limited) for _ in range(12)))
        return all(answer.status_code == 401 for answer in answers)

    async with asyncio.timeout(PATIENCE_S):
        while not await is_revoked_everywhere():
            await asyncio.sleep(0.2)
    assert (await complete(url, admin)).status_code == 200


async def test_frontend_without_keys_on_another_address_warns_once(bench: Bench) -> None:
    serve, _ = await bench.serve("--processes", "2", "--host", "0.0.0.0")
    assert serve.err.count("HTTP API open to everyone") + serve.out.count("HTTP API open to everyone") == 1


async def test_missing_file_ends_the_start_with_the_remedy(bench: Bench) -> None:
    frontend = bench.start("frontend", "--port", "0", "--api-keys", "none.jsonl", name="frontend")
    assert await frontend.ended() == 2
    assert "kvolt key create" in frontend.err
