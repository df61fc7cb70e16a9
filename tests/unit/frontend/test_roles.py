"""Roles in the frontend's reports: decode and prefill workers, missing roles, prefill modes."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, until
from tests.unit.worker.test_roles import Air, engine_of, start

from kvolt.core.errors import Unavailable
from kvolt.core.request import Request, Role
from kvolt.frontend.model import ModelOptions
from kvolt.journey.prefill_mode import PrefillModeRules
from kvolt.testing import run_virtual

PROMPT = "the water " * 30
QUERY = {"x-kvolt-query-only": "1"}
SPLIT = ModelOptions(prefill=PrefillModeRules(is_predicted=False))


def split(body: Callable[[Frontend, dict[Role, RunningWorker]], Coroutine[Any, Any, None]]) -> None:
    """A prefill worker, a decode worker, and a frontend that knows both."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            workers = {role: (await start(lab, air, role))[0] for role in (Role.PREFILL, Role.DECODE)}
            edge = await lab.frontend(model_options=SPLIT)
            await edge.ready()
            await until(
                lambda: bool(
                    (prefill_target := edge.models.get(MODEL).get_prefill_target())
                    and prefill_target.client.candidates()
                )
            )
            await body(edge, workers)
            assert lab.errors == []

    run_virtual(scenario)


def test_each_role_is_reported_with_its_workers() -> None:
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
        prefill_target = edge.models.get(MODEL).get_prefill_target()
        assert prefill_target is not None
        await until(lambda: not prefill_target.client.candidates())
        ready = await edge.ask(f"/v1/models/{MODEL}/ready")
        assert (ready.status, ready.json["namespaces"]["test"]["workers"]) == (200, alone)

    split(body)


def test_a_model_whose_prompts_alone_could_be_computed_lacks_a_role() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            assert (await edge.ask(f"/v1/models/{MODEL}/ready")).status == 503
            await start(lab, Air(), Role.PREFILL)
            await until(lambda: bool(edge.models.prefill_only()))
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
            assert "no decode worker" in answer.json["error"]["message"]

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


def test_a_query_finds_a_decode_worker_without_a_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(edge: Frontend, workers: dict[Role, RunningWorker]) -> None:
        prefill_target = edge.models.get(MODEL).get_prefill_target()
        assert prefill_target is not None

        async def refuse(request: Request, excluded: object) -> None:
            raise Unavailable("nobody", reason="none_left")

        monkeypatch.setattr(prefill_target.router, "route", refuse)
        answer = await edge.complete(QUERY, prompt=PROMPT)
        assert answer.json["nvext"]["worker_id"] == {
            "decode_worker_id": workers[Role.DECODE].worker._instance
        }

    split(body)


# --- who was named


def named(*workers: RunningWorker) -> list[str]:
    return [each.worker._instance for each in workers]


async def workers_of(edge: Frontend, **nvext: Any) -> dict[str, str]:
    """Who has computed the prompt of a request, and who has answered it."""
    body = {"prompt": PROMPT, "max_tokens": 3, "nvext": {"extra_fields": ["worker_id"], **nvext}}
    answer = await edge.complete(**body)
    assert answer.status == 200, answer.body
    told: dict[str, str] = answer.json["nvext"]["worker_id"]
    return told


