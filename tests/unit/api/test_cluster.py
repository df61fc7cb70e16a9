"""A cluster from outside: commands to one process."""

from __future__ import annotations

import asyncio

from tests.unit.engines.lab import NAMESPACE, Lab, ScriptedEngine

from kvolt.api.cluster import Cluster
from kvolt.testing import run_virtual


def test_an_engine_has_time_to_move_its_weights() -> None:
    """Beyond the time that requests get to finish."""

    class SlowSleeper(ScriptedEngine):
        async def sleep(self, level: int) -> None:
            await asyncio.sleep(120.0)

        async def wake(self) -> None:
            await asyncio.sleep(120.0)

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", SlowSleeper())
            visitor = await lab.runtime("visitor")
            cluster = Cluster(visitor.discovery, visitor.plane, NAMESPACE)
            address = running.runtime.plane.address
            assert address is not None
            assert (await cluster.control(address, "sleep", 1.0)).details["engine"]["asleep"]
            assert not (await cluster.control(address, "wake_up", 0.0)).details["engine"]["asleep"]

    run_virtual(scenario)
