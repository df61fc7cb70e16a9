"""The round-robin router: rotation, pins, excluded workers, errors without candidates."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace
from tests.unit.engines.adapter_lab import WithAdapters
from tests.unit.engines.lab import Lab, make_request, until

from kvolt.core.endpoints import EndpointAddress
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.balancing import RoundRobinRouter
from kvolt.testing import run_virtual


def pinned(instance: str, role: Role = Role.AGGREGATED) -> Request:
    return replace(make_request(), routing=RoutingHints(pins={role: InstanceId(instance)}))


def test_each_in_turn_and_pins_obeyed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(3)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            router = RoundRobinRouter(client)
            turns = [(await router.route(make_request())).instance.id for _ in range(6)]
            assert len(set(turns[:3])) == 3
            assert turns[:3] == turns[3:]
            for instance in client.candidates():
                for _ in range(2):
                    assert (await router.route(pinned(instance.id))).instance == instance
            decision = await router.route(pinned(turns[0], Role.PREFILL))  # not our role
            assert decision.instance.id == turns[0]

    run_virtual(scenario)


def test_a_pin_that_cannot_be_obeyed_is_not_ignored() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 2)
            router = RoundRobinRouter(client)
            with pytest.raises(Unavailable) as caught:
                await router.route(pinned("nobody"))
            assert caught.value.fields["reason"] == "pin"
            cordoned = workers[0].worker._instance
            await workers[0].runtime.cordon()
            with pytest.raises(Unavailable):
                await router.route(pinned(cordoned))
            for _ in range(3):
                assert (await router.route(make_request())).instance.id != cordoned

    run_virtual(scenario)


def test_no_instance_is_unavailable() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            await running.runtime.close()
            await until(lambda: not client.instances())
            with pytest.raises(Unavailable) as caught:
                await RoundRobinRouter(client).route(make_request())
            assert caught.value.retryable

    run_virtual(scenario)


def test_those_that_have_failed_are_left_out() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(3)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            router = RoundRobinRouter(client)
            first, second, third = (instance.id for instance in client.candidates())
            left = [(await router.route(make_request(), frozenset({first}))).instance.id for _ in range(4)]
            assert set(left) == {second, third}
            assert left[:2] == left[2:]  # in turn, too
            only = await router.route(make_request(), frozenset({first, second}))
            assert only.instance.id == third
            with pytest.raises(Unavailable) as caught:
                await router.route(make_request(), frozenset({first, second, third}))
            assert caught.value.fields["reason"] == "none_left"
            gone = frozenset({InstanceId("gone long ago")})
            assert len({(await router.route(make_request(), gone)).instance.id for _ in range(3)}) == 3

    run_virtual(scenario)


def test_a_pinned_instance_that_has_failed_is_not_replaced() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{i}") for i in range(2)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 2)
            router = RoundRobinRouter(client)
            first, second = (instance.id for instance in client.candidates())
            with pytest.raises(Unavailable) as caught:
                await router.route(pinned(first), frozenset({InstanceId(first)}))
            assert caught.value.fields["reason"] == "pin"
            decision = await router.route(pinned(first), frozenset({InstanceId(second)}))
            assert decision.instance.id == first

    run_virtual(scenario)


def wanting(lora: str) -> Request:
    return replace(make_request(), lora=lora)


def test_a_request_with_an_adapter_goes_to_a_worker_with_it() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            engines = [WithAdapters("sql", "poet"), WithAdapters("sql"), WithAdapters()]
            workers = [await lab.worker(f"w{i}", engine) for i, engine in enumerate(engines)]
            ids = [running.worker._instance for running in workers]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            router = RoundRobinRouter(client)

            async def turns(request: Request, excluded: frozenset[InstanceId] = frozenset()) -> list[str]:
                return [(await router.route(request, excluded)).instance.id for _ in range(4)]

            found = await turns(wanting("sql"))
            assert set(found) == {ids[0], ids[1]}
            assert found[:2] == found[2:]  # in turn, too
            assert await turns(wanting("poet")) == [ids[0]] * 4
            assert await turns(wanting("sql"), frozenset({ids[1]})) == [ids[0]] * 4
            assert set(await turns(make_request())) == set(ids)
            pin = replace(pinned(ids[1]), lora="sql")
            assert await turns(pin) == [ids[1]] * 4

            for request, excluded, reason in (
                (wanting("nobody's"), frozenset(), "no_adapter"),
                (wanting("poet"), frozenset({ids[0]}), "none_left"),
                (replace(pinned(ids[2]), lora="sql"), frozenset(), "pin"),
            ):
                with pytest.raises(Unavailable) as caught:
                    await router.route(request, excluded)
                assert caught.value.fields["reason"] == reason
                assert repr(request.lora) in caught.value.message

            await workers[0].runtime.cordon()
            await until(lambda: len(client.candidates()) == 2)
            assert await turns(wanting("sql")) == [ids[1]] * 4
            with pytest.raises(Unavailable):
                await router.route(wanting("poet"))

    run_virtual(scenario)


def test_a_change_of_adapters_is_heard_of() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := WithAdapters())
            client = await lab.client(running)
            router = RoundRobinRouter(client)
            with pytest.raises(Unavailable):
                await router.route(wanting("sql"))
            await engine.load_lora("sql", "/sql")
            await running.worker._register_loras()
            await asyncio.sleep(1)
            assert (await router.route(wanting("sql"))).instance.id == running.worker._instance
            await engine.unload_lora("sql")
            await running.worker._register_loras()
            await asyncio.sleep(1)
            with pytest.raises(Unavailable):
                await router.route(wanting("sql"))

    run_virtual(scenario)


def test_undecodable_metadata_has_no_adapters() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            odd = await lab.runtime("odd")
            endpoint = EndpointAddress("test", "odd", "generate")
            await odd.serve_streams(endpoint, lambda stream: stream.end(), info={"loras": 7})
            client = await (await lab.runtime("caller")).client(endpoint)
            await until(lambda: bool(client.candidates()))
            router = RoundRobinRouter(client)
            assert (await router.route(make_request())).instance.process == "odd"
            with pytest.raises(Unavailable):
                await router.route(wanting("sql"))

    run_virtual(scenario)
