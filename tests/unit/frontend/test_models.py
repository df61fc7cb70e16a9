"""Which models a frontend serves: cards fetched and checked, rollouts, garbage in discovery."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, MODEL, NAMESPACE, Frontend, Lab, ScriptedEngine, sim, until

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.core.endpoints import CARD, GENERATE, EndpointAddress, Instance, component_name, encode_instance
from kvolt.core.errors import InvalidRequest, NotFound, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Role
from kvolt.engines.sim.engine import SimArguments
from kvolt.frontend.model import ModelOptions
from kvolt.frontend.models import Models
from kvolt.frontend.tokenization.preprocess import ParserNames
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def names(models: Models) -> list[str]:
    return [model.card.name for model in models.ready()]


async def register(runtime: Runtime, component: str, info: bytes, address: str = "nowhere:1") -> str:
    """An instance of whatever kind, under a lease of the runtime."""
    instance = Instance(
        id=InstanceId(f"x-{component}"),
        endpoint=EndpointAddress(NAMESPACE, component, GENERATE),
        address=address,
        info=msgspec.Raw(info),
    )
    lease = await runtime.discovery.lease(5.0)
    await runtime.discovery.put(instance.key, encode_instance(instance), lease)
    return instance.key


def test_a_model_is_ready_once_its_card_is_here() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await edge.models.wait_settled(5.0)
            with pytest.raises(Unavailable) as caught:
                edge.models.get(MODEL)
            assert caught.value.fields["reason"] == "starting", "a worker of it may be about to come"
            running = await lab.worker("w0")
            await edge.ready()
            with pytest.raises(NotFound) as unknown:
                edge.models.get("nobody")
            assert unknown.value.fields["param"] == "model"
            model = edge.models.get(MODEL)
            assert model.card == running.engine.card
            assert model.ready

    run_virtual(scenario)


def test_what_comes_with_a_model() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker(
                "w0", CardWith(aliases=("nick", MODEL), defaults={"temperature": 0.25, "top_k": 7})
            )
            options = ModelOptions(1 << 20, ParserNames("llama3_json", "deepseek_r1"), 2)
            edge = await lab.frontend(model_options=options)
            await edge.ready()
            model = edge.models.get(MODEL)
            assert edge.models.get("nick") is edge.models.find("nick") is edge.models.single_model() is model
            assert edge.models.all() == [model]
            assert (model.defaults.temperature, model.defaults.top_k) == (0.25, 7)
            assert model.processor.parsers == ParserNames("llama3_json", "deepseek_r1")
            assert model.journey_context.max_attempts == 2
            assert (model.capacity.max_num_seqs, model.capacity.kv_total_blocks) == (256, 16_384)
            assert model.max_sequence_tokens == model.card.context_length
            model.capacity = msgspec.structs.replace(model.capacity, kv_total_blocks=3)
            assert model.max_sequence_tokens == 3 * model.card.block_size + 1

    run_virtual(scenario)


def test_a_name_beats_an_alias_and_the_first_alias_the_second() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await lab.worker("w0", CardWith(aliases=("another", "nick")))
            await edge.ready()
            assert edge.models.get("another").card.name == MODEL
            await lab.worker("w1", sim(model="another"))
            await edge.ready("another", MODEL)
            assert edge.models.get("another").card.name == "another"
            assert edge.models.get("nick").card.name == MODEL
            with pytest.raises(InvalidRequest, match=f"model is required; known: another, {MODEL}"):
                edge.models.get(None)

    run_virtual(scenario)


def test_a_request_without_a_model_fails_like_one_that_names_it() -> None:
    """It may be repeated: the only model has no worker at the moment."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            edge = await lab.frontend()
            await edge.ready()
            await running.runtime.cordon()
            await until(lambda: not edge.models.ready())
            for name in (MODEL, None):
                with pytest.raises(Unavailable, match=MODEL):
                    edge.models.get(name)

    run_virtual(scenario)


def test_settling_waits_for_what_is_there_and_not_for_ever() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0")
            edge = await lab.frontend()
            await edge.models.wait_settled(5.0)
            assert names(edge.models) == [MODEL]
        async with Lab() as lab:
            await lab.worker("w0", LateCard())
            edge = await lab.frontend()
            loop = asyncio.get_running_loop()
            started = loop.time()
            await edge.models.wait_settled(2.0)
            assert loop.time() - started == pytest.approx(2.0)
            assert names(edge.models) == []

    run_virtual(scenario)


