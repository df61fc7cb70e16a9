"""Engines that move KV by themselves: a worker passes the ticket on, and says when nobody will come for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import (
    ARGUMENTS,
    MODEL,
    Lab,
    RunningWorker,
    is_empty,
    make_request,
    start_stream,
    until,
)

from kvolt.core.card import EngineInfo
from kvolt.core.delta import Delta, FinishReason, StageTimes, StepOutput
from kvolt.core.endpoints import was_withdrawn
from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError, Unsupported
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Handoff, Rendezvous, Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimEngine
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.journey.prefill import withdraw_request
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.testing import run_virtual
from kvolt.worker.kv.handoffs import EngineHandoffs, Handoffs
from kvolt.worker.preparation import new_handoffs
from kvolt.worker.worker import stats_of

INSTANCE = InstanceId("w0")
HOLD_S = 5.0
MEETING = Rendezvous(mailbox=1, address="there")


class Engine:
    """Prefill, and nothing else."""

    def __init__(self, hold_s: float | None = HOLD_S) -> None:
        self.hold_s = hold_s
        self.released: list[RequestId] = []
        self.error: Exception | None = None
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def prefill(self, request: Request) -> Handoff:
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return Handoff(
            ticket=b"own", prefill_instance=InstanceId(""), expires_in_s=self.hold_s, first_tokens=(9,)
        )

    async def release_prefill(self, request_id: RequestId) -> None:
        self.released.append(request_id)


def test_a_ticket_is_passed_on_as_it_is() -> None:
    async def scenario() -> None:
        own = EngineHandoffs(Engine())
        handoff = await own.serve_prefill(make_request("r"), INSTANCE)
        assert (handoff.ticket, handoff.prefill_instance, handoff.first_tokens) == (b"own", INSTANCE, (9,))
        assert handoff.expires_in_s == HOLD_S
        assert own.stats.num_sent == 1
        await own.pull(handoff, keep_for=RequestId("r"))
        assert own.stats.num_received == 1
        own.release_kept(RequestId("r"))
        await own.close()

    run_virtual(scenario)


def test_blocks_that_are_not_pulled_are_released_by_the_engine() -> None:
    """Who waits to fetch it may have asked the engine for more time."""

    async def scenario() -> None:
        engine = Engine()
        own = EngineHandoffs(engine)
        await own.serve_prefill(make_request("r"), INSTANCE)
        await asyncio.sleep(HOLD_S + 0.1)
        assert engine.released == []
        assert not own.drop(RequestId("r")), "it is not there any more"
        await own.close()

    run_virtual(scenario)


def test_unused_blocks_are_released_at_once() -> None:
    async def scenario() -> None:
        engine = Engine()
        own = EngineHandoffs(engine)
        await own.serve_prefill(make_request("r"), INSTANCE)
        assert own.drop(RequestId("r"))
        assert not own.drop(RequestId("r"))
        assert not own.drop(RequestId("nobody"))
        await asyncio.sleep(0)
        assert engine.released == ["r"]
        await asyncio.sleep(2 * HOLD_S)
        assert engine.released == ["r"]
        await own.close()

    run_virtual(scenario)


def test_an_id_that_is_used_again_has_its_own_time() -> None:
    async def scenario() -> None:
        engine = Engine()
        own = EngineHandoffs(engine)
        await own.serve_prefill(make_request("r"), INSTANCE)
        await asyncio.sleep(HOLD_S - 1)
        assert own.drop(RequestId("r"))
        await asyncio.sleep(0.5)
        assert engine.released == ["r"]
        await own.serve_prefill(make_request("r"), INSTANCE)
        await asyncio.sleep(1)
        assert own.drop(RequestId("r")), "the second was forgotten in the first one's time"
        await own.close()

    run_virtual(scenario)


def test_a_ticket_without_a_time_is_kept() -> None:
    async def scenario() -> None:
        engine = Engine(hold_s=None)
        own = EngineHandoffs(engine)
        await own.serve_prefill(make_request("r"), INSTANCE)
        await asyncio.sleep(1)
        assert engine.released == []
        assert own.drop(RequestId("r"))
        await own.close()

    run_virtual(scenario)


def test_a_prompt_that_cannot_be_computed_leaves_nothing() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.error = InvalidRequest("too long")
        own = EngineHandoffs(engine)
        with pytest.raises(InvalidRequest):
            await own.serve_prefill(make_request("r"), INSTANCE)
        assert own.stats.num_sent == 0
        assert not own.drop(RequestId("r"))
        await own.close()

    run_virtual(scenario)


def test_a_cancelled_prompt_leaves_nothing() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.may_end.clear()
        own = EngineHandoffs(engine)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await own.serve_prefill(make_request("r"), INSTANCE)
        assert not own.drop(RequestId("r"))
        await own.close()

    run_virtual(scenario)


def test_close_waits_for_nothing() -> None:
    async def scenario() -> None:
        engine = Engine()
        own = EngineHandoffs(engine)
        await own.serve_prefill(make_request("r"), INSTANCE)
        async with asyncio.timeout(0.1):
            await own.close()
        assert engine.released == [], "the engine is closed next, and all is let go"

    run_virtual(scenario)


def test_decode_first_is_not_for_them() -> None:
    async def scenario() -> None:
        own = EngineHandoffs(Engine())
        for call in (
            own.serve_rendezvous(make_request(), MEETING, INSTANCE),
            own.pull_rendezvous(make_request(), MEETING),
        ):
            with pytest.raises(Unsupported) as caught:
                await call
            assert caught.value.fields["feature"] == "decode-first"
        await own.close()

    run_virtual(scenario)


# --- which of the two a worker has


class OwnMoves(SimEngine):
    """Says that nobody reaches its blocks."""

    async def start(self) -> EngineInfo:
        return replace(await super().start(), features=("KvEvents", "Prefill"))


def engine_of(role: Role, kind: type[SimEngine] = OwnMoves, **arguments: Any) -> SimEngine:
    return kind(EngineSpec(model=MODEL, role=role), replace(ARGUMENTS, **arguments))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_an_engine_without_memory_for_others_has_its_own_way(role: Role) -> None:
    async def scenario() -> None:
        engine = engine_of(role)
        info = await engine.start()
        assert isinstance(new_handoffs(engine, info, None, lambda: 0.0), EngineHandoffs)
        whole = replace(info, role=Role.AGGREGATED)
        assert new_handoffs(engine, whole, None, lambda: 0.0) is None
        await engine.close()

    run_virtual(scenario)


# --- workers


PROMPT, TOKENS = 3 * ARGUMENTS.block_size + 5, 9


def asked(name: str = "r") -> Request:
    return make_request(name, prompt=PROMPT, tokens=TOKENS)


EXPECTED = list(answer_tokens(asked().token_ids, 1, TOKENS, word_token_ids()))


async def start(lab: Lab, role: Role, **arguments: Any) -> tuple[RunningWorker, EndpointClient]:
    running = await lab.worker(role.value, engine_of(role, **arguments))
    return running, await lab.client(running, f"caller of {role.value}")


async def read(client: EndpointClient, request: Request) -> list[Delta]:
    async with await start_stream(client, request) as stream:
        return [delta async for delta in stream]


async def prefill(client: EndpointClient, request: Request) -> Handoff:
    [delta] = await read(client, replace(request, prefill_only=True))
    assert delta.handoff is not None
    assert delta == Delta(handoff=delta.handoff, cached_tokens=delta.handoff.cached_tokens)
    return delta.handoff


def whole(handoff: Handoff, deltas: Sequence[Delta]) -> list[int]:
    assert deltas[-1].finish is FinishReason.LENGTH
    return [*(handoff.first_tokens or ()), *(token for delta in deltas for token in delta.token_ids)]


def test_a_prompt_goes_from_one_worker_to_another() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            one, to_prefill = await start(lab, Role.PREFILL)
            other, to_decode = await start(lab, Role.DECODE)
            handoff = await prefill(to_prefill, asked())
            assert handoff.prefill_instance == one.worker._instance
            assert handoff.first_tokens == tuple(EXPECTED[:1])
            deltas = await read(to_decode, replace(asked(), handoff=handoff))
            assert whole(handoff, deltas) == EXPECTED
            usage = deltas[-1].usage
            assert usage is not None
            assert usage.completion_tokens == TOKENS
            given, taken = stats_of([one.worker, other.worker])
            assert (given.num_sent, taken.num_received) == (1, 1)
            assert isinstance(one.worker.handoffs, EngineHandoffs)
            assert not lab.errors

    run_virtual(scenario)


def test_a_transfer_that_the_engine_reports_reaches_the_caller_and_the_counters() -> None:
    stages = StageTimes(transfer_ms=250.0, transfer_bytes=4096, transfer_path="own")

    class Reporting(OwnMoves):
        async def steps(self) -> AsyncIterator[StepOutput]:
            async for step in super().steps():
                deltas = tuple(
                    (name, delta if delta.cached_tokens is None else replace(delta, stages=stages))
                    for name, delta in step.deltas
                )
                yield replace(step, deltas=deltas)

    async def scenario() -> None:
        async with Lab() as lab:
            _, to_prefill = await start(lab, Role.PREFILL)
            other = await lab.worker("decode", engine_of(Role.DECODE, Reporting))
            deltas = await read(
                await lab.client(other, "caller"),
                replace(asked(), handoff=await prefill(to_prefill, asked())),
            )
            assert [delta.stages for delta in deltas if delta.stages is not None] == [stages]
            [stats] = stats_of([other.worker])
            assert (stats.num_bytes, stats.pull_s) == (4096, 0.25)
            assert not lab.errors

    run_virtual(scenario)


def test_no_transfer_is_reported_where_the_engine_reports_none() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, to_prefill = await start(lab, Role.PREFILL)
            _, to_decode = await start(lab, Role.DECODE)
            deltas = await read(to_decode, replace(asked(), handoff=await prefill(to_prefill, asked())))
            assert not any(delta.stages for delta in deltas)

    run_virtual(scenario)


def test_no_rendezvous_address_is_published() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, _ = await start(lab, Role.PREFILL)
            assert running.worker.info is not None
            assert running.worker.info.transfer_addresses == {}
            assert not isinstance(running.worker.handoffs, Handoffs)

    run_virtual(scenario)


def test_blocks_that_are_not_pulled_are_released() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Role.PREFILL, hold_s=2.0)
            await prefill(client, asked())
            assert not is_empty(running.engine)
            await until(lambda: is_empty(running.engine), timeout_s=4.0)
            assert (await prefill(client, asked())).first_tokens == tuple(EXPECTED[:1]), "the same id again"
            assert not lab.errors

    run_virtual(scenario)


def test_a_caller_that_goes_takes_the_prompt_with_it() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Role.PREFILL)
            stream = await start_stream(client, replace(asked(), prefill_only=True))
            await until(lambda: not is_empty(running.engine))
            await stream.aclose()
            await until(lambda: is_empty(running.engine), timeout_s=1.0)
            assert not running.worker._open
            assert not lab.errors

    run_virtual(scenario)


def test_unused_handoff_can_be_withdrawn() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running, client = await start(lab, Role.PREFILL)
            await prefill(client, asked())
            assert not is_empty(running.engine)
            [instance] = client.instances()
            assert await withdraw_request(client.plane, instance, RequestId("r"))
            assert not await withdraw_request(client.plane, instance, RequestId("r"))
            await until(lambda: is_empty(running.engine), timeout_s=1.0)

    run_virtual(scenario)


def test_decode_first_is_refused_by_name() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client = await start(lab, Role.DECODE)
            with pytest.raises(KvoltError) as caught:
                await read(client, replace(asked(), rendezvous=MEETING))
            assert isinstance(caught.value, Unsupported)
            assert not was_withdrawn(caught.value)

    run_virtual(scenario)


def test_an_engine_that_gives_up_on_a_prompt() -> None:
    class GivesUp(OwnMoves):
        async def prefill(self, request: Request) -> Handoff:
            raise EngineFailed("lost", engine="sim")

    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("prefill", engine_of(Role.PREFILL, GivesUp))
            client = await lab.client(running)
            with pytest.raises(EngineFailed, match="lost"):
                await prefill(client, asked())
            assert not running.worker._open
            assert is_empty(running.engine)

    run_virtual(scenario)
