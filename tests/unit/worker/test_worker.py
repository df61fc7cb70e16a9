"""The worker shell: streams in, steps out, and every way a stream can end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import (
    LIMITS,
    NAMESPACE,
    Lab,
    ScriptedEngine,
    is_empty,
    make_request,
    start_stream,
    until,
)

from kvolt.core.card import EngineInfo, ModelCard, card_hash
from kvolt.core.delta import Delta, FinishReason, StepOutput
from kvolt.core.endpoints import CARD, LOAD_TOPIC, EndpointAddress
from kvolt.core.errors import (
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from kvolt.core.ids import RequestId
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Grammar, GrammarKind, Sampling
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream, open_stream
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.tasks import Scope
from kvolt.testing import run_virtual
from kvolt.worker.worker import WorkerOptions


async def read(stream: ResponseStream) -> list[Delta]:
    async with stream:
        return [delta async for delta in stream]


async def refusal(client: Any, request: Any) -> KvoltError:
    with pytest.raises(KvoltError) as caught:
        await read(await start_stream(client, request))
    return caught.value


def test_a_request_is_answered_and_leaves_nothing() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            streams = [await start_stream(client, make_request(f"r{i}", seed=i, tokens=9)) for i in range(5)]
            for seed, stream in enumerate(streams):
                deltas = await read(stream)
                tokens = [token for delta in deltas for token in delta.token_ids]
                assert tokens == answer_tokens(make_request().token_ids, seed, 9, word_token_ids())
                assert [delta.finish for delta in deltas][-1] is FinishReason.LENGTH
            assert not running.worker._open
            assert is_empty(running.engine)
            details = (await running.runtime.status()).details["engine"]
            assert (details["model"], details["open"]) == ("sim-tiny", 0)

    run_virtual(scenario)


def test_several_choices_end_with_the_last_of_them() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client = await lab.client(running)
            stream = await start_stream(client, make_request(choices=2))
            await until(lambda: bool(engine.submitted))
            name = RequestId("r")
            end = FinishReason.STOP
            engine.put(StepOutput(((name, Delta((4,), 1, finish=end)),)))
            engine.put(StepOutput(((name, Delta((5,), 0)),)))
            engine.put(StepOutput(((name, Delta((6,), 0, finish=end)),)))
            assert [(delta.index, delta.token_ids) for delta in await read(stream)] == [
                (1, (4,)),
                (0, (5,)),
                (0, (6,)),
            ]

    run_virtual(scenario)


def test_a_cancel_aborts_in_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            stream = await start_stream(client, make_request(tokens=400))
            async with stream:
                await anext(stream)
                assert not is_empty(running.engine)
            await until(lambda: is_empty(running.engine), 1.0)
            assert not running.worker._open

    run_virtual(scenario)


def test_a_lost_caller_aborts_in_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            stream = await start_stream(client, make_request(tokens=400))
            await anext(stream)
            lab.network.crash("caller", silent=False)
            await until(lambda: is_empty(running.engine), 1.0)
            await stream.aclose()

    run_virtual(scenario)


def test_a_step_for_a_caller_that_left_goes_nowhere() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client = await lab.client(running)
            stays = await start_stream(client, make_request("stays"))
            goes = await start_stream(client, make_request("goes"))
            await until(lambda: len(engine.submitted) == 2)
            await goes.aclose()
            await until(lambda: engine.aborted == ["goes"])
            both = (RequestId("goes"), RequestId("stays"))
            engine.put(StepOutput(plain_ids=both, plain_tokens=(7, 8)))
            engine.put(
                StepOutput(tuple((name, Delta((9,), finish=FinishReason.LENGTH)) for name in both)),
            )
            deltas = await read(stays)
            assert [token for delta in deltas for token in delta.token_ids] == [8, 9]
            assert lab.errors == []

    run_virtual(scenario)


def test_the_deadline_ends_the_stream_and_the_work() -> None:
    """The worker counts for itself: here the caller would wait longer than it told."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            stream = await start_stream(client, make_request(tokens=400), Deadlines(total_s=1.0))
            loop = asyncio.get_running_loop()
            started = loop.time()
            call = stream.call
            assert call._timer is not None
            call._timer.cancel()
            with pytest.raises(DeadlineExceeded) as caught:
                await read(stream)
            assert caught.value.fields["stage"] == "total"
            assert loop.time() - started == pytest.approx(1.0, abs=0.01)
            await until(lambda: is_empty(running.engine), 0.5)
            assert not running.worker._open

    run_virtual(scenario)


