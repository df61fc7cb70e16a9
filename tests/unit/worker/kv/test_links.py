"""The speeds at which KV comes to a worker are part of its registration, and leave the rest of it alone."""

from __future__ import annotations

import asyncio

import msgspec
from tests.unit.engines.lab import Lab, until

from kvolt.core.card import EngineInfo, MeasuredLink
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.testing import run_virtual

SHM = {"shm@10.0.0.1": MeasuredLink("shm", 9e9, 1e-4)}
BOTH = {**SHM, "tcp@10.0.0.2": MeasuredLink("tcp", 1e9, 2e-4)}


def registered(client: EndpointClient) -> EngineInfo:
    [instance] = client.instances()
    return msgspec.msgpack.decode(instance.info, type=EngineInfo)


def test_links_are_registered_as_they_are_measured() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            [before] = client.instances()
            info = registered(client)
            for links in (SHM, BOTH):
                await running.worker.register_links(links)
                await until(lambda links=links: registered(client).links == links)
            [after] = client.instances()
            assert msgspec.structs.replace(after, info=before.info) == before, "the same instance"
            assert msgspec.structs.replace(registered(client), links={}) == info

    run_virtual(scenario)


def test_links_that_have_not_changed_are_not_registered_anew() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            num_told = 0
            update = running.runtime.update_info

            async def count(*args: object) -> None:
                nonlocal num_told
                num_told += 1
                await update(*args)  # type: ignore[arg-type]

            running.runtime.update_info = count  # type: ignore[method-assign]
            await asyncio.gather(*(running.worker.register_links(SHM) for _ in range(5)))
            assert num_told == 1

    run_virtual(scenario)


def test_worker_exports_nothing_before_start() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            fresh = type(running.worker)(running.runtime, running.engine, "other")
            await fresh.register_links(SHM)
            assert fresh.info is None

    run_virtual(scenario)
