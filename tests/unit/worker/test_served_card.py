"""Names and generation defaults that an operator gives a model, as frontends see them."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, MODEL, Lab, sim

from kvolt.core.request import Sampling
from kvolt.engines.sim.engine import SimEngine
from kvolt.testing import run_virtual
from kvolt.worker.served_card import ServedModel
from kvolt.worker.worker import WorkerOptions


def engine(supported: frozenset[str] | None = None, **defaults: Any) -> SimEngine:
    made = sim(replace(ARGUMENTS, context_length=900))
    made.card = replace(made.card, defaults=defaults)
    made.sampling_fields = frozenset(Sampling.__struct_fields__) if supported is None else supported
    return made


def test_requests_reach_a_model_under_all_its_names() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            served = ServedModel(names=("chat", "chat-fast"))
            await lab.worker("w0", options=WorkerOptions(served=served))
            edge = await lab.frontend()
            await edge.ready("chat")
            listed = (await edge.ask("/v1/models")).json["data"]
            assert [(each["id"], each["root"], each.get("alias_of")) for each in listed] == [
                ("chat", MODEL, None),
                ("chat-fast", MODEL, "chat"),
            ]
            for name in ("chat", "chat-fast"):
                answer = await edge.chat(model=name, max_tokens=3)
                assert (answer.status, answer.json["model"]) == (200, name)
            assert (await edge.chat(model=MODEL)).status == 404

    run_virtual(scenario)


def test_root_is_the_name_under_which_the_model_was_loaded() -> None:
    """Also if the engine was given another name; replicas with other paths are one model."""

    async def scenario() -> None:
        async with Lab() as lab:
            for name in ("w0", "w1"):
                served = ServedModel(names=("chat",), loaded_name=f"/models/{name}")
                await lab.worker(name, options=WorkerOptions(served=served))
            edge = await lab.frontend()
            await edge.ready("chat")
            [listed] = (await edge.ask("/v1/models")).json["data"]
            assert (listed["id"], listed["root"]) == ("chat", "/models/w0")
            assert listed["workers"] == {"aggregated": 2}

    run_virtual(scenario)


def test_an_alias_that_is_a_models_name_is_listed_once() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", options=WorkerOptions(served=ServedModel(names=("chat", MODEL))))
            await lab.worker("w1")
            edge = await lab.frontend()
            await edge.ready("chat", MODEL)
            listed = (await edge.ask("/v1/models")).json["data"]
            assert sorted(each["id"] for each in listed) == ["chat", MODEL]

    run_virtual(scenario)


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [
        ({"temperature": 0.2, "max_tokens": 30}, None, {"temperature": 0.2, "max_tokens": 30}),
        ({"temperature": 0.2, "max_tokens": 30}, {}, {}),
        ({"temperature": 0.2}, {"top_p": 0.5, "max_tokens": 40}, {"top_p": 0.5, "max_tokens": 40}),
    ],
)
def test_defaults_of_the_engine_unless_others_are_given(
    own: dict[str, Any], given: dict[str, Any] | None, expected: dict[str, Any]
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            options = WorkerOptions(served=ServedModel(generation_defaults=given))
            running = await lab.worker("w0", engine(**own), options=options)
            edge = await lab.frontend()
            await edge.ready()
            submitted = running.engine.submit
            sampled: list[Sampling] = []
            running.engine.submit = lambda request: (sampled.append(request.sampling), submitted(request))[1]
            assert (await edge.ask("/v1/models")).json["data"][0]["default_sampling_params"] == expected
            limit = expected.get("max_tokens")
            for answer in (
                await edge.chat(ignore_eos=True),
                await edge.complete(ignore_eos=True, top_p=None),
            ):
                assert answer.status == 200
                if limit is not None:
                    assert answer.json["usage"]["completion_tokens"] == limit
            assert (await edge.complete(ignore_eos=True, max_tokens=5)).json["usage"][
                "completion_tokens"
            ] == 5
            await edge.chat(max_tokens=1, temperature=1, top_p=0.75)
            values = [(each.temperature, each.top_p) for each in sampled]
            silent = (expected.get("temperature", 1.0), expected.get("top_p", 1.0))
            assert values == [silent, silent, silent, (1.0, 0.75)]

    run_virtual(scenario)


def test_defaults_that_the_engine_lacks_do_not_make_it_refuse_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)

    async def scenario() -> None:
        async with Lab() as lab:
            made = engine(frozenset({"temperature"}), temperature=0.5, min_p=0.1, max_tokens=7)
            await lab.worker("w0", made)
            edge = await lab.frontend()
            await edge.ready()
            answer = await edge.chat(ignore_eos=True)
            assert (answer.status, answer.json["usage"]["completion_tokens"]) == (200, 7)
            shown = (await edge.ask("/v1/models")).json["data"][0]["default_sampling_params"]
            assert shown == {"temperature": 0.5, "max_tokens": 7}

    run_virtual(scenario)
    assert "min_p" in caplog.text
