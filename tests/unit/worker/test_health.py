"""Health that means progress: an engine that has work and makes no step is unhealthy, and well again when it does."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.unit.engines.lab import (
    Lab,
    RunningWorker,
    ScriptedEngine,
    make_request,
    start_stream,
    until,
)

from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.errors import EngineFailed
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.runtime.health import HealthState
from kvolt.testing import run_virtual
from kvolt.worker.worker import WorkerOptions

STUCK_S = 4.0
R = RequestId("r")


async def stuckable(lab: Lab, engine: ScriptedEngine) -> RunningWorker:
    return await lab.worker("w0", engine, options=WorkerOptions(stuck_after_s=STUCK_S))


def state_of(running: RunningWorker) -> tuple[HealthState, str]:
    check = running.runtime.health.report().checks["engine"]
    return check.state, check.reason


def step(token: int, finish: FinishReason | None = None) -> StepOutput:
    return StepOutput(((R, Delta((token,), finish=finish)),))


def test_a_stuck_step_is_unhealthy_until_steps_flow_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await stuckable(lab, engine := ScriptedEngine())
            client = await lab.client(running)
            async with await start_stream(client, make_request(tokens=20)) as stream:
                await until(lambda: bool(engine.submitted))
                engine.put(step(1))
                await anext(stream)
                await asyncio.sleep(STUCK_S - 0.1)
                assert state_of(running) == (HealthState.READY, "")
                assert running.worker._progress.age_s == pytest.approx(STUCK_S - 0.1, abs=0.1)
                await asyncio.sleep(0.2)
                assert state_of(running) == (HealthState.UNHEALTHY, "no step for 4 s with requests waiting")
                assert not running.runtime.health.healthy()
                engine.put(step(2))
                await anext(stream)
                assert state_of(running) == (HealthState.READY, "")
                await asyncio.sleep(STUCK_S + 0.1)
                assert state_of(running)[0] is HealthState.UNHEALTHY, "it can be stuck again"
                engine.put(step(3, FinishReason.STOP))
                await anext(stream)
            assert state_of(running) == (HealthState.READY, "")

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)


def test_an_idle_engine_need_not_step() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await stuckable(lab, engine := ScriptedEngine())
            client = await lab.client(running)
            for name in ("ends", "leaves"):
                stream = await start_stream(client, make_request())
                await until(lambda: bool(engine.submitted))
                if name == "ends":
                    engine.put(step(1, FinishReason.STOP))
                    await anext(stream)
                await stream.aclose()
                engine.submitted.clear()
                await asyncio.sleep(20 * STUCK_S)
                assert state_of(running) == (HealthState.READY, "")
                assert running.worker._progress.age_s == 0

    run_virtual(scenario)


def test_the_first_step_may_take_longer(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await stuckable(lab, engine := ScriptedEngine())
            client = await lab.client(running)
            stream = await start_stream(client, make_request())
            await until(lambda: bool(engine.submitted))
            await asyncio.sleep(4 * STUCK_S)
            assert state_of(running) == (HealthState.READY, "")
            engine.put(step(1))
            await anext(stream)
            await asyncio.sleep(1.1 * STUCK_S)
            assert state_of(running)[0] is HealthState.UNHEALTHY
            await stream.aclose()

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)


def test_a_bug_with_one_request_is_that_requests_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Picky(ScriptedEngine):
        def submit(self, request: Request) -> None:
            if request.request_id == "bad":
                raise ZeroDivisionError("secret")
            super().submit(request)

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Picky())
            client = await lab.client(running)
            async with await start_stream(client, make_request("good")) as good:
                await until(lambda: bool(engine.submitted))
                with pytest.raises(EngineFailed) as caught:
                    async with await start_stream(client, make_request("bad")) as bad:
                        await anext(bad)
                assert caught.value.fields == {"engine": "sim"}
                assert "secret" not in caught.value.message
                assert engine.aborted == ["bad"], "the engine may hold half of it"
                engine.put(StepOutput(((RequestId("good"), Delta((5,), finish=FinishReason.STOP)),)))
                assert (await anext(good)).token_ids == (5,)
            assert state_of(running) == (HealthState.READY, "")
            assert not running.task.done()

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)


def test_failed_abort_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    class CannotAbort(ScriptedEngine):
        def abort(self, request_id: RequestId) -> None:
            super().abort(request_id)
            raise RuntimeError("no")

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := CannotAbort())
            client = await lab.client(running)
            stream = await start_stream(client, make_request())
            await until(lambda: bool(engine.submitted))
            await stream.aclose()
            await until(lambda: engine.aborted == ["r"])
            assert not running.worker._open
            engine.submitted.clear()
            async with await start_stream(client, make_request()) as again:
                await until(lambda: bool(engine.submitted))
                engine.put(step(9, FinishReason.STOP))
                assert (await anext(again)).token_ids == (9,)
            assert lab.errors == []

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)
