"""LoRA adapters as clients see them: names in the list, chosen by a request, gone when their workers are."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.unit.engines.adapter_lab import WithAdapters
from tests.unit.engines.lab import MODEL, Frontend, Lab, RunningWorker, sim, until

from kvolt.core.delta import StepOutput
from kvolt.core.errors import NotFound, Unavailable
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.load import WorkerLoad
from kvolt.testing import run_virtual

LOGGER = "kvolt.frontend.models"


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


async def change(running: RunningWorker, *names: str) -> None:
    """The worker has these from now on, and says so."""
    running.engine.adapters = dict.fromkeys(names, "/anywhere")
    await running.worker._register_loras()


async def listed(edge: Frontend) -> list[str]:
    return [each["id"] for each in (await edge.ask("/v1/models")).json["data"]]


async def until_listed(edge: Frontend, *names: str) -> None:
    await until(lambda: [model.name for model in edge.models.adapters()] == list(names))


# --- the list


def test_adapters_are_models_of_their_own_with_a_parent() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0", WithAdapters("sql", "poet"))
            await lab.worker("w1", WithAdapters("sql"))
            await lab.worker("w2", WithAdapters("chef", model="another"))
            await lab.worker("w3", sim(model="plain"))
            edge = await lab.frontend()
            await edge.ready("another", "plain", MODEL)
            await until_listed(edge, "chef", "poet", "sql")
            data = (await edge.ask("/v1/models")).json["data"]
            assert [(each["id"], each["root"], each["parent"]) for each in data] == [
                ("another", "another", None),
                ("plain", "plain", None),
                (MODEL, MODEL, None),
                ("chef", "another", "another"),
                ("poet", MODEL, MODEL),
                ("sql", MODEL, MODEL),
            ]
            assert {each["max_model_len"] for each in data} == {512}
            assert (await edge.ask("/v1/models/sql")).json == data[-1]
            for name, num_workers in (("sql", 2), ("poet", 1), (MODEL, 2)):
                ready = (await edge.ask(f"/v1/models/{name}/ready")).json
                assert (ready["model"], ready["ready"]) == (name, True)
                assert ready["namespaces"]["test"]["workers"] == {"aggregated": num_workers}
            health = (await edge.ask("/health")).json
            assert health["models"] == ["another", "plain", MODEL], "what serves, not what it is called"

    run_virtual(scenario)


def test_the_list_follows_what_workers_load_and_unload() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", WithAdapters())
            edge = await lab.frontend()
            await edge.ready()
            assert await listed(edge) == [MODEL]
            await change(running, "sql")
            await until_listed(edge, "sql")
            assert await listed(edge) == [MODEL, "sql"]
            await change(running, "poet")
            await until_listed(edge, "poet")
            await change(running)
            await until_listed(edge)
            assert await listed(edge) == [MODEL]

    run_virtual(scenario)


# --- a request


PROMPT = [70 + index for index in range(40)]


def test_a_request_chooses_an_adapter_by_its_name() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engine = WithAdapters("sql")
            await lab.worker("w0", engine)
            edge = await lab.frontend()
            await edge.ready()
            await until_listed(edge, "sql")
            salted: dict[str, Any] = {"cache_salt": "tenant", "prompt": PROMPT}
            for answer in (
                await edge.complete(model="sql", **salted),
                await edge.chat(model="sql", cache_salt="tenant"),
                await edge.complete(model="sql", stream=True, **salted),
            ):
                assert answer.status == 200
                asked = engine.submitted[-1]
                assert (asked.model, asked.lora) == (MODEL, "sql")
                hasher = SequenceHasher(16, request_seed("sql", "tenant"))
                hasher.extend(asked.token_ids)
                assert asked.sequence_hashes == tuple(hasher.sequence)
                told = answer.chunks[0] if "event-stream" in answer.headers["content-type"] else answer.json
                assert told["model"] == "sql", "the name that the client used"
            assert len(engine.submitted[0].sequence_hashes) == 2

            assert (await edge.complete(prompt=PROMPT)).json["model"] == MODEL
            assert engine.submitted[-1].lora is None
            assert engine.submitted[-1].sequence_hashes != engine.submitted[0].sequence_hashes
            tokens = (await edge.ask("/tokenize", {"model": "sql", "prompt": "the water"})).json["tokens"]
            assert tokens == (await edge.ask("/tokenize", {"prompt": "the water"})).json["tokens"]
            requests = edge.sample("kvolt_frontend_requests_total", model=MODEL)
            assert requests == 4, "adapters are counted as their model"

    run_virtual(scenario)


def test_a_request_goes_only_to_workers_that_have_its_adapter() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("sql"), WithAdapters("poet"), WithAdapters()]
            for number, engine in enumerate(engines):
                await lab.worker(f"w{number}", engine)
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: len(edge.models.get(MODEL).candidates()) == 3)
            for name in ("sql", "poet"):
                for _ in range(4):
                    assert (await edge.complete(model=name)).status == 200
            chosen = [[request.lora for request in engine.submitted] for engine in engines]
            assert chosen == [["sql"] * 4, ["poet"] * 4, []]

    run_virtual(scenario)


def test_busy_are_those_who_have_it() -> None:
    """That another worker is free is of no use to who wants an adapter that it lacks."""

    async def scenario() -> None:
        async with Lab() as lab:
            engine = WithAdapters("sql")
            await lab.worker("w0", engine)
            await lab.worker("w1", WithAdapters())
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: len(edge.models.get(MODEL).candidates()) == 2)
            await edge.ask("/busy_threshold", {"model": MODEL, "active_decode_blocks_threshold": 0.5})
            engine.put(StepOutput(load=WorkerLoad(running=1, kv_used_blocks=9, kv_total_blocks=10)))
            await asyncio.sleep(1)
            assert (await edge.complete(model="sql")).status == 429
            assert (await edge.complete()).status == 200

    run_virtual(scenario)


def test_who_has_just_unloaded_it_is_passed_over() -> None:
    """The engine has let go of it and the frontend has not heard yet."""

    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("sql"), WithAdapters("sql")]
            for number, engine in enumerate(engines):
                await lab.worker(f"w{number}", engine)
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: len(edge.models.get("sql").candidates()) == 2)
            del engines[0].adapters["sql"]
            for _ in range(4):
                assert (await edge.complete(model="sql")).status == 200
            assert [len(engine.submitted) for engine in engines] == [0, 4]
            del engines[1].adapters["sql"]
            loop = asyncio.get_running_loop()
            for stream in (False, True):
                begun = loop.time()
                answer = await edge.complete(model="sql", stream=stream)
                assert loop.time() - begun < 1
                assert answer.status == 503
                assert "'sql' is not loaded" in answer.json["error"]["message"]

    run_virtual(scenario)


# --- names


def test_a_models_name_and_its_aliases_come_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, LOGGER)

    async def scenario() -> None:
        async with Lab() as lab:
            names = ("nick", MODEL, "later", "free")
            engine = WithAdapters(*names, aliases=("nick",))
            running = await lab.worker("w0", engine)
            edge = await lab.frontend()
            await edge.ready()
            await until_listed(edge, "free", "later")
            assert edge.models.get("later").lora == "later"
            for name in ("nick", MODEL):
                assert edge.models.get(name) is edge.models.find(name)
                assert edge.models.get(name).lora is None
                await edge.complete(model=name)
                assert engine.submitted[-1].lora is None

            await lab.worker("w1", sim(model="later"))
            await edge.ready("later", MODEL)
            assert edge.models.get("later").card.name == "later"
            assert [model.name for model in edge.models.adapters()] == ["free"]
            assert await listed(edge) == ["later", MODEL, "nick", "free"]
            assert told() == ["later", "nick", MODEL]
            await lab.worker("w2", sim(model="other"))
            await edge.ready("later", "other", MODEL)
            await change(running, *names, "other")
            await asyncio.sleep(1)
            assert edge.models.get("other").lora is None
            assert told() == ["later", "nick", "other", MODEL], "each once"

    def told() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.name == LOGGER]
        assert all("hidden by a model of the same name" in message for message in messages)
        return sorted(message.split("'")[1] for message in messages)

    run_virtual(scenario)


def test_an_adapter_that_two_models_have_is_the_firsts() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            first = await lab.worker("w0", WithAdapters("sql", model="a"))
            await lab.worker("w1", WithAdapters("sql", model="b"))
            edge = await lab.frontend()
            await edge.ready("a", "b")
            await until_listed(edge, "sql")
            assert edge.models.get("sql").card.name == "a"
            await first.runtime.cordon()
            await until(lambda: edge.models.get("sql").card.name == "b")

    run_virtual(scenario)


def test_a_rollout_without_the_adapter_leaves_it_to_the_old_workers() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            old, new = WithAdapters("sql"), WithAdapters(chat_template="{{ messages }}")
            await lab.worker("w0", old)
            edge = await lab.frontend()
            await edge.ready()
            await lab.worker("w1", new)
            await until(lambda: len(edge.models.revisions(MODEL)) == 2)
            assert edge.models.revisions(MODEL)[0].card == new.card
            assert edge.models.revisions("nobody") == []
            await edge.complete(model="sql")
            await edge.complete()
            assert [len(engine.submitted) for engine in (old, new)] == [1, 1]

    run_virtual(scenario)


# --- gone


def test_an_adapter_whose_workers_are_gone_does_not_exist() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", WithAdapters("sql"))
            await lab.worker("w1", WithAdapters())
            edge = await lab.frontend()
            await edge.ready()
            await until_listed(edge, "sql")

            await running.runtime.cordon()
            await until_listed(edge)
            assert edge.models.find("sql").lora == "sql"
            with pytest.raises(Unavailable, match="no aggregated worker of model 'sql' is reachable"):
                edge.models.get("sql")
            assert (await edge.complete(model="sql")).status == 503
            ready = await edge.ask("/v1/models/sql/ready")
            assert (ready.status, ready.json["ready"]) == (503, False)

            await running.runtime.close()
            await until(lambda: len(edge.models.get(MODEL).client.instances()) == 1)
            for lookup in (edge.models.get, edge.models.find):
                with pytest.raises(NotFound):
                    lookup("sql")
            for answer in (await edge.complete(model="sql"), await edge.ask("/v1/models/sql")):
                assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
            assert await listed(edge) == [MODEL]
            assert (await edge.complete()).status == 200

    run_virtual(scenario)