@pytest.mark.parametrize(
    "fields",
    [{"tool_parser": "nobody"}, {"reasoning_parser": "nobody"}, {"defaults": {"top_k": "many"}}],
    ids=str,
)
def test_a_card_with_unknown_names_is_not_served(fields: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await lab.worker("w0", CardWith(**fields))
            await asyncio.sleep(1)
            assert names(edge.models) == []
            await lab.worker("w1")
            await edge.ready()  # another card of the same model

    run_virtual(scenario)


class CardWith(ScriptedEngine):
    """Serves a card of its own."""

    def __init__(self, **fields: Any) -> None:
        super().__init__()
        self._fields = fields

    @property
    def card(self) -> ModelCard:
        return replace(self._inner.card, **self._fields)

    async def start(self) -> EngineInfo:
        return replace(await self._inner.start(), card=card_hash(self.card))


def test_models_are_listed_by_name() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            for index, model in enumerate(("zeta", "alpha", "Mid/8B")):
                await lab.worker(f"w{index}", sim(model=model))
            edge = await lab.frontend()
            await edge.ready("Mid/8B", "alpha", "zeta")
            assert edge.models.get("Mid/8B").card.name == "Mid/8B"

    run_virtual(scenario)


def test_without_workers_a_known_model_is_unavailable_and_comes_back() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            first = await lab.worker("w0")
            edge = await lab.frontend()
            await edge.ready()
            await first.runtime.close()
            await until(lambda: names(edge.models) == [])
            with pytest.raises(Unavailable):
                edge.models.get(MODEL)
            await lab.worker("w1")
            await edge.ready()

    run_virtual(scenario)


def test_a_rollout_with_another_card_replaces_the_old_one() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            old = await lab.worker("w0")
            edge = await lab.frontend()
            await edge.ready()
            assert edge.models.get(MODEL).card.block_size == 16
            new = await lab.worker("w1", sim(replace(ARGUMENTS, block_size=32)))
            await until(lambda: edge.models.get(MODEL).card.block_size == 32)
            assert names(edge.models) == [MODEL]  # once, though both are there
            await old.runtime.close()
            third = await lab.worker("w2", sim(replace(ARGUMENTS, block_size=64)))
            await until(lambda: edge.models.get(MODEL).card.block_size == 64)
            assert len(edge.models._models[MODEL]) == 2  # the first one is forgotten
            await third.runtime.close()
            await until(lambda: edge.models.get(MODEL).card.block_size == 32)  # rolled back
            await new.runtime.close()
            await until(lambda: names(edge.models) == [])
            await lab.worker("w3")  # the first card again, after it was forgotten
            await until(lambda: names(edge.models) == [MODEL])
            assert edge.models.get(MODEL).card.block_size == 16

    run_virtual(scenario)


class LateCard(ScriptedEngine):
    """Says that it has a card and gives another one until it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.given = replace(self._inner.card, chat_template="not the one announced")
        self.asked = 0

    @property
    def card(self) -> ModelCard:
        self.asked += 1
        return self.given


def test_a_card_that_is_not_the_one_announced_is_not_used() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engine = LateCard()
            await lab.worker("w0", engine)
            edge = await lab.frontend()
            await asyncio.sleep(30)
            assert names(edge.models) == []
            assert 4 < engine.asked < 30  # again and again, ever more slowly
            engine.given = engine._inner.card
            await edge.ready()
            assert edge.models.get(MODEL).card == engine._inner.card

    run_virtual(scenario)


def test_a_card_under_a_false_hash_is_not_used() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            liar = await lab.runtime("liar")
            info = await sim().start()
            component = component_name(info.model, info.role, info.card)
            cards = [None, replace(sim().card, chat_template="another"), sim().card]
            given: list[ModelCard | None] = []

            async def give(wanted: str) -> AsyncIterator[ModelCard]:
                assert wanted == info.card
                given.append(cards[min(len(given), 2)])
                if given[-1] is not None:
                    yield given[-1]

            await liar.serve(EndpointAddress(NAMESPACE, component, CARD), give, str)
            await liar.serve(EndpointAddress(NAMESPACE, component, GENERATE), give, str, info=info)
            edge = await lab.frontend()
            await edge.ready()
            assert given == cards  # nothing, the wrong one, and only then the right one
            assert edge.models.get(MODEL).card == sim().card

    run_virtual(scenario)


def test_a_worker_that_is_gone_before_its_card_came_is_forgotten() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            ghost = await lab.runtime("ghost")
            info = await sim().start()
            component = component_name(info.model, info.role, info.card)
            key = await register(ghost, component, msgspec.msgpack.encode(info), address="ghost:9")
            await until(lambda: bool(edge.models._loading))
            await asyncio.sleep(3)
            assert names(edge.models) == []
            await ghost.discovery.delete(key)
            await until(lambda: not edge.models._loading)
            assert edge.models._registered == {}
            await lab.worker("w0")  # the same component, alive
            await edge.ready()

    run_virtual(scenario)


def test_a_model_found_while_discovery_goes_away_is_not_lost() -> None:
    """The watch has told of the worker once and will not tell again; the card's client has not synced yet."""

    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await lab.worker("w0")
            while not edge.models._loading:
                await asyncio.sleep(0)
            lab.store.offline()
            await asyncio.sleep(10)
            assert names(edge.models) == []
            lab.store.online()
            await edge.ready()

    run_virtual(scenario)


GARBAGE: list[bytes] = [
    b"\xc0",
    b"\x01",
    msgspec.msgpack.encode({"engine": "x"}),
    msgspec.msgpack.encode("text"),
    b"\x81\xa6engine\xa2\xff\xfe",  # text that is no UTF-8
    b"\x81\xa1x" + b"\x91" * 5000 + b"\xc0",  # deep
    msgspec.msgpack.encode({"engine": "x", "role": "chef", "model": "m", "card": "1"}),
]


def test_garbage_in_discovery_is_skipped_and_the_watch_goes_on() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            vandal = await lab.runtime("vandal")
            lease = await vandal.discovery.lease(5.0)
            for number, value in enumerate((b"", b"\xff" * 10, b"\x91" * 5000, b"\xa2\xff\xfe")):
                key = f"instances/{NAMESPACE}/a/generate/{number}"
                await vandal.discovery.put(key, value, lease)
            for number, info in enumerate(GARBAGE):
                await register(vandal, f"garbage-{number}", info)
            await lab.worker("w0")
            await edge.ready()
            await vandal.close()  # its keys go too
            await lab.worker("w1", sim(model="another"))
            await edge.ready("another", MODEL)

    run_virtual(scenario)


async def _announced(lab: Lab, edge: Frontend, **changes: Any) -> None:
    running = await lab.runtime("odd")
    info: EngineInfo = replace(await sim().start(), **changes)
    component = component_name(info.model, info.role, info.card)
    await register(running, component, msgspec.msgpack.encode(info))
    await asyncio.sleep(1)


@pytest.mark.parametrize("changes", [{"hash_scheme": "sha256"}, {"role": Role.PREFILL}], ids=str)
def test_who_cannot_serve_alone_is_no_model(changes: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await _announced(lab, edge, **changes)
            assert not edge.models.all()
            with pytest.raises(Unavailable):
                edge.models.get(MODEL)

    run_virtual(scenario)


class BadTokenizer(ScriptedEngine):
    @property
    def card(self) -> ModelCard:
        return replace(self._inner.card, name="bad", tokenizer_json=b"{}")

    async def start(self) -> EngineInfo:
        return replace(await self._inner.start(), model="bad", card=card_hash(self.card))


def test_a_card_that_cannot_be_used_harms_no_other_model() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await lab.worker("w0", BadTokenizer())
            await asyncio.sleep(1)
            with pytest.raises(Unavailable):
                edge.models.get("bad")
            await lab.worker("w1")
            await edge.ready()
            with pytest.raises(NotFound):
                edge.models.get("bad")

    run_virtual(scenario)


def test_many_workers_of_one_component_are_one_model() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            for index in range(4):
                await lab.worker(f"w{index}", sim(SimArguments()))
            await edge.ready()
            await until(lambda: len(edge.models.get(MODEL).client.candidates()) == 4)
            assert len(edge.models._models[MODEL]) == 1

    run_virtual(scenario)


def test_a_model_whose_card_is_not_here_yet_is_starting() -> None:
    """Registered and not routable yet: a client is to ask again, whatever else is served."""

    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0")
            edge = await lab.frontend()
            await edge.ready()
            odd = await lab.runtime("odd")
            info: EngineInfo = replace(await sim().start(), model="late", loras=("sql",))
            await register(odd, "late", msgspec.msgpack.encode(info))
            await until(lambda: bool(edge.models._loading))
            for name in ("late", "sql"):
                answer = await edge.complete(model=name)
                assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                assert f"the model '{name}' is starting" in answer.json["error"]["message"]
            assert (await edge.complete(model="nobody")).status == 404

    run_virtual(scenario)


def test_before_discovery_was_read_no_model_is_said_not_to_exist() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            await lab.worker("w0")
            runtime = await lab.runtime("edge")
            models = Models(runtime, NAMESPACE)
            with pytest.raises(Unavailable):
                models.get("nobody")
            models.start()
            await models.wait_settled(5.0)
            assert [model.card.name for model in models.ready()] == [MODEL], "before the port opens"
            with pytest.raises(NotFound):
                models.get("nobody")
            await models.close()

    run_virtual(scenario)


def test_a_model_whose_workers_are_all_asleep_says_so() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            sleeping, other = await lab.worker("w0"), await lab.worker("w1")
            edge = await lab.frontend()
            await edge.ready()
            await sleeping.worker.operations.sleep(b"")
            await other.runtime.cordon()
            await until(lambda: not edge.models.ready())
            with pytest.raises(Unavailable, match="is reachable; try again later"):
                edge.models.get(MODEL)
            await other.worker.operations.sleep(b"")
            await asyncio.sleep(1.0)
            answer = await edge.complete()
            assert answer.status == 503
            assert "is asleep; wake with `kvolt worker wake NAME`" in answer.json["error"]["message"]
            await other.worker.operations.wake_up(b"")
            await edge.ready()
            assert (await edge.complete()).status == 200

    run_virtual(scenario)
