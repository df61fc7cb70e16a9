"""Requests to the edge while workers are stalled: they wait, and are refused with a remedy in the end."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, until
from tests.unit.frontend.serving import served
from tests.unit.worker.test_roles import Air, start

from kvolt.core.request import Role
from kvolt.frontend.model import ModelOptions
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_waits_for_the_only_worker(stream: bool) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        lab.network.pause("w0")
        await until(lambda: not edge.models.ready(), 10.0)
        assert (await edge.ask("/v1/models")).json["data"] == [], (
            "ready means that a request would reach it now"
        )
        task_group = TaskGroup("clients")
        asked = task_group.start(edge.complete(max_tokens=5, stream=stream), "ask")
        await asyncio.sleep(10.0)
        assert not asked.done()
        lab.network.resume("w0")
        answer = await asked
        assert answer.status == 200
        assert len(answer.text().split()) == 5
        await task_group.close()

    served(body)


def test_a_worker_that_does_not_come_back_is_a_503() -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        lab.network.pause("w0")
        await until(lambda: not edge.models.ready(), 10.0)
        began = asyncio.get_running_loop().time()
        answer = await edge.complete(max_tokens=5)
        assert answer.status == 503
        assert asyncio.get_running_loop().time() - began < 31.0
        lab.network.resume("w0")
        await edge.ready()

    served(body)


def test_prompts_of_a_stalled_prefill_worker_are_computed_by_the_decode_worker() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            workers = {role: (await start(lab, air, role))[0] for role in (Role.PREFILL, Role.DECODE)}
            edge = await lab.frontend(
                model_options=ModelOptions(prefill=PrefillModeRules(is_predicted=False))
            )
            await edge.ready()
            await until(
                lambda: bool(
                    (prefill_target := edge.models.get(MODEL).get_prefill_target())
                    and prefill_target.client.candidates()
                )
            )
            prompt = "the water " * 30
            assert (await edge.complete(prompt=prompt, max_tokens=3)).status == 200
            lab.network.pause(workers[Role.PREFILL].runtime.options.name)
            began = asyncio.get_running_loop().time()
            assert (await edge.complete(prompt=prompt + "more", max_tokens=3)).status == 200
            assert asyncio.get_running_loop().time() - began < 7.0, "the grace is not waited for"
            lab.network.resume(workers[Role.PREFILL].runtime.options.name)

    run_virtual(scenario)


@pytest.mark.parametrize("limit", [0, 3])
def test_an_answer_that_may_not_migrate_waits_for_its_stalled_worker(limit: int) -> None:
    async def body(lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        asked = {"prompt": "wait", "max_tokens": 300, "ignore_eos": True, "stream": True}
        undisturbed = (await edge.complete(**asked)).text()
        task_group = TaskGroup("clients")
        asking = task_group.start(edge.complete(**asked), "ask")
        await until(lambda: running.engine.load().running > 0, 5.0)
        await asyncio.sleep(0.2)
        await lab.worker("w1")
        await until(lambda: len(edge.models.get(MODEL).candidates()) == 2, 5.0)
        lab.network.pause("w0")
        await asyncio.sleep(10.0)
        assert asking.done() == (limit > 0), "the other worker goes on with it, or none does"
        lab.network.resume("w0")
        assert (await asking).text() == undisturbed
        await task_group.close()

    served(body, model_options=ModelOptions(migration_limit=limit))
