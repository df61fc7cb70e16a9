"""Routers that share workers: reservations reach the others within a period, whatever is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import ARGUMENTS, Lab, RunningWorker, make_request, until

from kvolt.core.endpoints import ROUTER_LOAD_TOPIC
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.gossip.loads import LoadVector
from kvolt.router.policy.policy import classic
from kvolt.router.port import Decision, RouterContext
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.events.mem import MemBus
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual

PERIOD_S = 0.1
SLACK_S = 0.02
"""The way of an event and the turn of a loop."""


class LossyBus(MemBus):
    """Loses this share of the gossip on each link; workers are heard well."""

    def __init__(self, share: float, seed: int = 1) -> None:
        self.share = share
        self.cut: set[str] = set()
        """Publishers of whom nothing is heard any more."""
        self._rng = random.Random(seed)
        super().__init__(self._delay)

    def _delay(self, publisher: str, subscriber: str) -> float | None:
        if publisher in self.cut or self._rng.random() < self.share:
            return None
        return 0.001


class Replica:
    """One router with a few requests under way; nothing is sent to the workers, so their reports say nothing."""

    def __init__(self, name: str, runtime: Runtime, router: EventFedRouter) -> None:
        self.name = name
        self.runtime = runtime
        self.router = router
        self.decisions: list[Decision] = []

    async def book(self, number: int = 1) -> None:
        for index in range(number):
            self.decisions.append(await self.router.route(prompt(f"{self.name}-{index}")))

    def free(self, number: int) -> None:
        for _ in range(number):
            self.router.release(self.decisions.pop(), None)

    def requests(self) -> dict[InstanceId, float]:
        return {load.instance: load.requests for load in self.router.worker_loads()}


def prompt(name: str) -> Request:
    return msgspec.structs.replace(
        make_request(prompt=100), request_id=RequestId(name), block_size=ARGUMENTS.block_size
    )


def truth(replicas: list[Replica]) -> dict[InstanceId, float]:
    ids = replicas[0].requests()
    counts = dict.fromkeys(ids, 0.0)
    for replica in replicas:
        for decision in replica.decisions:
            counts[decision.instance.id] += 1
    return counts


async def start_replica(lab: Lab, name: str, workers: list[RunningWorker]) -> Replica:
    runtime = await lab.runtime(name)
    client = await runtime.client(workers[0].endpoint)
    await until(lambda: len(client.candidates()) == len(workers))
    context = RouterContext(client, runtime, ARGUMENTS.block_size)
    replica = Replica(name, runtime, EventFedRouter(context, classic()))
    lab._closing.append(replica.router.close)
    return replica


def scene(
    body: Callable[[Lab, list[RunningWorker], list[Replica]], Awaitable[Any]],
    num_replicas: int = 2,
    bus: MemBus | None = None,
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            if bus is not None:
                lab.bus = bus
            workers = [await lab.worker(f"w{number}") for number in range(3)]
            replicas = [await start_replica(lab, f"r{number}", workers) for number in range(num_replicas)]
            await asyncio.sleep(3.0)  # until they have met
            await body(lab, workers, replicas)

    run_virtual(scenario)


def test_reservations_reach_replicas_within_a_period() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        await replicas[0].book(5)
        await replicas[1].book(2)
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert all(replica.requests() == truth(replicas) for replica in replicas)
        assert sum(truth(replicas).values()) == 7
        one, other = (
            [(load.prefill_tokens, load.blocks) for load in each.router.worker_loads()] for each in replicas
        )
        assert one == other
        assert sum(tokens for tokens, _ in one) == 700

        for replica in replicas:
            replica.free(1)
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert all(replica.requests() == truth(replicas) for replica in replicas)
        for replica in replicas:
            replica.free(len(replica.decisions))
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert all(not any(replica.requests().values()) for replica in replicas)

    scene(body)


def test_where_one_has_sent_the_others_do_not() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        for replica in [*replicas, *replicas]:
            await replica.book()
            await asyncio.sleep(PERIOD_S + SLACK_S)
        assert set(truth(replicas).values()) == {2.0}

    scene(body, num_replicas=3)


@pytest.mark.parametrize("num_there", [1, 2])
def test_one_that_joins_knows_all_after_a_period(num_there: int) -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        await replicas[0].book(4)
        await asyncio.sleep(5.0)  # nothing has changed for long
        late = await start_replica(lab, "late", workers)
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert late.requests() == truth([*replicas, late])

    scene(body, num_replicas=num_there)


def test_loss_heals_by_itself() -> None:
    bus = LossyBus(0.0)

    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        rng = random.Random(3)
        agreed = 0
        bus.share = 0.3
        for _ in range(100):
            replica = rng.choice(replicas)
            if rng.random() < 0.5:
                await replica.book()
            elif replica.decisions:
                replica.free(1)
            await asyncio.sleep(PERIOD_S)
            agreed += all(each.requests() == truth(replicas) for each in replicas)
        assert 30 < agreed < 100, "some of it was lost, and did not matter for long"
        await asyncio.sleep(5 * PERIOD_S)  # three losses in a row on one of six links are one in six by now
        bus.share = 0.0
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert all(each.requests() == truth(replicas) for each in replicas)

    scene(body, num_replicas=3, bus=bus)


def test_a_lost_final_vector_is_repaired() -> None:
    bus = LossyBus(0.0)

    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        await replicas[0].book(3)
        await asyncio.sleep(PERIOD_S + SLACK_S)
        replicas[0].free(3)
        bus.share = 1.0
        await asyncio.sleep(PERIOD_S)  # the word that all is over is lost
        bus.share = 0.0
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert not any(replicas[1].requests().values())

    scene(body, bus=bus)


def test_what_a_dead_router_had_counts_for_a_second_more_and_of_one_that_stops_no_longer() -> None:
    bus = LossyBus(0.0)

    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        watcher, dying, leaving = replicas
        await dying.book(3)
        await leaving.book(3)
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert sum(watcher.requests().values()) == 6
        await leaving.router.close()
        await asyncio.sleep(SLACK_S)
        assert sum(watcher.requests().values()) == 3
        bus.cut.add(dying.runtime.events.publisher)
        await asyncio.sleep(0.8)
        assert sum(watcher.requests().values()) == 3, "it may only be slow"
        await asyncio.sleep(0.4)
        assert not any(watcher.requests().values())
        assert watcher.router.gossip.replicas.num_replicas == 0

    scene(body, num_replicas=3, bus=bus)


def test_a_new_worker_gets_load_published_before() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        early, other = replicas
        joined = await lab.worker("w3")
        await until(lambda: len(early.requests()) == 4)
        other.router.set_replica_load = lambda seen_decisions: None  # type: ignore[method-assign]
        # As if one router learned of it before the other.
        seen_decisions = [decision async for decision in _booked_at(early, joined)]
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert len(seen_decisions) == 2
        del other.router.set_replica_load
        other.router._client._notify_changed()
        await asyncio.sleep(PERIOD_S + SLACK_S)
        assert other.requests()[joined.worker._instance] == 2

    scene(body)


async def _booked_at(replica: Replica, worker: RunningWorker) -> Any:
    everyone = replica.requests()
    others = frozenset(each for each in everyone if each != worker.worker._instance)
    for number in range(2):
        yield await replica.router.route(prompt(str(number)), others)


def test_what_cannot_be_read_or_is_of_another_endpoint_is_passed_over() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        stranger = await lab.runtime("stranger")
        foreign = LoadVector("other.model.generate", "stranger", 1, 1, 60.0)
        for payload in (b"\xc1", msgspec.msgpack.encode({"endpoint": str(workers[0].endpoint)})):
            stranger.events.publish(ROUTER_LOAD_TOPIC, payload)
        stranger.events.publish(ROUTER_LOAD_TOPIC, msgspec.msgpack.encode(foreign))
        await asyncio.sleep(SLACK_S)
        for replica in replicas:
            assert replica.router.gossip.replicas.num_replicas == 1

    scene(body)


def test_a_single_router_sleeps_and_a_new_replica_wakes_it() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        (alone,) = replicas
        looked: list[float] = []
        own_loads = alone.router.own_loads
        loop = asyncio.get_running_loop()

        def look() -> Any:
            looked.append(loop.time())
            return own_loads()

        alone.router.own_loads = look  # type: ignore[method-assign]
        await alone.book(3)
        await asyncio.sleep(20.0)
        assert len(looked) <= 21
        late = await start_replica(lab, "late", workers)
        await asyncio.sleep(SLACK_S)
        assert late.requests() == truth([alone, late]), "it did not even take a period"

    scene(body, num_replicas=1)


def test_gossip_can_be_left_out() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        runtime = await lab.runtime("silent")
        client = await runtime.client(workers[0].endpoint)
        settings = RouterSettings(gossip=False)
        context = RouterContext(client, runtime, ARGUMENTS.block_size, settings)
        silent = Replica("silent", runtime, EventFedRouter(context, classic()))
        await until(lambda: len(silent.requests()) == 3)
        await replicas[0].book(2)
        await silent.book(1)
        await asyncio.sleep(2 * PERIOD_S)
        assert sum(silent.requests().values()) == 1
        assert sum(replicas[0].requests().values()) == 2
        await silent.router.close()
        await silent.router.close()
        assert silent.router.gossip.num_published == 0

    scene(body, num_replicas=1)


def test_a_router_without_reservations_sends_heartbeats_only() -> None:
    async def body(lab: Lab, workers: list[RunningWorker], replicas: list[Replica]) -> None:
        before = replicas[0].router.gossip.num_published
        await asyncio.sleep(10.0)
        assert replicas[0].router.gossip.num_published - before <= 11
        await replicas[0].book()
        before = replicas[0].router.gossip.num_published
        await asyncio.sleep(10.0)
        assert 95 <= replicas[0].router.gossip.num_published - before <= 101
        await replicas[1].router.close()
        await asyncio.sleep(SLACK_S)
        before = replicas[0].router.gossip.num_published
        await asyncio.sleep(10.0)
        assert replicas[0].router.gossip.num_published - before <= 14

    scene(body)
