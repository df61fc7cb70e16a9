"""A worker dies, or falls silent, under its callers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import (
    GENERATE,
    MODEL,
    PATIENCE_S,
    Bench,
    decode_delta,
    sim_request,
    sim_tokens,
    until,
)

from kvolt.core.endpoints import Instance
from kvolt.core.errors import KvoltError, WorkerLost
from kvolt.runtime.endpoint.client import EndpointClient

NUM_STREAMS = 200


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with Bench(tmp_path) as bench:
        yield bench


@dataclass(slots=True)
class Caller:
    """One stream, read to its end."""

    number: int
    num_tokens: int
    instance: Instance
    tokens: list[int] = field(default_factory=list)
    error: KvoltError | None = None
    ended_at: float = 0.0

    async def run(self, client: EndpointClient) -> None:
        try:
            request = sim_request(self.number, self.num_tokens)
            async with await client.stream(request, self.instance, decode=decode_delta) as stream:
                async for delta in stream:
                    self.tokens += delta.token_ids
        except KvoltError as error:
            self.error = error
        self.ended_at = time.monotonic()


async def known(client: EndpointClient, *names: str) -> list[Instance]:
    """The instances of these processes, once all of them are candidates."""

    def by_name() -> dict[str, Instance]:
        return {instance.process: instance for instance in client.candidates()}

    await until(lambda: sorted(by_name()) == sorted(names), what=f"{names}")
    return [by_name()[name] for name in names]


@pytest.mark.parametrize(
    ("number", "reason", "num_tokens"), [(signal.SIGKILL, "closed", 400), (signal.SIGSTOP, "heartbeat", 800)]
)
async def test_callers_of_a_lost_worker(
    bench: Bench, number: signal.Signals, reason: str, num_tokens: int
) -> None:
    victim = bench.worker("victim", speed=0.5)
    bench.worker("witness", speed=0.5)
    async with bench.runtime() as runtime:
        client = await runtime.client(GENERATE)
        lost, safe = await known(client, "victim", "witness")
        callers = [Caller(number, num_tokens, (lost, safe)[number % 2]) for number in range(NUM_STREAMS)]
        running = [asyncio.ensure_future(caller.run(client)) for caller in callers]
        await until(lambda: all(len(caller.tokens) >= 3 for caller in callers), what="tokens on all streams")

        struck_at = time.monotonic()
        victim.send(number)
        mine = [caller for caller in callers if caller.instance is lost]
        await until(lambda: all(caller.ended_at for caller in mine), what="the victim's callers to be told")
        after_s = [caller.ended_at - struck_at for caller in mine]
        assert not any(caller.ended_at for caller in callers if caller.instance is safe), "streams too short"
        # At once when the socket closes; after plane.dead_after_s when it does not.
        assert max(after_s) < PATIENCE_S / 2
        for caller in mine:
            assert isinstance(caller.error, WorkerLost)
            assert caller.error.fields["reason"] == reason
            assert caller.tokens == sim_tokens(caller.number, num_tokens)[: len(caller.tokens)]
        assert [instance.process for instance in client.candidates()] == ["witness"]
        for _ in range(4):
            async with await client.stream(sim_request(0, 1), decode=decode_delta) as stream:
                assert (await anext(stream)).token_ids == tuple(sim_tokens(0, 1))

        await asyncio.wait_for(asyncio.gather(*running), PATIENCE_S)
        for caller in callers:
            if caller.instance is safe:
                assert caller.error is None
                assert caller.tokens == sim_tokens(caller.number, num_tokens)
        if number == signal.SIGSTOP:
            victim.send(signal.SIGCONT)
            await known(client, "victim", "witness")
            again = Caller(0, 10, lost)
            await again.run(client)
            assert (again.error, again.tokens) == (None, sim_tokens(0, 10))


async def test_streams_of_a_killed_worker_go_on_at_the_other(bench: Bench) -> None:
    num_streams, num_tokens = 20, 200
    victim = bench.worker("victim", speed=0.5)
    bench.worker("witness", speed=0.5)
    _, url = await bench.frontend()
    await bench.until_seen("frontend", "victim", "witness")
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        async with asyncio.timeout(PATIENCE_S):
            while 'model_workers{model="sim-tiny"} 2.0' not in (await client.get("/metrics")).text:
                await asyncio.sleep(0.05)

        async def ask(number: int) -> tuple[str, dict[str, Any]]:
            """The text and the usage of one stream."""
            body = {
                "model": MODEL,
                "prompt": f"number {number}",
                "max_tokens": num_tokens,
                "ignore_eos": True,
            }
            usage = {"include_usage": True}
            stream = (
                await client.post("/v1/completions", json={**body, "stream": True, "stream_options": usage})
            ).text
            *events, done = [event for event in stream.split("\n\n") if event]
            assert done == "data: [DONE]", stream[-500:]
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]), chunks[-1][
                "usage"
            ]

        running = [asyncio.ensure_future(ask(number)) for number in range(num_streams)]
        await bench.until_computing(num_streams)
        lost, kept = await bench.open_requests("victim", "witness")
        assert min(lost, kept) > 0
        await asyncio.sleep(0.5)  # all have their first tokens
        victim.send(signal.SIGKILL)
        struck = await asyncio.gather(*running)
        undisturbed = await asyncio.gather(*map(ask, range(num_streams)))
        metrics = (await client.get("/metrics")).text
    assert [text for text, _ in struck] == [text for text, _ in undisturbed]
    assert {usage["completion_tokens"] for _, usage in struck} == {num_tokens}
    pattern = r'kvolt_frontend_model_migration_total{.*migration_type="ongoing_request".*} ([0-9.]+)'
    found = re.search(pattern, metrics)
    assert found is not None
    assert float(found[1]) == lost


async def test_serve_brings_a_killed_worker_back(bench: Bench) -> None:
    (bench.folder / "kvolt.toml").write_text(
        '[[workers]]\nengine = "sim"\nmodel = "sim-tiny"\ncount = 2\nargs = {speed = 0.5}\n'
    )
    _, url = await bench.serve(
        *("--set", "supervisor.restart_backoff_s=0.2", "--set", "discovery.ttl_s=5"),
        *("--router", "least-loaded"),
    )
    before = await bench.until_seen("frontend", "worker-0", "worker-1")
    body = {"model": MODEL, "prompt": "Hi", "max_tokens": 150, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:

        async def ask() -> str:
            return (await client.post("/v1/completions", json=body)).text

        running = [asyncio.ensure_future(ask()) for _ in range(10)]
        await bench.until_computing(10)
        lost, kept = await bench.open_requests("worker-0", "worker-1")
        assert min(lost, kept) > 0
        os.kill(bench.child_pid("worker-0"), signal.SIGKILL)
        answers = await asyncio.gather(*running)
        # The other one went on with those of the victim.
        assert all(answer.endswith("data: [DONE]\n\n") for answer in answers)

        after = await bench.until_seen("frontend", "worker-0", "worker-1")
        assert after["worker-0"].address != before["worker-0"].address
        assert after["worker-1"].address == before["worker-1"].address
        # Both get requests again, and the frontend has forgotten the dead one.
        running = [asyncio.ensure_future(ask()) for _ in range(4)]
        await bench.until_computing(4)
        assert min(await bench.open_requests("worker-0", "worker-1")) > 0
        assert all(answer.endswith("data: [DONE]\n\n") for answer in await asyncio.gather(*running))
