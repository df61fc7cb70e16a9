"""Workers of a real model whose KV does not fit: the prefill worker ends, says why, and requests are answered."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from tests.integration.processes import until_ready
from tests.integration.test_prefill_decode_native import ANSWER_S, MODEL, START_S, native_bench

from kvolt.testing.tiny_models import tiny_checkpoint


@pytest.fixture
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


async def test_a_prefill_worker_whose_kv_does_not_fit_ends_when_it_starts(
    tmp_path: Path, checkpoint: Path
) -> None:
    with native_bench(tmp_path, checkpoint) as bench:
        bench.worker("first", "--role", "decode")
        _, url = await bench.frontend()
        await bench.until_seen("frontend", "first", timeout_s=START_S)
        second = bench.worker("second", "--role", "prefill", "--arg", "dtype=bfloat16")
        assert await second.ended(START_S) == 2
        said = second.out + second.err
        for part in (
            f"the prefill worker second cannot exchange KV of {MODEL} with the registered decode worker first (",
            "dtype is bfloat16 here and float32 there",
            "start both workers with the same dtype",
        ):
            assert part in said
        assert set(await bench.look()) == {"frontend", "first"}
        await until_ready(url, START_S)
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
            body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_a_decode_worker_whose_kv_does_not_fit_computes_its_prompts(
    tmp_path: Path, checkpoint: Path
) -> None:
    with native_bench(tmp_path, checkpoint) as bench:
        bench.worker("first", "--role", "prefill")
        _, url = await bench.frontend()
        await bench.until_seen("frontend", "first", timeout_s=START_S)
        second = bench.worker("second", "--role", "decode", "--arg", "dtype=bfloat16")
        await until_ready(url, START_S)
        async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S) as client:
            body = {"model": MODEL, "prompt": [5] * 40, "max_tokens": 4}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert "worker=second peer=first (" in second.out + second.err
