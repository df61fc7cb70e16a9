"""The KV router: to who holds the prompt unless that one is too busy; every end is counted once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Lab, RunningWorker, make_request, sim, until

from kvolt.core.errors import Unavailable
from kvolt.core.ids import InstanceId, SequenceHash
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.kv_router import KvRouter, RouterOptions
from kvolt.router.policy import Policy, classic, latency
from kvolt.runtime.client import EndpointClient
from kvolt.testing import run_virtual

BLOCK = 16


class Shelf:
    """Holders by hand."""

    def __init__(self) -> None:
        self.blocks: dict[InstanceId, set[int]] = {}

    def slot_of(self, instance_id: InstanceId) -> int | None:
        return list(self.blocks).index(instance_id) if instance_id in self.blocks else None

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.array(
            [
                next((at for at, each in enumerate(hashes) if each not in held), len(hashes))
                for held in self.blocks.values()
            ],
            dtype=np.int32,
        )


def prompt(*hashes: int, more_tokens: int = 1) -> Request:
    tokens = tuple(range(1, len(hashes) * BLOCK + more_tokens + 1))
    return replace(
        make_request(),
        token_ids=tokens,
        block_size=BLOCK,
        sequence_hashes=tuple(SequenceHash(each) for each in hashes),
    )


class Scene:
    """Three idle workers and a router over them."""

    def __init__(self, client: EndpointClient, policy: Policy) -> None:
        self.time_s = 0.0
        self.shelf = Shelf()
        self.router = KvRouter(
            client, self.shelf, policy, lambda: self.time_s, random.Random(1), RouterOptions()
        )
        self.ids = [instance.id for instance in client.candidates()]


def scene(body: Callable[[Scene, list[RunningWorker], EndpointClient], object], policy: Policy) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            priced = LatencyModel(base_s=0.01, prefill_token_s=0.0001)
            engine = replace(ARGUMENTS, latency=priced)
            workers = [await lab.worker(f"w{number}", sim(engine)) for number in range(3)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == 3)
            await body(Scene(client, policy), workers, client)  # type: ignore[misc]

    run_virtual(scenario)


@pytest.mark.parametrize("policy", [classic(), latency()], ids=["classic", "latency"])
def test_a_prompt_goes_to_who_holds_it(policy: Policy) -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1}, here.ids[2]: {1, 2, 3}}
        for _ in range(2):
            decision = await here.router.route(prompt(1, 2, 3, 4))
            assert (decision.instance.id, decision.overlap_blocks) == (here.ids[2], 3)
            here.router.begun(decision)
            here.router.free(decision)
        assert here.router.num_under_way == 0

    scene(body, policy)


def test_the_last_token_is_computed_even_if_all_is_held() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[1]: {1, 2}}
        decision = await here.router.route(prompt(1, 2, more_tokens=0))
        assert (decision.instance.id, decision.overlap_blocks) == (here.ids[1], 1)

    scene(body, latency())


@pytest.mark.parametrize("policy", [classic(), latency()], ids=["classic", "latency"])
def test_what_was_sent_counts_at_once_and_what_is_over_no_more(policy: Policy) -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        sent = [
            await here.router.route(prompt(*range(100 * number, 100 * number + 9))) for number in range(3)
        ]
        assert sorted(decision.instance.id for decision in sent) == here.ids
        here.router.free(sent[1])
        again = await here.router.route(prompt(7, 8, 9))
        assert again.instance == sent[1].instance
        for decision in (sent[0], sent[2], again):
            here.router.free(decision)
            here.router.free(decision)
        assert here.router.num_under_way == 0

    scene(body, policy)


def test_a_holder_that_is_too_busy_is_passed_over() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1}}
        kept = []
        for _ in range(12):
            kept.append(await here.router.route(prompt(1, *range(50, 60))))
        assert len({decision.instance.id for decision in kept}) == 3

    scene(body, latency())


def test_a_prompt_follows_one_with_the_same_beginning_that_is_not_computed_yet() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        first = await here.router.route(prompt(*range(1, 40)))
        here.time_s = 0.05  # most of it is computed: to wait for the rest is quicker than to begin elsewhere
        second = await here.router.route(prompt(*range(1, 40), 77))
        assert second.instance == first.instance
        assert second.overlap_blocks == 39
        here.router.begun(first)
        here.router.free(second)
        here.router.free(first)
        third = await here.router.route(prompt(*range(1, 40)))
        assert third.overlap_blocks == 0, "nobody said that it is held"
        here.router.free(third)

    scene(body, latency())


def test_a_worker_that_others_keep_busy_is_avoided() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        for number in (0, 1):
            load = WorkerLoad(running=200, kv_used_blocks=1000)
            here.router.on_report(LoadReport(here.ids[number], load))
        here.router.on_report(LoadReport("nobody", WorkerLoad(running=1)))
        decision = await here.router.route(prompt(1, 2))
        assert decision.instance.id == here.ids[2]

    scene(body, classic())


def test_pins_and_exclusions_come_first() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1, 2}}
        left = await here.router.route(prompt(1, 2), frozenset(here.ids[:1]))
        assert left.instance.id != here.ids[0]
        hints = RoutingHints(pins={Role.AGGREGATED: here.ids[1]})
        pinned = await here.router.route(replace(prompt(1, 2), routing=hints))
        assert pinned.instance.id == here.ids[1]
        with pytest.raises(Unavailable):
            await here.router.route(prompt(1, 2), frozenset(here.ids))

    scene(body, latency())


def test_a_request_without_hashes_is_routed_by_load() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1}}
        decisions = [await here.router.route(make_request()) for _ in range(3)]
        assert len({decision.instance.id for decision in decisions}) == 3
        assert all(decision.overlap_blocks == 0 for decision in decisions)

    scene(body, latency())


def test_workers_that_come_and_go_leave_nothing() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        sent = [await here.router.route(prompt(number)) for number in range(3)]
        await workers[0].runtime.close()
        await until(lambda: len(client.instances()) == 2)
        others = [await here.router.route(prompt(number)) for number in range(4)]
        assert here.router.num_under_way == 6, "those of the one that is gone are forgotten"
        for decision in (*sent, *others):
            here.router.free(decision)
        assert here.router.num_under_way == 0

    scene(body, latency())
