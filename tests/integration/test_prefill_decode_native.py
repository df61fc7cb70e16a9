"""Prefill and decode of a real model as processes: greedy text in fp32, word for word as from one worker."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import Bench, until_ready

from kvolt.testing.tiny_models import tiny_checkpoint

MODEL = "tiny"
BLOCK_SIZE = 16
NUM_PROMPTS = 200
DECODE_FIRST = ("--set", "frontend.decode_first=*")
START_S = 120.0
ANSWER_S = 120.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@contextmanager
def native_bench(folder: Path, checkpoint: Path) -> Iterator[Bench]:
    arguments = {
        "served_name": MODEL,
        "dtype": "float32",
        "threads": 1,
        "kv_blocks": 512,
        "block_size": BLOCK_SIZE,
        "max_batch_tokens": 64,  # prompts are computed in chunks
        "max_num_seqs": 16,
    }
    inner = ", ".join(f"{key} = {json.dumps(value)}" for key, value in arguments.items())
    with Bench(folder) as bench:
        (bench.folder / "kvolt.toml").write_text(
            f"[[workers]]\nmodel = {json.dumps(str(checkpoint))}\nargs = {{ {inner} }}\n"
        )
        yield bench


@pytest.fixture
def bench(tmp_path: Path, checkpoint: Path) -> Iterator[Bench]:
    with native_bench(tmp_path, checkpoint) as bench:
        yield bench


@pytest.fixture(scope="module")
def expected(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one worker says that does it all."""
    with native_bench(tmp_path_factory.mktemp("whole"), checkpoint) as bench:

        async def ask() -> list[str]:
            return await texts(await served(bench, "whole", "aggregated"))

        return asyncio.run(ask())


def prompts() -> list[list[int]]:
    """Tokens: of all lengths around blocks and chunks, some of them with a beginning that others have."""
    draw = random.Random(7)
    beginnings = [[draw.randrange(3, 200) for _ in range(3 * BLOCK_SIZE)] for _ in range(4)]
    made = []
    for number in range(NUM_PROMPTS):
        begin = draw.choice(beginnings)[: draw.choice((0, 0, BLOCK_SIZE, 3 * BLOCK_SIZE))]
        made.append([*begin, *(draw.randrange(3, 200) for _ in range(1 + number % 70))])
    return made


async def texts(url: str) -> list[str]:
    gate = asyncio.Semaphore(16)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:

        async def ask(prompt: list[int]) -> str:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 12, "temperature": 0}
            async with gate:
                response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        return list(await asyncio.gather(*map(ask, prompts())))


async def served(
    bench: Bench,
    namespace: str,
    *roles: str,
    ranks: Sequence[int] = (),
    flow: Sequence[str] = (),
    # Whatever it costs: what a small model takes to compute is less than what it takes to move.
    choice: str = "threshold",
) -> str:
    """`ranks`: of each role's tensor parallelism; 1 where it is not told."""
    for number, (role, degree) in enumerate(zip_longest(roles, ranks, fillvalue=1)):
        name = f"{namespace}-{role}-{number}"
        bench.worker(name, "--role", str(role), "--namespace", namespace, tensor_parallel=int(degree))
    edge = ("--namespace", namespace, "--prefill-choice", choice)
    _, url = await bench.frontend(*edge, *flow, name=f"{namespace}-edge")
    names = [f"{namespace}-{role}-{number}" for number, role in enumerate(roles)]
    await bench.until_seen(f"{namespace}-edge", *names, timeout_s=START_S, KVOLT_NAMESPACE=namespace)
    await until_ready(url, START_S)
    return url


@pytest.mark.parametrize(
    ("ranks", "flow"),
    [((1, 1), ()), ((2, 1), ()), ((1, 2), ()), ((1, 1), DECODE_FIRST), ((2, 1), DECODE_FIRST)],
    ids=["1to1", "2to1", "1to2", "decode-first-1to1", "decode-first-2to1"],
)
async def test_two_hundred_prompts(
    bench: Bench, expected: list[str], ranks: tuple[int, int], flow: tuple[str, ...]
) -> None:
    """Also where ranks share the heads differently on both sides: they are put together, or cut, on their way."""
    assert len(set(expected)) > NUM_PROMPTS // 4  # the model says something
    url = await served(bench, "apart", "prefill", "decode", ranks=ranks, flow=flow)
    assert await texts(url) == expected
    views = await bench.look(KVOLT_NAMESPACE="apart")
    async with httpx.AsyncClient() as client:
        decode = (await client.get(f"http://{views['apart-decode-1'].admin}/metrics")).text
    told = {
        line.split(" ")[0]: float(line.split(" ")[1])
        for line in decode.splitlines()
        if line.startswith("kvolt_hand")
    }
    assert told['kvolt_handoff_blocks_total{path="shm"}'] > NUM_PROMPTS
    assert not [name for name in told if name.startswith("kvolt_handoff_failures_total")]


async def test_some_prompts_are_computed_apart_and_some_are_not(bench: Bench, expected: list[str]) -> None:
    url = await served(bench, "chosen", "prefill", "decode", flow=("--set", "frontend.prefill_min_tokens=40"))
    assert await texts(url) == expected
    views = await bench.look(KVOLT_NAMESPACE="chosen")
    async with httpx.AsyncClient() as client:
        told = (await client.get(f"http://{views['chosen-prefill-0'].admin}/metrics")).text
    (given,) = [line for line in told.splitlines() if line.startswith("kvolt_handoffs_sent_total")]
    assert NUM_PROMPTS // 8 < float(given.rsplit(" ", 1)[1]) < NUM_PROMPTS * 7 // 8


async def test_each_goes_the_way_that_costs_least(bench: Bench, expected: list[str]) -> None:
    """By what the workers have measured of themselves: without it nothing would be answered by a prefill worker."""
    url = await served(bench, "priced", "prefill", "decode", choice="predicted")
    assert await texts(url) == expected
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
        told = (await client.get("/metrics")).text
    ways = re.findall(r'^kvolt_journey_prefill_modes_total\{.*mode="(\w+)".*\} (\S+)$', told, re.MULTILINE)
    counts = {way: float(count) for way, count in ways}
    assert counts["prefill_worker"] > 0, counts
    assert counts["local"] > 0, counts
