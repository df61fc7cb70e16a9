"""A real model with tiers below its device: the same text, whatever left it, came back, was lost or was spoiled."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import PATIENCE_S, Bench, Kvolt, until, until_ready

from kvolt.testing.tiny_models import tiny_checkpoint

MODEL = "tiny"
BLOCK_SIZE = 16
KV_BLOCKS = 24
"""Of the device: two prompts and a half."""
START_S = 100.0
PROMPTS = [f"{word} " * 45 for word in ("alpha", "betas", "gamma", "delta", "omega")]
"""Of some ten blocks each."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def bench(tmp_path: Path, checkpoint: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        arguments = {
            "served_name": MODEL,
            "dtype": "float32",
            "threads": 1,
            "kv_blocks": KV_BLOCKS,
            "block_size": BLOCK_SIZE,
            "measure_steps": False,  # then whatever can be brought is
        }
        inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
        (bench.folder / "kvolt.toml").write_text(
            f"[[workers]]\nmodel = {json.dumps(str(checkpoint))}\nargs = {{{inner}}}\n"
        )
        yield bench


async def answered(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
    }
    body["nvext"] = {"extra_fields": ["timing"]}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def ask(client: httpx.AsyncClient, prompt: str) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    answer = await answered(client, prompt)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens", 0)


async def texts(client: httpx.AsyncClient, prompts: list[str]) -> list[str]:
    return [(await ask(client, prompt))[0] for prompt in prompts]


def figure(metrics: str, name: str, tier: str) -> float:
    found = re.search(rf'^{name}{{tier="{tier}"}} (\S+)$', metrics, re.MULTILINE)
    return float(found[1]) if found else 0.0


class Serving:
    def __init__(self, bench: Bench, worker: Kvolt, url: str, *others: str) -> None:
        self.bench, self.worker, self.url, self.others = bench, worker, url, others

    async def metrics(self) -> str:
        views = await self.bench.until_seen("frontend", self.worker.name, *self.others)
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            return (await client.get(f"http://{views[self.worker.name].admin}/metrics")).text

    async def until_stored(self, tier: str, num_blocks: int) -> None:
        text = ""

        async def enough() -> bool:
            nonlocal text
            text = await self.metrics()
            return figure(text, "kvolt_tier_stored_blocks_total", tier) >= num_blocks

        for _ in range(200):
            if await enough():
                return
            await asyncio.sleep(0.1)
        raise AssertionError(text)


async def serving(bench: Bench, *tiers: str) -> Serving:
    worker = bench.worker("worker", *tiers)
    _, url = await bench.frontend()
    await until_ready(url, START_S)
    return Serving(bench, worker, url)


async def test_text_is_the_same_with_tiers_and_after_a_kill(bench: Bench) -> None:
    plain = await serving(bench)
    async with httpx.AsyncClient(base_url=plain.url, timeout=PATIENCE_S) as client:
        expected = await texts(client, PROMPTS)
        assert len(set(expected)) > 1
        assert (await ask(client, PROMPTS[0]))[1] == 0, "it left the device for good"
    plain.worker.kill()

    tiers = ("--kv-host", "30blocks", "--kv-disk", "500blocks", "--kv-disk-dir", str(bench.folder / "kv"))
    worker = bench.worker("tiered", *tiers)
    await bench.until_seen("frontend", "tiered", timeout_s=START_S)  # and the one that was killed is gone
    await until_ready(plain.url, START_S)
    at = Serving(bench, worker, plain.url)
    async with httpx.AsyncClient(base_url=at.url, timeout=PATIENCE_S) as client:
        assert await texts(client, PROMPTS) == expected
        await at.until_stored("disk", 40)
        assert await texts(client, PROMPTS) == expected
        text, cached = await ask(client, PROMPTS[0])
        assert text == expected[0]
        assert cached >= 5 * BLOCK_SIZE, "it came back"
        timing = (await answered(client, PROMPTS[2]))["nvext"]["timing"]
        assert timing["kv_onboard_ms"] > 0
        assert timing["kv_onboard_blocks"] > 0
        metrics = await at.metrics()
        assert figure(metrics, "kvolt_tier_loaded_blocks_total", "disk") > 0
        assert figure(metrics, "kvolt_tier_hit_rate", "disk") > 0

        worker.kill()
        again = bench.worker("again", *tiers)
        await bench.until_seen("frontend", "again", timeout_s=START_S)
        await until_ready(at.url, START_S)
        text, cached = await ask(client, PROMPTS[1])
        assert text == expected[1]
        assert cached >= 5 * BLOCK_SIZE, "the disk was found again"
        assert await texts(client, PROMPTS) == expected

        again.kill()
        for path in (bench.folder / "kv").rglob("blocks-*"):
            data = bytearray(path.read_bytes())
            for at_byte in range(0, len(data), 1000):
                data[at_byte] ^= 0x10
            path.write_bytes(data)
        done = bench.run("cache", "verify", "--dir", str(bench.folder / "kv"))
        assert done.returncode == 1, done.stdout
        assert "corrupt: " in done.stdout
        third = bench.worker("third", *tiers, "--kv-disk-direct")
        await bench.until_seen("frontend", "third", timeout_s=START_S)
        await until_ready(at.url, START_S)
        assert await texts(client, PROMPTS) == expected, "spoiled blocks are computed again"
        await until(lambda: "block corrupt, will be recomputed" in third.err, what="the log line")
        assert "direct disk reads enabled: backend=POSIX" in third.err
        await Serving(bench, third, at.url).until_stored("disk", 5 * len(PROMPTS))
        third.kill()

        bench.worker("fourth", *tiers, "--kv-disk-direct")
        await bench.until_seen("frontend", "fourth", timeout_s=START_S)
        await until_ready(at.url, START_S)
        text, cached = await ask(client, PROMPTS[-1])
        assert text == expected[-1]
        assert cached >= 5 * BLOCK_SIZE, "what was computed again came straight from the disk"


