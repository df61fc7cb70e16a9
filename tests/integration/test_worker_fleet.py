"""`kvolt worker --workers N`: dozens of workers in one process, to a frontend as many as they are."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx
from tests.integration.processes import MODEL, PATIENCE_S, Bench, until

COUNT = 24


async def test_a_frontend_uses_all_workers_of_a_process_and_a_signal_drains_them(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        workers = bench.start(
            "worker", MODEL, "--workers", str(COUNT), "--name", "fleet", "--arg", "speed=2", name="fleet"
        )
        _, url = await bench.frontend("--router", "round-robin")
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

            async def ready() -> bool:
                health = (await client.get("/health")).json()
                return bool(health["workers"].get(MODEL) == COUNT)

            async with asyncio.timeout(PATIENCE_S):
                while not await ready():
                    await asyncio.sleep(0.05)

            async def ask(tokens: int) -> tuple[str, int]:
                body = {
                    "model": MODEL,
                    "prompt": "Hello",
                    "max_tokens": tokens,
                    "ignore_eos": True,
                    "nvext": {"extra_fields": ["worker_id"]},
                }
                answer = (await client.post("/v1/completions", json=body)).json()
                return answer["nvext"]["worker_id"]["decode_worker_id"], answer["usage"]["completion_tokens"]

            told = await asyncio.gather(*(ask(2) for _ in range(2 * COUNT)))
            assert len({worker for worker, _ in told}) == COUNT, "round-robin reaches each of them"
            names = {view["name"] for view in bench.status()}
            assert names >= {f"fleet-{number}" for number in range(COUNT)}

            running = [asyncio.ensure_future(ask(600)) for _ in range(COUNT)]
            await bench.until_computing(COUNT)
            workers.send(signal.SIGTERM)
            assert {tokens for _, tokens in await asyncio.gather(*running)} == {600}
            assert await workers.ended() == 0
            await until(
                lambda: not any(view["name"].startswith("fleet") for view in bench.status()),
                what="their leaving",
            )
