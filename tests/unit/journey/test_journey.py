"""The journey: goes where the router says, carries what it found, and cancels all the way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import LIMITS, Lab, ScriptedEngine, is_empty, make_request, until

from kvolt.core.errors import NetworkFault, Overloaded
from kvolt.core.ids import InstanceId
from kvolt.core.kv_events import Tier
from kvolt.core.request import KvSource, Request
from kvolt.journey.journey import Journey
from kvolt.router.port import Decision, RoundRobinRouter
from kvolt.runtime.client import EndpointClient
from kvolt.testing import run_virtual


class Fixed:
    """A router that always says the same."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision

    async def route(self, request: Request) -> Decision:
        return self.decision


class Full:
    async def route(self, request: Request) -> Decision:
        raise Overloaded("too many wait", queue="router", limit=1)


def round_robin(client: EndpointClient) -> Journey:
    return Journey(RoundRobinRouter(client), client)


def test_deltas_come_and_leaving_cancels_up_to_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            journey = round_robin(await lab.client(running))
            async with await journey.begin(make_request("short", tokens=5), LIMITS) as deltas:
                assert sum([len(delta.token_ids) async for delta in deltas]) == 5
            async with await journey.begin(make_request("long", tokens=300), LIMITS) as deltas:
                await anext(deltas)
                assert not is_empty(running.engine)
            await until(lambda: is_empty(running.engine), 1.0)

    run_virtual(scenario)


def test_the_decision_is_obeyed_and_its_sources_travel_with_the_request() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [ScriptedEngine(), ScriptedEngine()]
            workers = [await lab.worker(f"w{i}", engine) for i, engine in enumerate(engines)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 2)
            chosen = client.instance(InstanceId(workers[1].worker._instance))
            source = KvSource(InstanceId("peer"), Tier.HOST, 4)
            request = make_request()
            for decision, sources in (
                (Decision(chosen, kv_sources=(source,)), (source,)),
                (Decision(chosen), ()),
            ):
                async with await Journey(Fixed(decision), client).begin(request, LIMITS):
                    await until(lambda: bool(engines[1].submitted))
                    got = engines[1].submitted.pop()
                    assert got.deadline_s is not None  # the worker's own addition
                    assert got == replace(request, kv_sources=sources, deadline_s=got.deadline_s)
                await until(lambda: bool(engines[1].aborted))
                engines[1].aborted.clear()
            assert engines[0].submitted == []

    run_virtual(scenario)


def test_a_refusal_of_the_router_is_the_answer() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            client = await lab.client(await lab.worker("w0"))
            with pytest.raises(Overloaded):
                await Journey(Full(), client).begin(make_request(), LIMITS)

    run_virtual(scenario)


def test_a_worker_that_crashes_ends_the_stream_with_an_error() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            journey = round_robin(await lab.client(await lab.worker("w0")))
            async with await journey.begin(make_request(tokens=300), LIMITS) as deltas:
                await anext(deltas)
                lab.network.crash("w0", silent=False)
                with pytest.raises(NetworkFault):
                    async for _ in deltas:
                        pass

    run_virtual(scenario)
