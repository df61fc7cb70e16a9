"""The round-robin router: each in turn, a pin obeyed, who has failed left out, an answer when there is nobody."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import Lab, make_request, until

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.port import RoundRobinRouter
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


def test_nobody_there_is_unavailable() -> None:
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