def two_of_each(
    body: Callable[[Frontend, list[RunningWorker], list[RunningWorker]], Coroutine[Any, Any, None]],
    options: ModelOptions = SPLIT,
) -> None:
    """Prefill workers, decode workers, and a frontend that knows all four."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefill, decode = [
                [
                    await lab.worker(f"{role}-{number}", engine_of(role), new_mover=air.mover)
                    for number in range(2)
                ]
                for role in (Role.PREFILL, Role.DECODE)
            ]
            edge = await lab.frontend(model_options=options)
            await edge.ready()
            model = edge.models.get(MODEL)
            await until(lambda: bool(model.get_prefill_target()))
            await until(lambda: len(model.workers()) == 4)
            await body(edge, prefill, decode)
            assert lab.errors == []

    run_virtual(scenario)


DECODE_FIRST = ModelOptions(prefill=SPLIT.prefill, decode_first=("*",))
NOT_APART = ModelOptions(prefill=PrefillModeRules(is_predicted=False, min_tokens=500))
"""By its length a prompt would be computed where it is answered."""


@pytest.mark.parametrize(
    "options", [SPLIT, DECODE_FIRST, NOT_APART], ids=["split", "decode-first", "not-apart"]
)
def test_a_prompt_is_computed_by_the_worker_that_it_is_pinned_to(options: ModelOptions) -> None:
    async def body(edge: Frontend, prefill: list[RunningWorker], decode: list[RunningWorker]) -> None:
        for wanted in (*named(*prefill), *named(*prefill)):
            assert (await workers_of(edge, prefill_worker_id=wanted))["prefill_worker_id"] == wanted
        both = {"prefill_worker_id": named(*prefill)[0], "decode_worker_id": named(*decode)[1]}
        for _ in range(3):
            assert await workers_of(edge, **both) == both

    two_of_each(body, options)


def test_a_prefill_worker_that_is_not_there_is_refused() -> None:
    async def body(edge: Frontend, prefill: list[RunningWorker], decode: list[RunningWorker]) -> None:
        for headers in ({}, QUERY):
            for prompt in (PROMPT, "hi"):
                for who in ("nobody", *named(*decode)):
                    answer = await edge.complete(headers, prompt=prompt, nvext={"prefill_worker_id": who})
                    assert answer.status == 503
                    assert f"the pinned prefill worker {who}" in answer.json["error"]["message"]

    two_of_each(body)


def test_without_prefill_workers_none_can_be_pinned() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine_of(Role.AGGREGATED))
            edge = await lab.frontend()
            await edge.ready()
            answer = await edge.complete(nvext={"prefill_worker_id": running.worker._instance})
            assert answer.status == 503
            assert "this model has no prefill workers" in answer.json["error"]["message"]

    run_virtual(scenario)


def test_a_pinned_prefill_worker_that_fails_is_not_replaced_by_another() -> None:
    async def body(edge: Frontend, prefill: list[RunningWorker], decode: list[RunningWorker]) -> None:
        async def refuse(request: Request) -> None:
            raise Unavailable("not now", reason="test")

        prefill[0].engine.prefill = refuse
        told = await workers_of(edge, prefill_worker_id=named(*prefill)[0])
        assert "prefill_worker_id" not in told, "the decode worker has computed it"

    two_of_each(body)


def test_who_is_allowed_counts_for_the_role_that_it_has() -> None:
    async def body(edge: Frontend, prefill: list[RunningWorker], decode: list[RunningWorker]) -> None:
        async def seen(*allowed: str) -> tuple[set[str | None], set[str]]:
            told = [await workers_of(edge, router={"allowed_worker_ids": allowed}) for _ in range(4)]
            return (
                {each.get("prefill_worker_id") for each in told},
                {each["decode_worker_id"] for each in told},
            )

        (p0, p1), (d0, d1) = named(*prefill), named(*decode)
        assert await seen(d1) == ({p0, p1}, {d1})
        assert await seen(p1) == ({p1}, {d0, d1})
        assert await seen(p0, d1) == ({p0}, {d1})
        # An unknown id may have been a prefill worker's: then none of the others is allowed.
        assert await seen("gone", d0) == ({None}, {d0})
        router = {"allowed_worker_ids": ["gone", p0]}
        assert (await edge.complete(prompt=PROMPT, nvext={"router": router})).status == 503

    two_of_each(body)


# --- what became of it


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
        assert edge.sample("kvolt_journey_prefill_modes_total", model=MODEL, mode="remote") == 3

    split(body)


def test_aggregated_workers_report_no_prefill_modes() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", engine_of(Role.AGGREGATED))
            edge = await lab.frontend()
            await edge.ready()
            metrics = (await edge.ask("/metrics")).body
            assert b'kvolt_model_workers{model="sim-tiny",role="aggregated"} 1.0' in metrics
            assert b"kvolt_journey_prefills_total{" not in metrics

    run_virtual(scenario)
