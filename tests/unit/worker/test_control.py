"""What an operator may ask of a worker: over the request plane, through its own admin port, through a frontend's."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.unit.engines.adapter_lab import BROKEN, WithAdapters
from tests.unit.engines.lab import (
    ARGUMENTS,
    LIMITS,
    NAMESPACE,
    Lab,
    RunningWorker,
    ScriptedEngine,
    make_request,
    sim,
    start_stream,
    until,
)

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.endpoints import CONTROL, EndpointAddress, InstanceState, was_withdrawn
from kvolt.core.errors import InvalidRequest, NotFound, Unavailable, Unsupported
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import HASHES_DTYPE, KvDigest, Stored, digest_of
from kvolt.core.kv_recovery import (
    KvContents,
    KvEventsSince,
    KvRecoveryResponse,
    KvReplay,
    KvSnapshot,
    KvSnapshotPart,
)
from kvolt.frontend.admin.worker_commands import clear_kv_blocks
from kvolt.journey.prefill import withdraw_request
from kvolt.runtime.admin import COMMANDS
from kvolt.runtime.endpoint.call import open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual
from kvolt.worker.control import ClearKv, CommandResult, ListFeatures, LoadLora, UnloadLora

decode = msgspec.msgpack.Decoder(CommandResult).decode


class Capable(ScriptedEngine):
    """With a cache of seven blocks and room for adapters."""

    def __init__(self, model: str = "sim-tiny") -> None:
        super().__init__(model)
        self.num_blocks = 7
        self.adapters: dict[str, str] = {}

    async def clear_kv(self) -> int:
        cleared, self.num_blocks = self.num_blocks, 0
        return cleared

    async def load_lora(self, name: str, path: str) -> None:
        self.adapters[name] = path

    async def unload_lora(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise NotFound(f"no adapter {name!r}", kind="lora", name=name)

    def loras(self) -> tuple[str, ...]:
        return tuple(self.adapters)


class Restrained(Capable):
    """Has the methods, but was set up without a cache that can be cleared."""

    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), features=("Lora",))


async def ask(caller: Runtime, running: RunningWorker, command: Any) -> CommandResult:
    endpoint = EndpointAddress(NAMESPACE, running.endpoint.component, CONTROL)
    address = running.runtime.plane.address
    assert address is not None
    to = Destination(address, str(endpoint))
    async with await open_stream(caller.plane, to, command, LIMITS, decode) as stream:
        return await anext(stream)  # type: ignore[no-any-return]


def test_commands_reach_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Capable())
            caller = await lab.runtime("caller")
            assert running.worker.info is not None
            assert running.worker.info.features == ("KvEvents", "Lora")
            features = ("KvEvents", "Lora")
            assert await ask(caller, running, ListFeatures()) == CommandResult(features)
            assert await ask(caller, running, ClearKv()) == CommandResult(features, cleared_blocks=7)
            assert await ask(caller, running, ClearKv()) == CommandResult(features, cleared_blocks=0)
            assert await ask(caller, running, LoadLora("a", "/adapters/a")) == CommandResult(features, ("a",))
            assert engine.adapters == {"a": "/adapters/a"}
            with pytest.raises(NotFound, match="no adapter 'b'"):
                await ask(caller, running, UnloadLora("b"))
            assert await ask(caller, running, UnloadLora("a")) == CommandResult(features)

    run_virtual(scenario)


def loras(client: EndpointClient) -> tuple[str, ...]:
    """As the one worker has registered them."""
    [instance] = client.instances()
    return msgspec.msgpack.decode(instance.info, type=EngineInfo).loras


def test_adapters_that_come_and_go_are_registered() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", WithAdapters("first"))
            client = await lab.client(running)
            caller = await lab.runtime("operator")
            assert loras(client) == ("first",)
            [before] = client.instances()

            await ask(caller, running, LoadLora("second", "/adapters/second"))
            await until(lambda: loras(client) == ("first", "second"))
            with pytest.raises(InvalidRequest):
                await ask(caller, running, LoadLora("third", BROKEN))
            await ask(caller, running, UnloadLora("first"))
            await until(lambda: loras(client) == ("second",))
            [after] = client.instances()
            assert msgspec.structs.replace(after, info=before.info) == before, "the same instance"
            assert running.worker.info is not None
            assert running.worker.info.loras == ("second",)

            await running.runtime.cordon()  # neither of the two undoes the other
            await ask(caller, running, UnloadLora("second"))
            await until(lambda: loras(client) == ())
            assert client.instances()[0].state is InstanceState.CORDONED
            await running.runtime.resume()
            await until(lambda: client.instances()[0].state is InstanceState.READY)
            assert loras(client) == ()

    run_virtual(scenario)


def test_adapters_are_registered_when_discovery_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", WithAdapters())
            client = await lab.client(running)
            caller = await lab.runtime("operator")
            lab.store.offline()
            assert (await ask(caller, running, LoadLora("late", "/late"))).loras == ("late",)
            assert loras(client) == ()
            lab.store.online()
            await until(lambda: loras(client) == ("late",))

    run_virtual(scenario)


def test_a_worker_refuses_an_adapter_that_it_does_not_have() -> None:
    """So that the request can be tried elsewhere."""

    async def scenario() -> None:
        async with Lab() as lab:
            for name, engine in (("w0", WithAdapters("sql")), ("w1", ScriptedEngine(model="plain"))):
                running = await lab.worker(name, engine)
                client = await lab.client(running, f"caller-{name}")
                assert running.worker.info is not None
                request = make_request(model=running.worker.info.model)
                wanted = msgspec.structs.replace(request, lora="poet")
                with pytest.raises(Unavailable, match="'poet' is not loaded on this worker") as caught:
                    async with await start_stream(client, wanted) as stream:
                        await anext(stream)
                assert caught.value.fields["reason"] == "no_adapter"
                assert engine.submitted == []

    run_virtual(scenario)


def test_a_cordoned_worker_still_takes_commands() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", Capable())
            caller = await lab.runtime("caller")
            await running.runtime.cordon()
            assert (await ask(caller, running, ClearKv())).cleared_blocks == 7

    run_virtual(scenario)


@pytest.mark.parametrize("engine", [ScriptedEngine, Restrained], ids=["without", "not now"])
def test_what_is_not_offered_is_unsupported(engine: type[ScriptedEngine]) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine())
            caller = await lab.runtime("caller")
            with pytest.raises(Unsupported):
                await ask(caller, running, ClearKv())
            with pytest.raises(Unsupported):
                await running.worker.operations.clear_kv_blocks()
            if engine is ScriptedEngine:
                with pytest.raises(Unsupported):
                    await ask(caller, running, LoadLora("a", "/a"))

    run_virtual(scenario)


def test_a_frontend_clears_all_workers_that_can() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            assert await clear_kv_blocks(edge.runtime, edge.models) == []
            for name, engine in (("w0", Capable()), ("w1", Capable()), ("w2", Capable("other"))):
                await lab.worker(name, engine)
            await edge.ready("other", "sim-tiny")
            done = await clear_kv_blocks(edge.runtime, edge.models)
            told = sorted((each.model, each.process, each.cleared_blocks, each.error) for each in done)
            assert told == [
                ("other", "w2", 7, None),
                ("sim-tiny", "w0", 7, None),
                ("sim-tiny", "w1", 7, None),
            ]
            lab.network.crash("w1", silent=False)
            results = {each.process: each for each in await clear_kv_blocks(edge.runtime, edge.models)}
            assert results["w0"].cleared_blocks == 0
            if "w1" in results:  # until discovery has noticed
                assert results["w1"].error

    run_virtual(scenario)


def test_a_frontend_whose_workers_cannot_says_so() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            edge = await lab.frontend()
            await lab.worker("w0", ScriptedEngine())
            await edge.ready()
            with pytest.raises(Unsupported):
                await clear_kv_blocks(edge.runtime, edge.models)
            with pytest.raises(Unsupported):
                await edge.runtime.command("clear_kv_blocks", b"")  # nobody was put in charge here
            for verb in ("sleep", "wake"):
                name = {"wake": "wake_up"}.get(verb, verb)
                with pytest.raises(Unsupported, match=f"admin port of a worker, or `kvolt worker {verb}`"):
                    await edge.runtime.command(name, b"")
            for name in COMMANDS.values():
                with pytest.raises(Unsupported, match="use the admin port of a "):
                    await edge.runtime.command(name, b"")

    run_virtual(scenario)


def test_a_request_that_has_not_begun_is_given_back_and_its_stream_ends_with_the_reason() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", sim(msgspec.structs.replace(ARGUMENTS, max_num_seqs=1)))
            client = await lab.client(running)
            instance, engine = client.candidates()[0], running.engine
            first = await start_stream(client, make_request("first", tokens=50))
            second = await start_stream(client, make_request("second"))
            await until(lambda: engine.load().waiting == 1)
            assert not await withdraw_request(client.plane, instance, RequestId("first")), (
                "it is being computed"
            )
            assert not await withdraw_request(client.plane, instance, RequestId("nobody's"))
            assert await withdraw_request(client.plane, instance, RequestId("second"))
            assert not await withdraw_request(client.plane, instance, RequestId("second"))
            with pytest.raises(Unavailable) as caught:
                await anext(second)
            assert was_withdrawn(caught.value)
            assert not was_withdrawn(Unavailable("draining", reason="draining"))
            assert not was_withdrawn(None)
            assert (list(running.worker._open), engine.load().waiting) == (["first"], 0)
            assert sum([len(delta.token_ids) async for delta in first]) == 50
            assert running.worker.metrics._outcomes["withdrawn"] == 1
            assert running.worker.metrics._prompt_tokens == 20, "the other prompt was never computed"

    run_virtual(scenario)


async def recall(caller: Runtime, running: RunningWorker, question: Any) -> list[KvRecoveryResponse]:
    endpoint = EndpointAddress(NAMESPACE, running.endpoint.component, CONTROL)
    address = running.runtime.plane.address
    assert address is not None
    read = msgspec.msgpack.Decoder(KvRecoveryResponse).decode
    async with await open_stream(
        caller.plane, Destination(address, str(endpoint)), question, LIMITS, read
    ) as stream:
        return [part async for part in stream]


def test_router_recovers_missed_events() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Capable())
            caller = await lab.runtime("caller")
            hashes = tuple(range(100_000))
            change = Stored.from_hashes(hashes)
            engine.put(StepOutput(kv_changes=(change,)))
            await asyncio.sleep(0.1)
            journal, instance = running.worker.journal, running.worker._instance
            assert journal is not None
            [replay] = await recall(caller, running, KvEventsSince(journal.epoch, 0))
            assert isinstance(replay, KvReplay)
            assert (replay.instance, replay.epoch, replay.next_id) == (instance, journal.epoch, 1)
            assert len(replay.batches) == 1
            await running.runtime.cordon()
            head, *parts = await recall(caller, running, KvContents())
            digests = (KvDigest(len(hashes), digest_of(hashes)),)
            assert head == KvSnapshot(instance, journal.epoch, 1, digests)
            packed = b"".join(part.hashes for part in parts if isinstance(part, KvSnapshotPart))
            assert sorted(np.frombuffer(packed, HASHES_DTYPE).tolist()) == list(hashes)
            running.worker.journal = None
            with pytest.raises(Unavailable, match="is starting"):
                await recall(caller, running, KvContents())

    run_virtual(scenario)


def test_engine_without_kv_events_refuses_recovery() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", ScriptedEngine())
            caller = await lab.runtime("caller")
            for question in (KvContents(), KvEventsSince(1, 0)):
                with pytest.raises(Unsupported, match="publishes no KV events"):
                    await recall(caller, running, question)

    run_virtual(scenario)
