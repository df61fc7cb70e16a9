"""Workers as processes measure the paths that KV takes between them, register that, and say where a path is slow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, until_ready

from kvolt.core.card import EngineInfo, MeasuredLink
from kvolt.core.endpoints import decode_instance
from kvolt.core.request import Role

PROMPT = " ".join(f"w{number}" for number in range(200))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


async def hand_over(bench: Bench, *decode_flags: str) -> None:
    """A prompt from one worker to another, which is started with these flags."""
    bench.worker("p0", "--role", "prefill")
    bench.worker("d0", "--role", "decode", *decode_flags)
    _, url = await bench.frontend("--prefill-choice", "threshold")
    await bench.until_seen("frontend", "p0", "d0")
    await until_ready(url)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client, asyncio.timeout(PATIENCE_S):
        number = 0
        while not (await metrics(bench, "d0"))["kvolt_handoffs_received_total"]:
            # Until the frontend has heard of the prefill worker the other one computes prompts.
            number += 1
            response = await client.post(
                "/v1/completions", json={"model": MODEL, "prompt": f"{number} {PROMPT}", "max_tokens": 4}
            )
            assert response.status_code == 200, response.text


async def metrics(bench: Bench, name: str) -> dict[str, float]:
    views = await bench.look()
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        lines = (await client.get(f"http://{views[name].admin}/metrics")).text.splitlines()
    found = (line.rsplit(" ", 1) for line in lines if line.startswith("kvolt_"))
    return {series: float(value) for series, value in found}


async def registered_links(bench: Bench, role: Role) -> dict[str, MeasuredLink]:
    async with bench.runtime() as runtime:
        content = await runtime.discovery.get_prefix("instances/")
    instances = [decode_instance(value) for value in content.values()]
    infos = [
        msgspec.msgpack.decode(one.info, type=EngineInfo)
        for one in instances
        if one is not None and one.endpoint.endpoint == "generate"
    ]
    (info,) = [info for info in infos if info.role is role]
    return info.links


async def test_what_was_measured_is_registered_and_told(bench: Bench) -> None:
    await hand_over(bench)
    async with asyncio.timeout(PATIENCE_S):
        while not (links := await registered_links(bench, Role.DECODE)):
            await asyncio.sleep(0.1)
    assert set(links) == {"shm@127.0.0.1"}
    assert await registered_links(bench, Role.PREFILL) == {}
    told = await metrics(bench, "d0")
    speed = told['kvolt_transfer_link_bytes_per_second{path="shm",peer="127.0.0.1"}']
    assert speed > 0
    assert not [series for series in told if series.startswith("kvolt_transfer_slow_path")]


async def test_a_slow_path_is_logged_and_counted_with_its_cause(bench: Bench) -> None:
    await hand_over(bench, "--set", "transfer.shared_memory=false", "--set", "transfer.self_test=false")
    told = await metrics(bench, "d0")
    assert told['kvolt_transfer_slow_path_total{missing="shm",path="tcp"}'] == 1
    said = (bench.folder / "d0.err").read_text() + (bench.folder / "d0.out").read_text()
    assert said.count("slow transfer path: host=127.0.0.1 path=tcp") == 1
    assert "shared memory is turned off; turn it on (transfer.shared_memory)" in said
