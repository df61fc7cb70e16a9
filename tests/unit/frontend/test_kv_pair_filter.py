"""Prefill workers whose KV the decode workers cannot take, and that registered all the same: nobody pairs them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, until
from tests.unit.frontend.test_roles import PROMPT, QUERY, SPLIT
from tests.unit.worker.kv.test_compatibility import eighths
from tests.unit.worker.test_roles import Air, engine_of, start

from kvolt.core.request import Role
from kvolt.testing import run_virtual
from kvolt.worker import worker as worker_module

Scene = tuple[Lab, Air, Frontend, RunningWorker, RunningWorker]


def unpaired(body: Callable[[Scene], Coroutine[Any, Any, None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill worker, and a decode worker that does not fit it: they came in the same moment."""

    async def missed(*peers: object) -> None:
        """Neither has seen the other."""

    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            monkeypatch.setattr(worker_module, "check_peers", missed)
            prefill, _ = await start(lab, air, Role.PREFILL)
            decode, _ = await start(lab, air, Role.DECODE, eighths(Role.DECODE))
            edge = await lab.frontend(model_options=SPLIT)
            await edge.ready()
            await until(
                lambda: bool(
                    (prefill_target := edge.models.get(MODEL).get_prefill_target())
                    and prefill_target.client.candidates()
                )
            )
            await body((lab, air, edge, prefill, decode))
            assert lab.errors == []

    run_virtual(scenario)


def test_they_are_not_paired_and_that_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(scene: Scene) -> None:
        lab, air, edge, prefill, decode = scene
        assert (await edge.complete(prompt=PROMPT, max_tokens=3)).status == 200
        await lab.worker("more", eighths(Role.DECODE), new_mover=air.mover)
        await until(lambda: len(edge.models.get(MODEL).candidates()) == 2)  # then it is looked at again
        for _ in range(2):
            assert (await edge.complete(prompt=PROMPT, max_tokens=3)).status == 200
        assert (air.num_offers, edge.sample("kvolt_journey_prefills_total")) == (0, 0)
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 1
        assert edge.sample("kvolt_model_workers", model=MODEL, role="prefill") == 1, "it can be reached"
        (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        assert prefill.worker._instance in told
        assert decode.worker._instance in told
        assert "dtype is sim here and eighths there" in told
        asked = await edge.complete(QUERY, prompt=PROMPT)
        assert "prefill_worker_id" not in asked.json["nvext"]["worker_id"]
        pinned = await edge.complete(prompt=PROMPT, nvext={"prefill_worker_id": prefill.worker._instance})
        assert pinned.status == 503
        assert "not compatible with the decode workers" in pinned.json["error"]["message"]

    with caplog.at_level(logging.ERROR, logger="kvolt.frontend.kv_pair_filter"):
        unpaired(body, monkeypatch)


def test_one_that_fits_is_asked_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(scene: Scene) -> None:
        lab, air, edge, _, _ = scene
        fitting = await lab.worker("fitting", eighths(Role.PREFILL), new_mover=air.mover)
        prefill_target = edge.models.get(MODEL).get_prefill_target()
        assert prefill_target is not None
        await until(lambda: len(prefill_target.client.candidates()) == 2)
        for _ in range(3):
            answer = await edge.complete(prompt=PROMPT, max_tokens=3, nvext={"extra_fields": ["worker_id"]})
            assert answer.json["nvext"]["worker_id"]["prefill_worker_id"] == fitting.worker._instance
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 1

    unpaired(body, monkeypatch)


def test_once_the_decode_worker_is_replaced_they_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(scene: Scene) -> None:
        lab, air, edge, _, decode = scene
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 1
        await lab.worker("right", engine_of(Role.DECODE), new_mover=air.mover)
        await decode.runtime.close()
        model = edge.models.get(MODEL)
        await until(lambda: [each.process for each in model.candidates()] == ["right"])
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 0
        assert (await edge.complete(prompt=PROMPT, max_tokens=3)).status == 200
        assert edge.sample("kvolt_journey_prefills_total", model=MODEL) == 1

    unpaired(body, monkeypatch)


def test_one_odd_decode_worker_of_several_turns_nobody_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(scene: Scene) -> None:
        lab, air, edge, _, _ = scene
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 1
        for name in ("right", "right too"):
            await lab.worker(name, engine_of(Role.DECODE), new_mover=air.mover)
        await until(lambda: len(edge.models.get(MODEL).candidates()) == 3)
        assert edge.sample("kvolt_model_incompatible_prefill_workers", model=MODEL) == 0

    unpaired(body, monkeypatch)
