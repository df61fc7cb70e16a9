"""Processes that are stopped for a while (SIGSTOP, SIGCONT) under their clients: no answer ends by it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.integration.processes import MODEL, PATIENCE_S, Bench, sim_text, until, until_ready

NUM_STREAMS = 50
NUM_TOKENS = 400


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


class Stream:
    """One completion, read event by event."""

    def __init__(self, number: int) -> None:
        self.prompt, self.seed = f"stalled {number}", number
        self.texts: list[str] = []
        self.last = ""

    async def run(self, client: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": self.prompt, "seed": self.seed, "max_tokens": NUM_TOKENS}
        async with client.stream(
            "POST", "/v1/completions", json={**body, "ignore_eos": True, "stream": True}
        ) as answer:
            async for line in answer.aiter_lines():
                if line:
                    self.last = line.removeprefix("data: ")
                if line.startswith("data: {"):
                    self.texts += [choice["text"] for choice in json.loads(self.last).get("choices", ())]

    @property
    def is_whole(self) -> bool:
        whole = sim_text(self.prompt, self.seed, NUM_TOKENS)
        return self.last == "[DONE]" and "".join(self.texts).strip() == whole.strip()


async def test_a_stall_ends_no_stream(bench: Bench) -> None:
    """One process, several, all of them; for less and for more than the 5 s of their leases."""
    processes = {name: bench.worker(name, speed=0.5) for name in ("first", "second")}
    processes["frontend"], url = await bench.frontend()
    await bench.until_seen("frontend", "first", "second")
    await until_ready(url)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        for stalled, seconds in (
            (["frontend"], 4.0),
            (["frontend"], 6.5),
            (["first"], 6.5),
            (["first", "second"], 6.5),
            (["frontend", "first", "second"], 6.5),
        ):
            streams = [Stream(number) for number in range(NUM_STREAMS)]
            running = [asyncio.ensure_future(stream.run(client)) for stream in streams]
            await until(lambda streams=streams: all(stream.texts for stream in streams), what="first tokens")
            for name in stalled:
                processes[name].send(signal.SIGSTOP)
            await asyncio.sleep(seconds)
            for name in stalled:
                processes[name].send(signal.SIGCONT)
            await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
            broken = [stream.last for stream in streams if not stream.is_whole]
            assert broken == [], f"{stalled} stalled for {seconds} s"
            await bench.until_seen("frontend", "first", "second")
            again = Stream(NUM_STREAMS)
            await again.run(client)
            assert again.is_whole, f"after {stalled} stalled for {seconds} s"
