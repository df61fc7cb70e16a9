"""The step model of a worker's registration follows the steps that its engine runs."""

from __future__ import annotations

import asyncio

import msgspec
from tests.unit.engines.lab import Lab, ScriptedEngine, until

from kvolt.core.card import EngineInfo
from kvolt.core.latency import LatencyModel, scale_speed
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.testing import run_virtual

MEASURED = LatencyModel(base_s=0.02, prefill_token_s=0.001, batch_s=0.001)


class CalibratedEngine(ScriptedEngine):
    def __init__(self) -> None:
        super().__init__()
        self.latency = MEASURED

    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), latency=MEASURED)


def registered(client: EndpointClient) -> LatencyModel | None:
    [instance] = client.instances()
    return msgspec.msgpack.decode(instance.info, type=EngineInfo).latency


def test_a_corrected_model_is_registered_once_it_matters() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engine = CalibratedEngine()
            client = await lab.client(await lab.worker("w0", engine))
            engine.latency = scale_speed(MEASURED, 0.9)
            await asyncio.sleep(60.0)
            assert registered(client) == MEASURED, "too little to matter"
            for speed in (0.5, 0.9):
                engine.latency = scale_speed(MEASURED, speed)
                await until(lambda: registered(client) == engine.latency, 40.0)

    run_virtual(scenario)


def test_a_stall_is_not_registered() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engine = CalibratedEngine()
            client = await lab.client(await lab.worker("w0", engine))
            for _ in range(10):
                for speed, after_s in ((0.1, 10.0), (1.0, 10.0)):
                    engine.latency = scale_speed(MEASURED, speed)
                    await asyncio.sleep(after_s)
                    assert registered(client) == MEASURED

    run_virtual(scenario)


def test_a_change_of_prompts_alone_matters_too() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engine = CalibratedEngine()
            client = await lab.client(await lab.worker("w0", engine))
            engine.latency = msgspec.structs.replace(MEASURED, prefill_token_s=0.003)
            await until(lambda: registered(client) == engine.latency, 40.0)

    run_virtual(scenario)
