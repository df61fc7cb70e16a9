"""`kvolt serve` with a prefill and a decode vLLM on a host whose cores are taken by other processes.

Every answer is whole and right, and says how its KV arrived."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kept import VllmHarness
from tests.served import Served

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Sampling, StopConditions
from kvolt.testing.engines.harness import engine_run

ENGINE_ARGS = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 256,
    "max_num_seqs": 16,
}
NUM_TOKENS = 16
PROMPTS = [[3 + number, *range(20, 210)] for number in range(16)]


@contextmanager
def cores_taken() -> Iterator[None]:
    """By two busy processes for each."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def served(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--prefill", "1", "--decode", "1", "--prefill-choice", "threshold")
    served = Served(tmp_path_factory.mktemp("served"), tiny, "vllm", ENGINE_ARGS, *flags)
    try:
        served.ready(1)
        yield served
    finally:
        served.close()


async def expected(harness: VllmHarness) -> list[list[int]]:
    """One engine's tokens, prompt by prompt."""
    found = []
    async with engine_run(harness) as run:
        for number, prompt in enumerate(PROMPTS):
            request = Request(
                request_id=RequestId(f"r{number}"),
                model="tiny",
                token_ids=tuple(prompt),
                stop=StopConditions(max_tokens=NUM_TOKENS, ignore_eos=True),
                sampling=Sampling(temperature=0.0),
            )
            found.append((await run.answer(request)).tokens[0])
    return found


def ask(served: Served, prompt: list[int]) -> dict[str, Any]:
    fields = ["worker_id", "timing", "completion_token_ids"]
    return served.ask(prompt, NUM_TOKENS, nvext={"extra_fields": fields})


async def test_answers_on_a_busy_host(served: Served, harness: VllmHarness) -> None:
    with cores_taken(), ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: ask(served, prompt), PROMPTS))
    told = [answer["nvext"] for answer in answers]
    assert [each["completion_token_ids"] for each in told] == await expected(harness)
    handed_over = [each for each in told if "prefill_worker_id" in each["worker_id"]]
    assert handed_over, "no prompt was computed by the prefill worker"
    moved = [each["timing"] for each in handed_over if "kv_transfer_path" in each["timing"]]
    assert moved, "no KV was transferred"
    for timing in moved:
        assert timing["kv_transfer_path"] == "nixl"
        assert timing["kv_transfer_bytes"] > 0
        assert timing["kv_transfer_ms"] > 0
