"""The least-loaded router: fewest requests in flight, round-robin among equals, no leftovers."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, MODEL, Lab, RunningWorker, make_request, sim, until

from kvolt.core.card import EngineInfo
from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Handoff, Role, RoutingHints
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimEngine
from kvolt.journey.prefill import deadlines_for
from kvolt.router.balancing import LeastLoadedRouter, PowerOfTwoRouter, RandomRouter
from kvolt.router.port import RouterContext
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.runtime.config.leaves import leaves
from kvolt.runtime.config.settings import FrontendSettings
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.testing import run_virtual


async def three(lab: Lab) -> tuple[list[RunningWorker], EndpointClient, list[InstanceId]]:
    workers = [await lab.worker(f"w{number}") for number in range(3)]
    client = await lab.client(workers[0])
    await until(lambda: len(client.candidates()) == 3)
    return workers, client, [instance.id for instance in client.candidates()]


def test_the_one_with_the_fewest_gets_the_next() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client, ids = await three(lab)
            router = LeastLoadedRouter(client)
            first = [await router.route(make_request()) for _ in range(3)]
            assert sorted(decision.instance.id for decision in first) == ids
            more = [await router.route(make_request()) for _ in range(3)]
            assert router.num_in_flight == dict.fromkeys(router.num_in_flight, 2)
            router.release(more[1], None)
            again = await router.route(make_request())
            assert again.instance == more[1].instance
            for decision in (*first, more[0], again, more[2]):
                router.release(decision, None)
            assert router.num_in_flight == {}

    run_virtual(scenario)


def test_the_idle_take_turns() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client, ids = await three(lab)
            router = LeastLoadedRouter(client)
            turns = []
            for _ in range(6):
                decision = await router.route(make_request())
                turns.append(decision.instance.id)
                router.release(decision, None)
            assert sorted(turns[:3]) == ids
            assert turns[:3] == turns[3:]

    run_virtual(scenario)


def test_pins_and_those_that_failed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client, (first, second, third) = await three(lab)
            router = LeastLoadedRouter(client)
            pinned = replace(make_request(), routing=RoutingHints(pins={Role.AGGREGATED: first}))
            for _ in range(4):
                assert (await router.route(pinned)).instance.id == first
            assert router.num_in_flight == {first: 4}
            only = await router.route(make_request(), frozenset({second, third}))
            assert only.instance.id == first
            with pytest.raises(Unavailable) as caught:
                await router.route(make_request(), frozenset({first, second, third}))
            assert caught.value.fields["reason"] == "none_left"
            assert router.num_in_flight == {first: 5}

    run_virtual(scenario)


def test_a_deregistered_worker_is_not_chosen_and_leaves_no_count() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers, client, ids = await three(lab)
            router = LeastLoadedRouter(client)
            decisions = [await router.route(make_request()) for _ in range(3)]
            gone = workers[0].worker._instance
            await workers[0].runtime.close()
            await until(lambda: len(client.candidates()) == 2)
            more = [await router.route(make_request()) for _ in range(2)]
            assert sorted(decision.instance.id for decision in more) == sorted(set(ids) - {gone})
            for decision in (*decisions, *more):
                router.release(decision, None)
            assert router.num_in_flight == {}

    run_virtual(scenario)


def test_the_less_loaded_of_two_random_workers_is_chosen() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client, _ = await three(lab)
            router = PowerOfTwoRouter(client, random.Random(1))
            sent = [await router.route(make_request()) for _ in range(30)]
            numbers = router.num_in_flight
            assert sum(numbers.values()) == 30
            assert max(numbers.values()) - min(numbers.values()) <= 3, "by chance alone it would be more"
            for decision in sent:
                router.release(decision, None)
            assert router.num_in_flight == {}

    run_virtual(scenario)


def test_random_chooses_any_worker() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            _, client, ids = await three(lab)
            router = RandomRouter(client, random.Random(1))
            taken = [(await router.route(make_request())).instance.id for _ in range(30)]
            assert sorted(set(taken)) == ids
            assert taken[:6] != taken[6:12]

    run_virtual(scenario)


@pytest.mark.parametrize("new_router", [each for name, each in ROUTERS.items() if name != "direct"])
def test_no_instance_is_unavailable(new_router: NewRouter) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0")
            client = await lab.client(running)
            await running.runtime.close()
            await until(lambda: not client.instances())
            router = new_router(RouterContext(client, await lab.runtime("f1"), 16))
            with pytest.raises(Unavailable) as caught:
                await router.route(make_request())
            await router.close()
            assert caught.value.retryable
            assert caught.value.fields["reason"] == "no_instances"

    run_virtual(scenario)


@pytest.mark.parametrize(
    "name", ["latency", "round-robin", "least-loaded", "power-of-two", "random", "direct"]
)
def test_a_decision_has_the_predicted_time_of_its_prompt(name: str) -> None:
    """From which the deadline of the first token follows."""

    async def scenario() -> None:
        async with Lab() as lab:
            priced = replace(
                ARGUMENTS,
                max_num_seqs=8,
                max_batch_tokens=100,
                latency=LatencyModel(base_s=0.1, prefill_token_s=0.02, prefill_context_s=1e-4),
            )
            worker = await lab.worker("w0", sim(priced))
            client = await lab.client(worker)
            await until(lambda: len(client.candidates()) == 1)
            router = ROUTERS[name](RouterContext(client, await lab.runtime("f"), 16))
            pins = {Role.AGGREGATED: client.candidates()[0].id}
            request = replace(make_request(prompt=250), routing=RoutingHints(pins=pins))
            decision = await router.route(request)
            squares = 100 * 100 + 100 * 200 + 50 * 250
            assert decision.predicted_ms == pytest.approx(3 * 100.0 + 250 * 20.0 + 0.1 * squares)
            limits = deadlines_for(Deadlines(first_s=10.0), decision)
            assert limits.first_s == pytest.approx(3e-3 * decision.predicted_ms)
            router.release(decision, None)
            await router.close()

    run_virtual(scenario)


class Unpriced(SimEngine):
    async def start(self) -> EngineInfo:
        return replace(await super().start(), latency=None)


def test_a_worker_without_a_step_model_or_with_the_kv_of_its_prompt_has_no_predicted_time() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            handoff = Handoff(ticket=b"", prefill_instance=InstanceId("p"))
            unpriced = Unpriced(EngineSpec(model=MODEL, role=Role.AGGREGATED), ARGUMENTS)
            workers = [await lab.worker("w0", unpriced), await lab.worker("w1", sim())]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 2)
            router = LeastLoadedRouter(client)
            predicted = {}
            for instance in client.candidates():
                for request in (make_request(), replace(make_request(), handoff=handoff)):
                    pinned = RoutingHints(pins={Role.AGGREGATED: instance.id})
                    decision = await router.route(replace(request, routing=pinned))
                    has_kv = request.handoff is not None
                    predicted[instance.process, has_kv] = decision.predicted_ms is not None
            assert [key for key, is_predicted in predicted.items() if is_predicted] == [("w1", False)]

    run_virtual(scenario)


def test_the_setting_names_the_routers_there_are() -> None:
    assert set(leaves()["frontend.router"].choices) == set(ROUTERS)
    assert FrontendSettings().router == next(iter(ROUTERS))
