"""Two hosts' pools, each with workers of its own: routers know from the pools themselves who can have a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, Kvolt, until_ready

from kvolt.core.kv_events import Tier
from kvolt.kv.shared_pool.link import PoolLink
from kvolt.kv.shared_pool.wire import PoolStatus, Status
from kvolt.runtime.clock import SystemClock

BLOCK_SIZE = 16
PROMPTS = {
    "a": [f"{word} " * 60 for word in ("alpha", "betas", "gamma", "delta")],
    "b": [f"{word} " * 60 for word in ("omega", "kappa", "sigma", "theta")],
}
"""By the pool behind which they are computed first."""
HOST_WEIGHT, DISK_WEIGHT = 0.9, 0.7
"""As settings have them: what counts of a block that is there."""
SLOW_PREFILL = '{"base_s": 0.005, "prefill_token_s": 0.002}'
"""So that what there is of a prompt is fetched and not computed."""


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


async def eventually(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    for _ in range(int(PATIENCE_S / 0.1)):
        if await condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


class Hosts:
    """A pool of each of two hosts, as if there were two."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.ids: dict[str, str] = {}

    def socket(self, host: str) -> Path:
        return self.bench.folder / f"{host}.sock"

    async def pool(self, host: str) -> Kvolt:
        disk = ("--disk", "400blocks", "--disk-dir", str(self.bench.folder / f"kv-{host}"))
        where = ("--socket", str(self.socket(host)), "--name", f"pool-{host}")
        pool = self.bench.start("cache", "serve", *where, "--host", "400blocks", *disk, name=f"pool-{host}")
        await pool.says("serving a KV pool")
        return pool

    def worker(self, name: str, host: str) -> Kvolt:
        latency = ("--arg", f"latency={SLOW_PREFILL}")
        return self.bench.worker(name, "--kv-pool", str(self.socket(host)), *latency)

    async def until_seen(self, *names: str) -> None:
        """And no others."""
        views = await self.bench.until_seen(*names)
        for name, view in views.items():
            assert view.status is not None
            for each in view.status.endpoints:
                if each.endpoint.endswith("generate"):
                    self.ids[name] = each.instance

    def name_of(self, instance: str) -> str:
        return next(name for name, each in self.ids.items() if each == instance)

    async def num_in(self, host: str, tier: Tier) -> int:
        link = PoolLink(self.socket(host), None, SystemClock().monotonic)
        try:
            status = await link.request(Status(), PoolStatus, PATIENCE_S)
        finally:
            await link.close()
        return next((each.num_blocks for each in status.tiers if each.tier == tier), 0)


async def ask(client: httpx.AsyncClient, prompt: str, **headers: str) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
    response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def routed(client: httpx.AsyncClient, hosts: Hosts, prompt: str) -> tuple[str, int]:
    """Where it would go now, and how many of its blocks need not be computed there."""
    told = (await ask(client, prompt, **{"x-kvolt-query-only": "1"}))["nvext"]
    return hosts.name_of(told["worker_id"]["decode_worker_id"]), told["routed"]["overlap_blocks"]


async def test_a_prompt_goes_to_another_worker_of_the_pool_that_has_it(bench: Bench) -> None:
    hosts = Hosts(bench)
    pools = {host: await hosts.pool(host) for host in ("a", "b")}
    first = {host: hosts.worker(f"first-{host}", host) for host in ("a", "b")}
    for host in ("a", "b"):
        hosts.worker(f"second-{host}", host)
    _, url = await bench.frontend()
    await until_ready(url)
    workers = [f"{each}-{host}" for each in ("first", "second") for host in ("a", "b")]
    await hosts.until_seen("frontend", "pool-a", "pool-b", *workers)

    texts: dict[str, str] = {}
    num_blocks: dict[str, int] = {}
    """Whole ones of each prompt, less the last token."""
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for host, prompts in PROMPTS.items():
            for prompt in prompts:
                pin = {"x-kvolt-worker-instance-id": hosts.ids[f"first-{host}"]}
                answer = await ask(client, prompt, **pin)
                texts[prompt] = answer["choices"][0]["text"]
                num_blocks[prompt] = (answer["usage"]["prompt_tokens"] - 1) // BLOCK_SIZE
    assert min(num_blocks.values()) >= 4
    for host, prompts in PROMPTS.items():

        async def is_kept(host: str = host, number: int = sum(map(num_blocks.__getitem__, prompts))) -> bool:
            return min([await hosts.num_in(host, tier) for tier in (Tier.HOST, Tier.DISK)]) >= number

        await eventually(is_kept, f"the blocks of {host} in its pool")
        first[host].kill()
    # Nobody is left who computed any of it, and the router that is asked has never sent any of it to anybody.
    _, url = await bench.frontend(name="late")
    await until_ready(url)
    await hosts.until_seen("frontend", "late", "pool-a", "pool-b", "second-a", "second-b")

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def are_known() -> bool:
            for host, prompts in PROMPTS.items():
                for prompt in prompts:
                    due = int(num_blocks[prompt] * HOST_WEIGHT)
                    if await routed(client, hosts, prompt) != (f"second-{host}", due):
                        return False
            return True

        await eventually(are_known, "each prompt to go where its pool is")
        for host in PROMPTS:
            prompt = PROMPTS[host][0]
            answer = await ask(client, prompt)
            assert answer["choices"][0]["text"] == texts[prompt]
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached == num_blocks[prompt] * BLOCK_SIZE, "it came from the pool"

        rest = PROMPTS["a"][1:]  # which no worker has
        pools["a"].kill()

        async def is_forgotten() -> bool:
            return all([(await routed(client, hosts, prompt))[1] == 0 for prompt in rest])

        await eventually(is_forgotten, "a dead pool's blocks to be forgotten")
        await hosts.pool("a")

        async def is_found_again() -> bool:
            """Nothing was asked of its worker meanwhile."""
            found = [await routed(client, hosts, prompt) for prompt in rest]
            return found == [("second-a", int(num_blocks[prompt] * DISK_WEIGHT)) for prompt in rest]

        await eventually(is_found_again, "what the disk has kept")
        assert (await routed(client, hosts, PROMPTS["b"][1]))[0] == "second-b"