async def test_a_disk_in_eight_bits_holds_more_and_is_found_again(bench: Bench) -> None:
    folder = str(bench.folder / "kv")
    tiers = ("--kv-host", "30blocks", "--kv-disk", "500blocks", "--kv-disk-dir", folder)
    tiers = (*tiers, "--kv-disk-compression", "fp8")
    at = await serving(bench, *tiers)
    async with httpx.AsyncClient(base_url=at.url, timeout=PATIENCE_S) as client:
        await texts(client, PROMPTS)
        await at.until_stored("disk", 40)
        await texts(client, PROMPTS)
        assert (await ask(client, PROMPTS[0]))[1] >= 5 * BLOCK_SIZE, "it came back"
        metrics = await at.metrics()
        assert figure(metrics, "kvolt_tier_loaded_blocks_total", "disk") > 0
        assert "corrupt" not in metrics
        assert "kvolt_tier_dropped_blocks_total" in metrics
        host, disk = (
            figure(metrics, "kvolt_tier_bytes", tier) / figure(metrics, "kvolt_tier_blocks", tier)
            for tier in ("host", "disk")
        )
        assert disk == host * (1 + 1 / 64) / 4, "float32 in eight bits, and one more for each 64"
        done = bench.run("cache", "verify", "--dir", folder)
        assert done.returncode == 0, done.stdout
        assert "float32 as fp8" in bench.run("cache", "stat", "--dir", folder).stdout

        at.worker.kill()
        bench.worker("again", *tiers)
        await bench.until_seen("frontend", "again", timeout_s=START_S)
        await until_ready(at.url, START_S)
        assert (await ask(client, PROMPTS[1]))[1] >= 5 * BLOCK_SIZE, "the disk was found again"


async def test_one_worker_uses_what_another_has_written_to_a_store(bench: Bench) -> None:
    """Two workers write to one store at the same time; a third that has never seen a prompt finds its KV there."""
    store = str(bench.folder / "store")
    tiers = ("--kv-host", "200blocks", "--kv-object", store)
    plain = await serving(bench)
    async with httpx.AsyncClient(base_url=plain.url, timeout=PATIENCE_S) as client:
        expected = await texts(client, PROMPTS)
        plain.worker.kill()
        writers = [bench.worker(name, *tiers) for name in ("one", "two")]
        await bench.until_seen("frontend", "one", "two", timeout_s=START_S)
        await until_ready(plain.url, START_S)
        for _ in range(40):
            found = await asyncio.gather(*(ask(client, prompt) for prompt in PROMPTS for _ in range(2)))
            assert [text for text, _ in found] == [text for text in expected for _ in range(2)]
            if sum(path.is_file() for path in Path(store).rglob("*")) >= 45:
                break
        for writer in writers:
            writer.kill()
        done = bench.run("cache", "verify", "--object", store)
        assert done.returncode == 0, done.stdout
        bench.worker("third", *tiers)
        await bench.until_seen("frontend", "third", timeout_s=START_S)
        await until_ready(plain.url, START_S)
        cached = 0
        for prompt, due in zip(PROMPTS, expected, strict=True):
            text, cached = await ask(client, prompt)
            assert text == due
            if cached:
                break
            await asyncio.sleep(11.0)  # one that was slow to say what it has is left alone for a while
        assert cached >= 5 * BLOCK_SIZE, "it came from the store"
        assert await texts(client, PROMPTS) == expected


