"""KvRouter: prompts go to their holders unless too busy; every release counts once."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Lab, RunningWorker, ScriptedEngine, make_request, sim, until

from kvolt.core.card import EngineInfo
from kvolt.core.errors import KvoltError, Unavailable
from kvolt.core.ids import InstanceId, RequestId, SequenceHash
from kvolt.core.kv_events import Tier
from kvolt.core.latency import LatencyModel
from kvolt.core.load import LoadReport, WorkerLoad
from kvolt.core.request import KvSource, Request, Role, RoutingHints
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.router.kv_router import KvRouter
from kvolt.router.policy.policy import Policy, classic, latency
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual

BLOCK = 16


class Shelf:
    """PrefixIndex by hand."""

    def __init__(self) -> None:
        self.blocks: dict[InstanceId, set[int]] = {}

    @property
    def slots_version(self) -> int:
        return hash(tuple(self.blocks))

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        return list(self.blocks).index(instance_id) if instance_id in self.blocks else None

    def find_local_tiers(self, hashes: tuple[int, ...]) -> None:
        return None

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

    def __init__(
        self, client: EndpointClient, policy: Policy, settings: RouterSettings | None = None
    ) -> None:
        self.time_s = 0.0
        self.shelf = Shelf()
        settings = settings or RouterSettings(saturated_seqs=1.0, saturated_batches=8.0)
        self.router = KvRouter(client, self.shelf, policy, lambda: self.time_s, random.Random(1), settings)
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
def test_a_prompt_goes_to_its_holder(policy: Policy) -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1}, here.ids[2]: {1, 2, 3}}
        for _ in range(2):
            decision = await here.router.route(prompt(1, 2, 3, 4))
            assert (decision.instance.id, decision.overlap_blocks) == (here.ids[2], 3)
            here.router.mark_first_token(decision, None)
            here.router.release(decision, None)
        assert here.router.num_in_flight == 0

    scene(body, policy)


def test_the_kv_source_is_named_if_both_share_kv() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1}, here.ids[2]: {1, 2, 3}}
        by_id = {worker.worker._instance: worker for worker in workers}
        pinned = replace(prompt(1, 2, 3, 4), routing=RoutingHints(pins={Role.AGGREGATED: here.ids[0]}))

        async def sources(request: Request) -> tuple[KvSource, ...]:
            decision = await here.router.route(request)
            here.router.release(decision, None)
            return decision.kv_sources

        async def share(number: int) -> None:
            worker = by_id[here.ids[number]]
            version = here.router.candidate_filter.registrations.version
            assert worker.worker.info is not None
            await worker.runtime.update_info(worker.endpoint, replace(worker.worker.info, shares_kv=True))
            await until(lambda: here.router.candidate_filter.registrations.version != version)

        assert await sources(pinned) == ()
        await share(0)
        assert await sources(pinned) == (), "the other does not give"
        await share(2)
        assert await sources(pinned) == (KvSource(here.ids[2], Tier.HOST, 3),)
        assert await sources(prompt(1, 2, 3, 4)) == (), "it goes where most of it is"

    scene(body, latency())


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
        here.router.release(sent[1], None)
        again = await here.router.route(prompt(7, 8, 9))
        assert again.instance == sent[1].instance
        for decision in (sent[0], sent[2], again):
            here.router.release(decision, None)
            here.router.release(decision, None)
        assert here.router.num_in_flight == 0

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
        assert second.overlap_blocks == 32  # in sixteenths, see `expected`
        here.router.mark_first_token(first, None)
        here.router.release(second, None)
        here.router.release(first, None)
        third = await here.router.route(prompt(*range(1, 40)))
        assert third.overlap_blocks == 0, "no event has reported it"
        here.router.release(third, None)

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
        assert here.router.num_in_flight == 6, "those of the one that is gone are forgotten"
        for decision in (*sent, *others):
            here.router.release(decision, None)
        assert here.router.num_in_flight == 0

    scene(body, latency())


def test_when_all_are_saturated_try_route_refuses_and_route_does_not() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        kept = []
        while (decision := here.router.try_route(prompt(len(kept)))) is not None:
            kept.append(decision)
            here.router.mark_first_token(decision, None)
        assert len(kept) == 3 * ARGUMENTS.max_num_seqs
        extra = await here.router.route(prompt(5))
        assert extra.instance.id in here.ids
        here.router.release(extra, None)
        here.router.release(kept[0], None)
        again = here.router.try_route(prompt(6))
        assert again is not None
        assert again.instance == kept[0].instance

    scene(body, latency())


def test_stale_replica_load_does_not_block_a_worker() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        full = WorkerLoad(running=ARGUMENTS.max_num_seqs)
        for instance_id in here.ids:  # and no report will ever come again
            here.router.on_report(LoadReport(instance_id, full))
        ours = [here.router.try_route(prompt(number)) for number in range(4)]
        assert [decision is not None for decision in ours] == [True, True, True, False]
        assert {decision.instance.id for decision in ours if decision is not None} == set(here.ids)

    scene(body, latency())


def test_a_queue_is_notified_of_capacity_and_can_predict() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        events: list[str] = []
        here.router.on_capacity_freed = lambda: events.append("room")
        here.router.on_report(LoadReport(here.ids[0], WorkerLoad()))
        assert events == ["room"]
        await workers[2].runtime.cordon()
        await until(lambda: len(client.candidates()) == 2)
        assert len(events) > 1
        foreseen_s = here.router.predict_ttft_s(prompt(more_tokens=400))
        assert foreseen_s == pytest.approx(0.05)
        assert here.router.num_in_flight == 0
        sent = [await here.router.route(prompt(more_tokens=400)) for _ in range(3)]
        places = [decision.instance.id for decision in sent]
        assert [here.router.queue_s(decision) for decision in sent] == [
            pytest.approx(0.05 * places.count(place)) for place in places
        ]
        here.router.release(sent[0], None)
        assert here.router.queue_s(sent[0]) == 0.0, "it is nowhere"
        for number in range(2 * ARGUMENTS.max_num_seqs):
            await here.router.route(prompt(number))
        assert here.router.predict_ttft_s(prompt()) is None

    scene(body, latency())


def test_a_query_reserves_nothing() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[1]: {1, 2}}
        routed_request = replace(prompt(1, 2, 3), routing=RoutingHints(query_only=True))
        for _ in range(3):
            decided = await here.router.route(routed_request)
            assert (decided.instance.id, decided.overlap_blocks) == (here.ids[1], 2)
            assert here.router.num_in_flight == 0
            here.router.release(decided, None)

    scene(body, latency())


def test_only_allowed_workers_are_candidates() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        here.shelf.blocks = {here.ids[0]: {1, 2}}

        async def where(**hints: object) -> str:
            request = replace(prompt(1, 2, 3), routing=RoutingHints(**hints))  # type: ignore[arg-type]
            return (await here.router.route(request)).instance.id

        assert await where(allowed=(here.ids[2], InstanceId("nobody"))) == here.ids[2]
        for hints, why in (
            ({"allowed": (InstanceId("nobody"),)}, "none_allowed"),
            ({"required_taints": ("gpu", "eu")}, "none_fits"),
            ({"pinned_dp_rank": 3}, "none_fits"),
            ({"pins": {Role.AGGREGATED: here.ids[0]}, "allowed": (here.ids[1],)}, "pin"),
        ):
            with pytest.raises(Unavailable) as caught:
                await where(**hints)
            assert caught.value.fields["reason"] == why

    scene(body, latency())


def test_each_candidate_is_explained_and_every_rank_has_its_load() -> None:
    async def body(here: Scene, workers: list[RunningWorker], client: EndpointClient) -> None:
        decision = await here.router.route(prompt(1, 2))
        decided = here.router.explain(prompt(7))
        assert {each.instance for each in decided} == set(here.ids)
        assert [each.requests for each in here.router.worker_loads()] == [
            float(each == decision.instance.id) for each in here.ids
        ]

    scene(body, latency())


class Ranked(ScriptedEngine):
    """Two ranks, and nothing is ever answered."""

    async def start(self) -> EngineInfo:
        return replace(await super().start(), dp_ranks=(0, 1))


class Deaf:
    steps: StepSink | None = None
    has_started = False

    def on_item(self, delta: object) -> None:
        raise AssertionError("nothing is answered")

    def on_end(self, error: KvoltError | None) -> None:
        raise AssertionError(f"it ended: {error}")


def test_a_rank_is_chosen_and_reaches_the_engine() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            running = await lab.worker("w0", engine := Ranked())
            client = await lab.client(running)
            await until(lambda: len(client.candidates()) == 1)
            here = Scene(client, latency())
            task_group = TaskGroup("journeys")
            journeys = []
            for number in range(4):
                routed_request = replace(prompt(number), request_id=RequestId(str(number)))
                journey = Journey(
                    JourneyContext(here.router, client, task_group), routed_request, Deaf(), Deadlines()
                )
                await journey.start()
                journeys.append(journey)
                await until(lambda number=number: len(engine.submitted) > number)  # type: ignore[misc]
            sent = [request.routing.pinned_dp_rank for request in engine.submitted]
            assert sent == [journey.decision.dp_rank for journey in journeys if journey.decision is not None]
            assert sorted(map(int, filter(None, sent))) == [1, 1]
            pinned = replace(prompt(9), routing=RoutingHints(pinned_dp_rank=1))
            assert (await here.router.route(pinned)).dp_rank == 1
            for journey in journeys:
                journey.cancel()
            await task_group.close()
            stray = replace(prompt(9), routing=RoutingHints(pinned_dp_rank=5))
            with pytest.raises(Unavailable, match="rank 5"):
                async with await client.stream(stray) as answers:
                    await anext(answers)

    run_virtual(scenario)
