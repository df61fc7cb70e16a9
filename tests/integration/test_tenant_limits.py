"""Limits of tenants over eight frontend processes, with the limiter killed in the middle."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, Kvolt
from tests.integration.test_api_keys import new_key

from kvolt.frontend.tenants.lease_pool import LEASE_S

NUM_FRONTENDS = 8
REQUESTS_PER_S = 20
INPUT_TOKENS_PER_MINUTE = 1200
PROMPT_TOKENS = 10
SLOTS = 1
LIMITS = {
    "requests": ("--requests-per-second", str(REQUESTS_PER_S)),
    "tokens": ("--input-tokens-per-minute", str(INPUT_TOKENS_PER_MINUTE)),
    "slots": ("--concurrency", str(SLOTS)),
}
CLIENTS_PER_TENANT = 8


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        bench.add_commands()
        yield bench


class Load:
    """Clients of each tenant, which send one request after the other to all frontends in turn."""

    def __init__(self, urls: list[str], keys: dict[str, dict[str, str]], num_requests: int) -> None:
        self._clients = [httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) for url in urls]
        self._keys = keys
        self._left = dict.fromkeys(keys, num_requests // len(keys))
        self.num_sent = 0
        self.admitted: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.answered_at: dict[str, float] = {}
        """Time of each tenant's last answer."""
        self.lost = 0
        """Requests whose frontend was killed: they may have been admitted, and count as such."""
        self.half_sent = asyncio.Event()
        self._half = num_requests // 2

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for tenant, number in itertools.product(self._keys, range(CLIENTS_PER_TENANT)):
                group.create_task(self._client(tenant, number))
        await asyncio.gather(*(client.aclose() for client in self._clients))

    def drop(self, number: int) -> None:
        """Send nothing more to a frontend."""
        del self._clients[number]

    async def _client(self, tenant: str, number: int) -> None:
        body = {"model": MODEL, "prompt": [5] * PROMPT_TOKENS, "max_tokens": 1}
        while self._left[tenant] > 0:
            self._left[tenant] -= 1
            self.num_sent += 1
            if self.num_sent >= self._half:
                self.half_sent.set()
            client = self._clients[self.num_sent % len(self._clients)]
            try:
                answer = await client.post("/v1/completions", json=body, headers=self._keys[tenant])
            except httpx.TransportError:
                self.lost += 1
                self.admitted[tenant] += 1
                continue
            self.statuses[answer.status_code] += 1
            self.answered_at[tenant] = time.monotonic()
            self.admitted[tenant] += answer.status_code == 200


async def frontends(bench: Bench) -> tuple[list[Kvolt], list[str]]:
    """The first is the oldest, and so the limiter."""

    def start(number: int) -> Coroutine[None, None, tuple[Kvolt, str]]:
        return bench.frontend("--api-keys", "api-keys.jsonl", name=f"frontend-{number}")

    started = [await start(0), *await asyncio.gather(*map(start, range(1, NUM_FRONTENDS)))]
    return [process for process, _ in started], [url for _, url in started]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_requests", [1500, pytest.param(10_000, marks=pytest.mark.long)])
async def test_eight_processes_hold_the_limits_and_a_lost_limiter_costs_one_lease_each(
    bench: Bench, num_requests: int
) -> None:
    keys = {tenant: new_key(bench, "--tenant", tenant, *limit) for tenant, limit in LIMITS.items()}
    bench.worker("worker", speed=50)
    processes, urls = await frontends(bench)
    load = Load(urls, keys, num_requests)
    begin = time.monotonic()
    running = asyncio.ensure_future(load.run())
    await load.half_sent.wait()
    processes[0].send(signal.SIGKILL)
    load.drop(0)
    await running
    elapsed_s = time.monotonic() - begin
    figures = {**load.admitted, "statuses": dict(load.statuses), "lost": load.lost, "seconds": elapsed_s}
    assert set(load.statuses) == {200, 429}

    request_rate, token_rate = REQUESTS_PER_S, INPUT_TOKENS_PER_MINUTE / 60
    most_requests = request_rate * (1 + elapsed_s + NUM_FRONTENDS * LEASE_S) + NUM_FRONTENDS
    most_tokens = INPUT_TOKENS_PER_MINUTE + token_rate * (elapsed_s + NUM_FRONTENDS * LEASE_S)
    most_tokens += NUM_FRONTENDS * PROMPT_TOKENS
    assert load.admitted["requests"] <= most_requests, figures
    assert load.admitted["tokens"] * PROMPT_TOKENS <= most_tokens, figures
    num_of_tenant = num_requests // len(LIMITS)
    may_have = request_rate * (load.answered_at["requests"] - begin)
    assert load.admitted["requests"] >= min(may_have, num_of_tenant) / 4, figures
    assert 0 < load.admitted["slots"] < num_of_tenant, figures