async def test_workers_that_share_a_pool(bench: Bench) -> None:
    """What one keeps the other finds; a pool that is killed costs nothing but time; one that is back is used again."""
    path = bench.folder / "pool.sock"
    plain = await serving(bench)
    async with httpx.AsyncClient(base_url=plain.url, timeout=PATIENCE_S) as client:
        expected = await texts(client, PROMPTS)
        plain.worker.kill()
        pool = bench.start("cache", "serve", "--socket", str(path), "--host", "300blocks", name="pool")
        await pool.says("serving a KV pool")
        one = bench.worker("one", "--kv-pool", str(path))
        await bench.until_seen("frontend", "kv-pool", "one", timeout_s=START_S)
        await until_ready(plain.url, START_S)
        assert await texts(client, PROMPTS) == expected
        await Serving(bench, one, plain.url, "kv-pool").until_stored("peer", 40)
        one.kill()

        two = bench.worker("two", "--kv-pool", str(path))
        await bench.until_seen("frontend", "kv-pool", "two", timeout_s=START_S)
        await until_ready(plain.url, START_S)
        text, cached = await ask(client, PROMPTS[0])
        assert text == expected[0]
        assert cached >= 5 * BLOCK_SIZE, "it came from the pool"
        pool.kill()
        assert await texts(client, PROMPTS) == expected, "without the pool it is computed"
        again = bench.start("cache", "serve", "--socket", str(path), "--host", "300blocks", name="pool-2")
        await again.says("serving a KV pool")
        before = figure(
            await Serving(bench, two, plain.url, "kv-pool").metrics(),
            "kvolt_tier_stored_blocks_total",
            "peer",
        )
        await asyncio.sleep(3.0)  # it is looked for again after a while
        for prompt in ("zeta " * 45, "kappa " * 45):
            await ask(client, prompt)
        await Serving(bench, two, plain.url, "kv-pool").until_stored("peer", int(before) + 10)


async def test_workers_take_from_each_other(bench: Bench) -> None:
    """A prompt that is sent elsewhere takes its KV along; a giver that is killed costs nothing but time."""
    plain = await serving(bench)
    async with httpx.AsyncClient(base_url=plain.url, timeout=PATIENCE_S) as client:
        expected = await texts(client, PROMPTS)
        plain.worker.kill()
        tiers = ("--kv-host", "200blocks", "--kv-peers")
        one = bench.worker("one", *tiers)
        await bench.until_seen("frontend", "one", timeout_s=START_S)
        await until_ready(plain.url, START_S)
        assert await texts(client, PROMPTS) == expected
        await Serving(bench, one, plain.url).until_stored("host", 45)
        bench.worker("two", *tiers)
        views = await bench.until_seen("frontend", "one", "two", timeout_s=START_S)
        status = views["two"].status
        assert status is not None
        [there] = [each.instance for each in status.endpoints if str(each.endpoint).endswith("generate")]

        async def ask_two(prompt: str) -> tuple[str, int]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "ignore_eos": True, "temperature": 0}
            headers = {"x-kvolt-worker-instance-id": there}
            response = await client.post("/v1/completions", json=body, headers=headers)
            assert response.status_code == 200, response.text
            answer = response.json()
            cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            return answer["choices"][0]["text"], cached

        text, cached = await ask_two(PROMPTS[0])
        assert text == expected[0]
        assert cached >= 5 * BLOCK_SIZE, "it came from the other"
        metrics = (await client.get(f"http://{views['two'].admin}/metrics")).text
        assert figure(metrics, "kvolt_tier_loaded_blocks_total", "peer") >= 5
        one.kill()
        for prompt, due in zip(PROMPTS, expected, strict=True):
            assert (await ask_two(prompt))[0] == due


async def test_prefill_and_decode_with_tiers_of_their_own(bench: Bench) -> None:
    """Prompts come back to who computes them, and to who goes on with them: less is handed over then."""
    plain = await serving(bench)
    async with httpx.AsyncClient(base_url=plain.url, timeout=PATIENCE_S) as client:
        expected = await texts(client, PROMPTS)
        plain.worker.kill()
    tiers = ("--kv-host", "200blocks", "--namespace", "apart")
    bench.worker("prefill", "--role", "prefill", *tiers)
    bench.worker("decode", "--role", "decode", *tiers)
    edge = (
        "--namespace",
        "apart",
        "--prefill-choice",
        "threshold",
        "--set",
        "frontend.prefill_min_tokens=40",
    )
    _, url = await bench.frontend(*edge, name="edge")
    views = await bench.until_seen("edge", "prefill", "decode", timeout_s=START_S, KVOLT_NAMESPACE="apart")
    await until_ready(url, START_S)

    async def loaded(name: str) -> float:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
            metrics = (await client.get(f"http://{views[name].admin}/metrics")).text
        return figure(metrics, "kvolt_tier_loaded_blocks_total", "host")

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        async with asyncio.timeout(PATIENCE_S):
            while min(await loaded("prefill"), await loaded("decode")) < 10:
                assert await texts(client, PROMPTS) == expected
