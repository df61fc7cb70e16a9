"""Loading and unloading adapters at all workers of a model: what is told of each, and what is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from tests.unit.engines.adapter_lab import BROKEN, WithAdapters
from tests.unit.engines.lab import MODEL, Frontend, Lab, ScriptedEngine, until

from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError, NotFound, Unavailable, Unsupported
from kvolt.frontend.admin.lora_admin import AdapterChange, load_adapter, unload_adapter
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Stubborn(WithAdapters):
    """Takes no adapter, and keeps those that it has."""

    async def load_lora(self, name: str, path: str) -> None:
        raise EngineFailed("out of memory", engine="stubborn")

    async def unload_lora(self, name: str) -> None:
        raise EngineFailed("not now", engine="stubborn")


async def edge_with(lab: Lab, *engines: ScriptedEngine) -> Frontend:
    """A frontend that knows a worker for each engine."""
    for number, engine in enumerate(engines):
        await lab.worker(f"w{number}", engine)
    edge = await lab.frontend()
    await edge.ready(*sorted({engine.card.name for engine in engines}))
    await until(lambda: sum(len(model.client.instances()) for model in edge.models.all()) == len(engines))
    return edge


async def load(edge: Frontend, **body: Any) -> list[AdapterChange]:
    return await load_adapter(edge.runtime, edge.models, json.dumps(body).encode())


async def unload(edge: Frontend, **body: Any) -> list[AdapterChange]:
    return await unload_adapter(edge.runtime, edge.models, json.dumps(body).encode())


def told(changes: list[AdapterChange]) -> list[tuple[str, tuple[str, ...], str | None]]:
    return sorted((each.process, each.loras, each.error) for each in changes)


def test_an_adapter_comes_to_all_workers_and_can_be_asked_for_at_once() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("old"), WithAdapters(), WithAdapters(model="other")]
            edge = await edge_with(lab, *engines)
            changes = await load(edge, lora_name="sql", lora_path="/adapters/sql", model=MODEL)
            assert told(changes) == [("w0", ("old", "sql"), None), ("w1", ("sql",), None)]
            assert {each.model for each in changes} == {MODEL}
            assert [engine.adapters.get("sql") for engine in engines] == ["/adapters/sql"] * 2 + [None]
            for _ in range(2):
                assert (await edge.complete(model="sql")).status == 200
            assert [len(engine.submitted) for engine in engines] == [1, 1, 0]
            again = await load(edge, lora_name="sql", lora_path="/adapters/sql", model=MODEL)
            assert told(again) == told(changes), "a worker that started since gets it so"

            assert told(await unload(edge, lora_name="old")) == [("w0", ("sql",), None)], "only who had it"
            assert told(await unload(edge, lora_name="sql")) == [("w0", (), None), ("w1", (), None)]
            assert (await edge.complete(model="sql")).status == 404

    run_virtual(scenario)


def test_the_answer_waits_for_the_news_and_not_for_ever() -> None:
    """What a worker registers comes to the frontend through discovery, which takes its time."""

    async def scenario() -> None:
        async with Lab() as lab:
            edge = await edge_with(lab, WithAdapters())
            loop = asyncio.get_running_loop()

            lab.store.offline()
            loop.call_later(0.5, lab.store.online)
            await load(edge, lora_name="sql", lora_path="/sql")
            assert (await edge.complete(model="sql")).status == 200
            lab.store.offline()
            loop.call_later(0.5, lab.store.online)
            await unload(edge, lora_name="sql")
            assert (await edge.complete(model="sql")).status == 404

            lab.store.offline()
            begun = loop.time()
            assert told(await load(edge, lora_name="sql", lora_path="/sql")) == [("w0", ("sql",), None)]
            assert loop.time() - begun < 5
            lab.store.online()

    run_virtual(scenario)


def test_one_worker_that_refuses_keeps_no_other_from_it() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await edge_with(lab, WithAdapters("old"), Stubborn("old"))
            changes = await load(edge, lora_name="sql", lora_path="/sql")
            assert told(changes) == [("w0", ("old", "sql"), None), ("w1", (), "out of memory")]
            for _ in range(3):
                assert (await edge.complete(model="sql")).status == 200
            gone = await unload(edge, lora_name="old")
            assert told(gone) == [("w0", ("sql",), None), ("w1", (), "not now")]
            with pytest.raises(EngineFailed, match="not now"):
                await unload(edge, lora_name="old")

    run_virtual(scenario)


def test_an_adapter_is_unloaded_at_one_model_or_everywhere() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("sql", model=name) for name in ("a", "b", "c")]
            edge = await edge_with(lab, *engines)
            assert [each.model for each in await unload(edge, lora_name="sql", model="b")] == ["b"]
            assert [each.model for each in await unload(edge, lora_name="sql")] == ["a", "c"]

    run_virtual(scenario)


GOOD = {"lora_name": "sql", "lora_path": "/sql", "model": MODEL}


@pytest.mark.parametrize(
    ("body", "kind", "param", "words"),
    [
        (b"", InvalidRequest, None, ""),
        (b"[]", InvalidRequest, None, ""),
        ({"lora_name": "sql"}, InvalidRequest, None, "lora_path"),
        ({"lora_path": "/sql"}, InvalidRequest, None, "lora_name"),
        ({**GOOD, "lora_name": ""}, InvalidRequest, None, "lora_name"),
        ({**GOOD, "lora_path": 7}, InvalidRequest, None, "lora_path"),
        ({**GOOD, "model": "nobody"}, NotFound, "model", "'nobody' does not exist"),
        ({**GOOD, "model": "known"}, InvalidRequest, "model", f"is an adapter of '{MODEL}'"),
        ({**GOOD, "model": None}, InvalidRequest, "model", "model is required"),
        ({**GOOD, "lora_name": MODEL}, InvalidRequest, "lora_name", "belongs to a model"),
        ({**GOOD, "lora_name": "others"}, InvalidRequest, "lora_name", "belongs to an adapter of 'other'"),
        ({**GOOD, "lora_path": BROKEN}, InvalidRequest, "lora_path", "/broken is no adapter"),
    ],
    ids=str,
)
def test_what_cannot_be_loaded_is_refused(
    body: Any, kind: type[KvoltError], param: str | None, words: str
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("known"), WithAdapters("others", model="other")]
            edge = await edge_with(lab, *engines)
            with pytest.raises(kind) as caught:
                raw = body if isinstance(body, bytes) else json.dumps(body).encode()
                await load_adapter(edge.runtime, edge.models, raw)
            assert words in caught.value.message
            assert param is None or caught.value.fields["param"] == param
            assert [list(engine.adapters) for engine in engines] == [["known"], ["others"]]

    run_virtual(scenario)


def test_what_is_not_there_cannot_be_unloaded() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await edge_with(lab, WithAdapters("sql"), ScriptedEngine("plain"))
            with pytest.raises(NotFound, match=r"adapter 'nobody' is not loaded \(loaded: sql\)"):
                await unload(edge, lora_name="nobody")
            with pytest.raises(NotFound, match="does not exist"):
                await unload(edge, lora_name="sql", model="nobody")
            with pytest.raises(InvalidRequest):
                await unload(edge)
            assert told(await unload(edge, lora_name="sql")) == [("w0", (), None)]
            with pytest.raises(NotFound, match="loaded: none"):
                await unload(edge, lora_name="sql")

    run_virtual(scenario)


def test_engines_without_adapters_and_models_without_workers_say_so() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", ScriptedEngine())
            edge = await lab.frontend()
            with pytest.raises(Unavailable, match="no model is ready yet"):
                await load(edge, lora_name="sql", lora_path="/sql")
            await edge.ready()
            with pytest.raises(Unsupported, match="does not support LoRA adapters"):
                await load(edge, lora_name="sql", lora_path="/sql")
            await running.runtime.close()
            await until(lambda: not edge.models.all()[0].client.instances())
            with pytest.raises(Unavailable, match="has no workers"):
                await load(edge, lora_name="sql", lora_path="/sql", model=MODEL)

    run_virtual(scenario)