def test_the_death_of_the_engine_ends_all_streams(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client = await lab.client(running)
            streams = [await start_stream(client, make_request(f"r{i}")) for i in range(3)]
            await until(lambda: len(engine.submitted) == 3)
            engine.put(RuntimeError("out of memory"))
            for stream in streams:
                with pytest.raises(EngineDied) as caught:
                    await read(stream)
                assert caught.value.fields["engine"] == "sim"
                assert "out of memory" not in caught.value.message
            with pytest.raises(EngineFailed):
                await running.task
            assert "engine" in running.runtime.health.not_ready()
            # Nobody would ever answer it.
            assert isinstance(await refusal(client, make_request("late")), Unavailable)
            assert len(engine.submitted) == 3

    with caplog.at_level(logging.CRITICAL):
        run_virtual(scenario)


def test_an_engine_that_knows_why_it_died_says_so(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            engine.put(EngineFailed("it was killed by SIGKILL; it wrote last:\n  ouch"))
            with pytest.raises(EngineDied) as caught:
                await running.task
            assert caught.value.message == "the engine died: it was killed by SIGKILL; it wrote last:"

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario)
    [record] = [record for record in caplog.records if "engine died" in record.message]
    assert "ouch" in record.message
    assert record.exc_info is None, "what was said is enough"


def test_a_closed_engine_ends_all_streams() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            stream = await start_stream(client, make_request(tokens=400))
            await anext(stream)
            await running.worker.close()
            with pytest.raises(EngineFailed):
                await read(stream)
            await running.task
            assert isinstance(await refusal(client, make_request("late")), Unavailable)

    run_virtual(scenario)


def test_what_can_never_run_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            wrong_model = await refusal(client, make_request(model="another"))
            assert isinstance(wrong_model, NotFound)
            assert wrong_model.fields["name"] == "another"
            too_long = await refusal(client, make_request(tokens=512))
            assert isinstance(too_long, InvalidRequest)
            grammar = Grammar(GrammarKind.REGEX, "a*")
            asked = msgspec.structs.replace(make_request(), grammar=grammar)
            assert isinstance(await refusal(client, asked), Unsupported)
            assert isinstance(await refusal(client, {"request_id": 7}), InvalidRequest)
            running.worker._engine.sampling_fields = frozenset(Sampling.__struct_fields__) - {"top_p"}
            asked = msgspec.structs.replace(make_request(), sampling=Sampling(top_p=0.5))
            assert (await refusal(client, asked)).fields["param"] == "top_p"
            assert not running.worker._open
            assert len(await read(await start_stream(client, make_request()))) > 0

    run_virtual(scenario)


def test_second_stream_with_the_same_id_is_refused() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            first = await start_stream(client, make_request(tokens=30))
            await anext(first)
            error = await refusal(client, make_request(tokens=30))
            assert isinstance(error, Unavailable), "another worker can take it"
            assert error.fields["reason"] == "id_in_use"
            rest = await read(first)
            assert sum(len(delta.token_ids) for delta in rest) == 29

    run_virtual(scenario)


def test_a_request_whose_connection_was_cut_can_be_resumed_at_the_same_worker() -> None:
    """Its old stream is still open there: no end of the connection has come."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client, other = await lab.client(running), await lab.client(running, "other")
            asked = make_request()
            old = await start_stream(client, asked)
            await until(lambda: len(engine.submitted) == 1)
            lab.network.cut("caller", "w0", silent=True)
            await asyncio.sleep(4.5)
            assert isinstance(await refusal(other, asked), Unavailable), "it is not the other's request"
            await until(lambda: bool(client.candidates()))
            resumed = await start_stream(client, asked)
            await until(lambda: len(engine.submitted) == 2)
            assert engine.aborted == [asked.request_id]
            await asyncio.sleep(10.0)  # the old connection is given up
            assert engine.aborted == [asked.request_id]
            engine.put(StepOutput(((asked.request_id, Delta((300,), finish=FinishReason.STOP)),)))
            assert [delta.token_ids for delta in await read(resumed)] == [(300,)]
            with pytest.raises(WorkerLost):
                await read(old)
            assert not running.worker._open

    run_virtual(scenario)


def test_a_resumed_request_gets_its_plain_tokens_on_the_new_stream() -> None:
    """Also where the engine names the batch by the same tuple as before."""

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client, asked = await lab.client(running), make_request(tokens=30)
            batch = (asked.request_id,)
            await start_stream(client, asked)
            await until(lambda: len(engine.submitted) == 1)
            engine.put(StepOutput(plain_ids=batch, plain_tokens=(300,)))
            lab.network.cut("caller", "w0", silent=True)
            await asyncio.sleep(4.5)
            await until(lambda: bool(client.candidates()))
            resumed = await start_stream(client, asked)
            await until(lambda: len(engine.submitted) == 2)
            engine.put(StepOutput(plain_ids=batch, plain_tokens=(301,)))
            engine.put(StepOutput(((asked.request_id, Delta((302,), finish=FinishReason.STOP)),)))
            assert [token for delta in await read(resumed) for token in delta.token_ids] == [301, 302]

    run_virtual(scenario)


def test_a_second_stream_with_the_same_id_never_reaches_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            client = await lab.client(running)
            async with await start_stream(client, make_request()):
                await until(lambda: bool(engine.submitted))
                assert isinstance(await refusal(client, make_request()), Unavailable)
                assert len(engine.submitted) == 1
                assert engine.aborted == []

    run_virtual(scenario)


def test_load_reports_are_rare_unless_membership_changes() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := ScriptedEngine())
            listener = await lab.runtime("listener")
            reports = listener.events.subscribe(LOAD_TOPIC)
            loads = [WorkerLoad(running=1, kv_used_blocks=step) for step in range(50)]
            loads[17] = WorkerLoad(running=2, kv_used_blocks=17)
            for load in loads:
                engine.put(StepOutput(load=load))
                await asyncio.sleep(1 / 64)
            await listener.events.close()
            got = [msgspec.msgpack.decode(event.payload, type=LoadReport) async for event in reports]
            used = [report.load.kv_used_blocks for report in got]
            # 100 ms are seven of these steps; two requests, and one again, are told at once.
            assert used == [0, 7, 14, 17, 18, 25, 32, 39, 46]
            assert {report.instance for report in got} == {running.worker._instance}

    run_virtual(scenario)


def test_the_card_is_served_by_its_hash() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            caller = await lab.runtime("caller")
            card = running.engine.card
            endpoint = EndpointAddress(NAMESPACE, running.endpoint.component, CARD)
            address = running.runtime.plane.address
            assert address is not None
            decode = msgspec.msgpack.Decoder(ModelCard).decode

            async def ask(wanted: str) -> Any:
                to = Destination(address, str(endpoint))
                stream = await open_stream(caller.plane, to, wanted, LIMITS, decode)
                return await read(stream)

            assert await ask(card_hash(card)) == [card]
            assert await ask("") == [card]
            with pytest.raises(NotFound):
                await ask("0" * 32)

    run_virtual(scenario)


def test_who_is_registered_can_compute() -> None:
    class Slow(ScriptedEngine):
        async def start(self) -> Any:
            await asyncio.sleep(5)
            return await super().start()

    async def scenario() -> None:
        async with Lab() as lab:
            watcher = await lab.runtime("watcher")
            prefix = f"instances/{NAMESPACE}/"
            early: list[list[str]] = []

            async def look() -> None:
                await asyncio.sleep(4.9)
                early.append(list(await watcher.discovery.get_prefix(prefix)))

            async with Scope("look") as scope:
                scope.start(look(), "look")
                await lab.worker("w0", Slow())
            assert early == [[]]
            keys = list(await watcher.discovery.get_prefix(prefix))
            assert sorted(key.split("/")[3] for key in keys) == ["card", "generate"]

    run_virtual(scenario)


def test_taints_of_the_operator_are_registered_with_the_engines_own() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            options = WorkerOptions(taints=("gpu=h100", "eu", "eu"))
            running = await lab.worker("w0", options=options)
            (instance,) = (await lab.client(running)).instances()
            assert msgspec.msgpack.decode(instance.info, type=EngineInfo).taints == ("gpu=h100", "eu")

    run_virtual(scenario)
