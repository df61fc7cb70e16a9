"""What the edge tells of roles: who answers, who computes prompts, what is missing, and what became of it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, until
from tests.unit.engines.test_worker_roles import Air, engine_of, start

from kvolt.core.errors import Unavailable
from kvolt.core.request import Request, Role
from kvolt.frontend.models import ModelOptions
from kvolt.journey.ways import WayRule
from kvolt.testing import run_virtual

PROMPT = "the water " * 30
QUERY = {"x-kvolt-query-only": "1"}
SPLIT = ModelOptions(prefill=WayRule(is_predicted=False))


def split(body: Callable[[Frontend, dict[Role, RunningWorker]], Coroutine[Any, Any, None]]) -> None:
    """A prefill worker, a decode worker, and a frontend that knows both."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            workers = {role: (await start(lab, air, role))[0] for role in (Role.PREFILL, Role.DECODE)}
            edge = await lab.frontend(model_options=SPLIT)
            await edge.ready()
            await until(lambda: bool((leg := edge.models.get(MODEL).prefill()) and leg.client.candidates()))
            await body(edge, workers)
            assert lab.errors == []

    run_virtual(scenario)


def test_each_role_is_told_with_its_workers() -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        both = {"decode": 1, "prefill": 1}
        (model,) = (await edge.ask("/v1/models")).json["data"]
        assert model["workers"] == both
        ready = await edge.ask(f"/v1/models/{MODEL}/ready")
        assert ready.json["namespaces"]["test"] == {"ready": True, "workers": both, "missing": []}
        health = (await edge.ask("/health")).json
        assert (health["roles"], health["missing"]) == ({MODEL: both}, {})
        assert edge.sample("kvolt_model_workers", model=MODEL, role="prefill") == 1
        # Who answers can compute prompts, too.
        await workers[Role.PREFILL].runtime.close()
        alone = {"decode": 1, "prefill": 0}
        leg = edge.models.get(MODEL).prefill()
        assert leg is not None
        await until(lambda: not leg.client.candidates())
        ready = await edge.ask(f"/v1/models/{MODEL}/ready")
        assert (ready.status, ready.json["namespaces"]["test"]["workers"]) == (200, alone)

    split(body)


def test_a_model_whose_prompts_alone_could_be_computed_lacks_a_role() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            assert (await edge.ask(f"/v1/models/{MODEL}/ready")).status == 404
            await start(lab, Air(), Role.PREFILL)
            await until(lambda: bool(edge.models.unanswered()))
            ready = await edge.ask(f"/v1/models/{MODEL}/ready")
            assert (ready.status, ready.json["ready"]) == (503, False)
            assert ready.json["namespaces"]["test"] == {
                "ready": False,
                "workers": {"prefill": 1, "decode": 0},
                "missing": ["decode"],
            }
            health = await edge.ask("/health")
            assert (health.status, health.json["models"]) == (503, [])
            assert health.json["missing"] == {MODEL: ["decode"]}
            assert (await edge.ask("/v1/models")).json["data"] == []
            answer = await edge.chat()
            assert answer.status == 503
            assert "has the role decode" in answer.json["error"]["message"]

    run_virtual(scenario)


def test_a_decode_worker_that_goes_is_missed_by_its_role() -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        await workers[Role.DECODE].runtime.close()
        await until(lambda: not edge.models.ready())
        told = (await edge.ask(f"/v1/models/{MODEL}/ready")).json["namespaces"]["test"]
        assert told == {"ready": False, "workers": {"decode": 0, "prefill": 1}, "missing": ["decode"]}
        assert (await edge.ask("/health")).json["missing"] == {MODEL: ["decode"]}

    split(body)


def test_a_query_names_both_workers() -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        named = {f"{role}_worker_id": workers[role].worker._instance for role in (Role.PREFILL, Role.DECODE)}
        answer = await edge.complete(QUERY, prompt=PROMPT)
        assert answer.json["nvext"]["worker_id"] == named
        assert not workers[Role.PREFILL].worker._open
        # A short prompt is not worth the way.
        short = await edge.complete(QUERY, prompt="hi")
        assert short.json["nvext"]["worker_id"] == {"decode_worker_id": named["decode_worker_id"]}
        # And so it goes.
        whole = await edge.complete(prompt=PROMPT, nvext={"extra_fields": ["worker_id"]}, max_tokens=3)
        assert whole.json["nvext"]["worker_id"] == named

    split(body)


def test_a_query_finds_who_answers_where_nobody_takes_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        leg = edge.models.get(MODEL).prefill()
        assert leg is not None

        async def refuse(request: Request) -> None:
            raise Unavailable("nobody", reason="none_left")

        monkeypatch.setattr(leg.router, "route", refuse)
        answer = await edge.complete(QUERY, prompt=PROMPT)
        assert answer.json["nvext"]["worker_id"] == {
            "decode_worker_id": workers[Role.DECODE].worker._instance
        }

    split(body)


def test_prompts_that_were_computed_elsewhere_and_those_that_were_not_are_counted() -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        for _ in range(2):
            assert (await edge.complete(prompt=PROMPT, max_tokens=3)).status == 200
        await edge.complete(prompt="hi", max_tokens=3)
        engine = workers[Role.PREFILL].engine

        async def refuse(request: Request) -> None:
            raise Unavailable("not now", reason="test")

        engine.prefill = refuse
        assert (await edge.complete(prompt=PROMPT, max_tokens=3)).status == 200
        assert edge.sample("kvolt_journey_prefills_total", model=MODEL) == 2
        failed = edge.sample("kvolt_journey_prefill_failures_total", model=MODEL, reason="unavailable")
        assert failed >= 1
        assert edge.sample("kvolt_journey_ways_total", model=MODEL, way="split") == 3

    split(body)


def test_of_workers_that_compute_their_own_prompts_nothing_of_it_is_told() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", engine_of(Role.AGGREGATED))
            edge = await lab.frontend()
            await edge.ready()
            metrics = (await edge.ask("/metrics")).body
            assert b'kvolt_model_workers{model="sim-tiny",role="aggregated"} 1.0' in metrics
            assert b"kvolt_journey_prefills_total{" not in metrics

    run_virtual(scenario)
