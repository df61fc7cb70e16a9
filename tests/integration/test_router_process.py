"""A router process for two frontends: it decides by KV, and books what each has for as long as it lives."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
from tests.integration.processes import MODEL, PATIENCE_S, Bench, until_ready

PROMPT = "the water is cold " * 12
SHARED = ("--router", "latency", "--set", "router.process=true")


def completion(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, **more}


async def router_of(bench: Bench) -> dict[str, int]:
    status = (await bench.look())["router"].status
    assert status is not None
    told: dict[str, int] = status.details["router"]
    return told


async def until_booked(bench: Bench, number: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await router_of(bench))["reservations"] != number:
            await asyncio.sleep(0.05)


async def cached_tokens(url: str) -> int:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        answer = (await client.post("/v1/completions", json=completion())).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_two_frontends_share_a_router_that_either_may_outlive(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        router = bench.start("router", "--router", "latency", name="router")
        for name in ("w0", "w1"):
            bench.worker(name, MODEL, speed=1)
        dying, first_url = await bench.frontend(*SHARED, name="f0")
        _, second_url = await bench.frontend(*SHARED, name="f1")
        await bench.until_seen("router", "w0", "w1", "f0", "f1")
        for url in (first_url, second_url):
            await until_ready(url)

        assert await cached_tokens(first_url) == 0
        async with asyncio.timeout(PATIENCE_S):  # until the worker's KV events have reached the router
            while not await cached_tokens(second_url):
                await asyncio.sleep(0.05)
        await until_booked(bench, 0)

        async with AsyncExitStack() as open_streams:
            for url in (first_url, first_url, second_url):
                client = await open_streams.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
                body = completion(max_tokens=3000, stream=True, ignore_eos=True)
                await open_streams.enter_async_context(
                    client.stream("POST", f"{url}/v1/completions", json=body)
                )
            await until_booked(bench, 3)
            dying.kill()
            await until_booked(bench, 1)

            router.kill()
            async with httpx.AsyncClient(base_url=second_url, timeout=PATIENCE_S) as client:
                alone = await client.post("/v1/completions", json=completion())
                assert alone.status_code == 200
                await bench.until_seen("w0", "w1", "f1")
                bench.start("router", "--router", "latency", name="router")
                await bench.until_seen("router", "w0", "w1", "f1")
                assert (await client.post("/v1/completions", json=completion())).status_code == 200
                metrics = (await client.get("/metrics")).text
        assert "kvolt_router_present 1.0" in metrics
        async with asyncio.timeout(PATIENCE_S):
            while (await router_of(bench))["decisions"] != 1:
                await asyncio.sleep(0.05)


async def test_over_http_for_other_stacks(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        router = bench.start("router", "--http-port", "0", name="router")
        url = (await router.says(r"listening on (http://[\d.:]+)"))[1]
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for worker in ("a", "b"):
                answer = await client.post("/v1/workers", json={"worker": worker, "block_size": 4})
                assert answer.status_code == 201
            # As vLLM publishes it: time, events, data-parallel rank.
            stored = {
                "type": "BlockStored",
                "block_hashes": [11, 12],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4, 5, 6, 7, 8],
                "block_size": 4,
                "lora_id": None,
            }
            batch = msgspec.msgpack.encode([1.0, [stored], 0])
            answer = await client.post("/v1/workers/b/engine_events?format=vllm", content=batch)
            assert answer.json() == {"applied": 1, "unknown_ranks": 0}
            routed = (await client.post("/v1/route", json={"token_ids": list(range(1, 10))})).json()
            assert (routed["worker"], routed["cached_tokens"]) == ("b", 8)
            metrics = (await client.get("/metrics")).text
            assert 'kvolt_router_http_reservations{model="default"} 1.0' in metrics
            gone = await client.delete(f"/v1/reservations/{routed['reservation']}")
            assert gone.status_code == 200


def test_a_policy_that_there_is_not_is_told_at_once(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        done = bench.run("router", "--router", "fastest", "--http-port", "0")
        assert done.returncode == 2
        assert 'got "fastest"' in done.stderr
