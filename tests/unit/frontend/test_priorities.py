"""Priorities at the edge: a flood of the highest does not keep the lowest from its answer."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Frontend, Lab, RunningWorker, sim
from tests.unit.frontend.serving import served

from kvolt.runtime.tasks import TaskGroup

MAX_NUM_SEQS = 16


@pytest.mark.parametrize("router", ["latency", "round-robin"])
@pytest.mark.parametrize("num_clients", [18, 40], ids=["waits at the worker", "waits anywhere"])
def test_the_lowest_priority_is_answered_under_a_flood_of_the_highest(router: str, num_clients: int) -> None:
    """`latency` holds requests in the router only once the worker is saturated (20 requests, a quarter more than it
    computes at once): with 18 clients the queue is the worker's."""

    async def body(_lab: Lab, edge: Frontend, _running: RunningWorker) -> None:
        is_over = False

        async def flood(number: int) -> None:
            while not is_over:
                high = await edge.complete(
                    {"x-kvolt-request-priority": "9"},
                    prompt=f"high {number}",
                    max_tokens=20,
                    ignore_eos=True,
                )
                assert high.status == 200

        clients = TaskGroup("clients")
        tasks = [clients.start(flood(number), "flood") for number in range(num_clients)]
        await asyncio.sleep(2.0)
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        low = await edge.complete(
            {"x-kvolt-request-priority": "0"}, prompt="low one", max_tokens=20, ignore_eos=True
        )
        is_over = True
        for task in tasks:
            await task
        assert low.status == 200, low.json
        assert loop.time() - asked_at < 12.0, "10 s in the router's queue (queue_promote_s), and its turn"
        await clients.close()

    served(body, lambda: sim(replace(ARGUMENTS, max_num_seqs=MAX_NUM_SEQS)), router=router)
