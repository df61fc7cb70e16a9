"""Prefill and decode as processes: a prompt here, its answer there, its KV between them; and what happens without."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, Kvolt, until_ready

BLOCK_SIZE = 16
PROMPTS = [" ".join(f"w{number * each}" for number in range(40 + 7 * each)) for each in range(1, 9)]


OTHERS = [f"again {prompt}" for prompt in PROMPTS]
FLOWS = {
    "prefill-first": ("--prefill-choice", "threshold"),
    "decode-first": ("--prefill-choice", "threshold", "--set", "frontend.decode_first=*"),
}
"""All prompts are computed by prefill workers, whatever that costs."""


@pytest.fixture(params=FLOWS)
def flow(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return FLOWS[request.param]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


async def texts(url: str, prompts: list[str] = PROMPTS, **more: Any) -> list[str]:
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def ask(prompt: str) -> str:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, **more}
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        return list(await asyncio.gather(*map(ask, prompts)))


async def aggregated(bench: Bench) -> list[str]:
    """What one worker would say, in a namespace of its own."""
    bench.worker("alone", "--namespace", "alone")
    _, url = await bench.frontend("--namespace", "alone", name="edge-alone")
    await until_ready(url)
    return await texts(url, PROMPTS + OTHERS)


async def metric(url: str, name: str) -> float:
    """The sum over all labels."""
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(
        float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#")
    )


async def until_indexed(url: str) -> None:
    """Wait until the frontend's router knows that decode workers hold all of the prompts."""
    query = {"model": MODEL, "nvext": {"annotations": ["query_instance_id:"]}}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        for prompt in PROMPTS:
            num_blocks, num_held = 1, 0
            while num_held < num_blocks:
                answer = (await client.post("/v1/completions", json={**query, "prompt": prompt})).json()
                num_blocks = answer["usage"]["prompt_tokens"] // BLOCK_SIZE
                num_held = answer["nvext"]["routed"]["overlap_blocks"]


async def start(
    bench: Bench, flow: tuple[str, ...], *workers: tuple[str, str], speed: float = 1.0
) -> tuple[dict[str, Kvolt], str]:
    """Workers by name with their role, and the frontend's URL."""
    started = {name: bench.worker(name, "--role", role, speed=speed) for name, role in workers}
    _, url = await bench.frontend(*flow)
    await bench.until_seen("frontend", *started)
    await until_ready(url)
    return started, url


async def test_prompts_are_computed_elsewhere_and_the_text_is_the_same(
    bench: Bench, flow: tuple[str, ...]
) -> None:
    expected = await aggregated(bench)
    _, url = await start(bench, flow, ("p0", "prefill"), ("d0", "decode"), ("d1", "decode"))
    assert await texts(url) == expected[: len(PROMPTS)]
    # And again, from what decode has: once the router knows it, and with no load that makes another worker cheaper.
    await until_indexed(url)
    for prompt, text in zip(PROMPTS, expected, strict=False):
        assert await texts(url, [prompt], n=1, stream=False) == [text]
    views = await bench.look()
    admin = {name: f"http://{view.admin}" for name, view in views.items()}
    given = await metric(admin["p0"], "kvolt_handoffs_sent_total")
    taken = sum([await metric(admin[name], "kvolt_handoff_blocks_total") for name in ("d0", "d1")])
    assert given == len(PROMPTS)
    assert taken > 0
    roles = {view["name"]: view["status"]["details"].get("engine", {}).get("role") for view in bench.status()}
    assert roles == {"frontend": None, "p0": "prefill", "d0": "decode", "d1": "decode"}


async def test_without_prefill_workers_decode_computes_prompts(bench: Bench, flow: tuple[str, ...]) -> None:
    expected = await aggregated(bench)
    workers, url = await start(bench, flow, ("p0", "prefill"), ("d0", "decode"))
    asking, left = PROMPTS[:4], PROMPTS[4:]
    assert await texts(url, asking) == expected[:4]
    workers["p0"].kill()
    assert await texts(url, left) == expected[4 : len(PROMPTS)]
    bench.worker("p1", "--role", "prefill")
    await bench.until_seen("frontend", "d0", "p1")
    assert await texts(url, OTHERS) == expected[len(PROMPTS) :]
    views = await bench.look()
    assert await metric(f"http://{views['p1'].admin}", "kvolt_handoffs_sent_total") == len(PROMPTS)


@pytest.mark.parametrize("victim", ["p0", "d0"])
async def test_a_worker_is_killed_in_the_middle(bench: Bench, flow: tuple[str, ...], victim: str) -> None:
    """Of two of its role; every answer is whole."""
    expected = await aggregated(bench)
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    workers, url = await start(bench, flow, *roles.items(), speed=0.2)
    asking = [asyncio.ensure_future(texts(url)) for _ in range(4)]
    await asyncio.sleep(0.5)
    workers[victim].kill()
    for answers in await asyncio.gather(*asking):
        assert answers == expected[: len(PROMPTS)]


@pytest.mark.parametrize("is_killed", [False, True], ids=["all-live", "decode-worker-killed"])
async def test_kv_moves_over_tls_to_its_reader_only(
    bench: Bench, flow: tuple[str, ...], is_killed: bool
) -> None:
    """Every decode worker that gets a request may read its KV, also the next one after a loss."""
    expected = await aggregated(bench)
    assert bench.run("cluster", "init", "kvolt.key").returncode == 0
    secured = ("--cluster-key", "kvolt.key", "--set", "transfer.shared_memory=false")
    roles = {"p0": "prefill", "d0": "decode", "d1": "decode"}
    speed = 0.2 if is_killed else 1.0
    workers = {
        name: bench.worker(name, "--role", role, *secured, speed=speed) for name, role in roles.items()
    }
    _, url = await bench.frontend(*flow, "--cluster-key", "kvolt.key")
    key = {"KVOLT_CLUSTER_KEY": str(bench.folder / "kvolt.key")}
    views = await bench.until_seen("frontend", *roles, **key)
    await until_ready(url)
    asking = [asyncio.ensure_future(texts(url)) for _ in range(2)]
    if is_killed:
        await asyncio.sleep(0.5)
        workers.pop("d0").kill()
    for answers in await asyncio.gather(*asking):
        assert answers == expected[: len(PROMPTS)]
    admin = {name: f"http://{views[name].admin}" for name in workers}
    moved = [
        await metric(admin[name], 'kvolt_handoff_blocks_total{path="tcp"}')
        for name in workers.keys() - {"p0"}
    ]
    assert sum(moved) > 0
    assert await metric(admin["p0"], "kvolt_transfer_tls_handshakes_total") > 0
    assert await metric(admin["p0"], "kvolt_transfer_refused_reads_total") == 0


async def test_whichever_way_each_of_them_goes(bench: Bench) -> None:
    """By cost: prompts are computed apart or where they are answered, and answered by whoever has least to do."""
    expected = await aggregated(bench)
    _, url = await start(bench, (), ("p0", "prefill"), ("d0", "decode"))
    answers = await asyncio.gather(*(texts(url, PROMPTS + OTHERS) for _ in range(4)))
    assert answers == [expected] * 4
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        told = (await client.get(f"{url}/metrics")).text
    counts = [
        float(line.rsplit(" ", 1)[1])
        for line in told.splitlines()
        if line.startswith("kvolt_journey_prefill_modes_total{")
    ]
    assert len([count for count in counts if count]) > 1, counts
