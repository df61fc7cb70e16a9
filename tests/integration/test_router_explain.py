"""`kvolt router explain` against real processes: where a prompt would go, and that it then goes there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
from tests.integration.processes import MODEL, PATIENCE_S, Bench, until, until_ready

PROMPT = "the quick brown fox jumps over the lazy dog " * 12


async def ask(url: str, prompt: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        assert (await client.post("/v1/completions", json=body)).status_code == 200


def explained(bench: Bench, *argv: str) -> dict[str, Any]:
    told = bench.run("router", "explain", *argv, "--json")
    assert told.returncode == 0, told.stderr
    return dict(json.loads(told.stdout))


async def metric(url: str, name: str) -> float:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        lines = (await client.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


async def test_a_frontend_explains_what_it_then_does(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        for name in ("w0", "w1"):
            bench.worker(name, speed=1)
        _, url = await bench.frontend("--router", "latency")
        await until_ready(url)
        await until(lambda: len(explained(bench, "x")["candidates"]) == 2, what="both workers")
        await ask(url, PROMPT)
        told = explained(bench, PROMPT + "and more")
        first, second = told["candidates"]
        assert first["terms"]["is_chosen"]
        assert first["terms"]["overlap_blocks"] > second["terms"]["overlap_blocks"] == 0
        assert told["policy"] == "latency"
        text = bench.run("router", "explain", PROMPT)
        assert f"{first['process']} has the lowest cost" in text.stdout
        await ask(url, PROMPT + "and more")
        assert await metric(url, "kvolt_router_requests_total{") == 2
        assert await metric(url, "kvolt_router_reported_hit_rate_sum{") > 0.5
        nobody = bench.run("router", "explain", "x", "--model", "nope")
        assert nobody.returncode != 0
        assert "nope" in nobody.stderr


async def test_a_router_process_explains_for_its_frontends(tmp_path: Path) -> None:
    with Bench(tmp_path) as bench:
        (tmp_path / "kvolt.toml").write_text(
            f'[[workers]]\nmodel = "{MODEL}"\ncount = 2\nargs = {{speed = 1}}\n'
        )
        _, url = await bench.serve("--processes", "2", "--router", "latency")
        told: dict[str, Any] = {}
        for _ in range(10):  # a router that is slow to answer is done without
            await ask(url, PROMPT)
            told = explained(bench, PROMPT)
            if told["decided_by"] == "router":
                break
        assert told["decided_by"] == "router"
        assert told["candidates"][0]["terms"]["overlap_blocks"] > 0
        assert told["candidates"][0]["index_source"] == "events, exact"
