"""HybridIndex: event-fed and approximate workers in one router, and transitions."""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from tests.unit.engines.lab import Lab, make_request, sim, until
from tests.unit.router.test_event_fed_router import BLOCK, PRICED, Scene, prompt

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.ids import CardHash, InstanceId, SequenceHash
from kvolt.core.request import Request, Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimEngine
from kvolt.journey.journey import JourneyContext
from kvolt.router.choice import WorkerChoice
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.index import hybrid as mixed
from kvolt.router.index.health import IndexHealthOptions
from kvolt.router.index.hybrid import HybridIndex
from kvolt.router.ingest.feed import FeedState
from kvolt.router.policy.policy import latency
from kvolt.router.port import RouterContext
from kvolt.router.worker_rank import WorkerDpRank
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")
INFO = EngineInfo(
    engine="sim",
    role=Role.AGGREGATED,
    model="m",
    card=CardHash("c"),
    block_size=BLOCK,
    capacity=Capacity(max_num_seqs=8, max_batch_tokens=512, kv_total_blocks=100),
)


class Exact:
    """An index by hand: slots in the order in which workers came."""

    def __init__(self, *workers: InstanceId) -> None:
        self.slots_version = 0
        self.workers = list(workers)
        self.held: dict[InstanceId, int] = {}
        self.below: dict[InstanceId, int] = {}
        self.asked: list[InstanceId] = []

    def find(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32]:
        return np.array([min(self.held.get(each, 0), len(hashes)) for each in self.workers], dtype=np.int32)

    def find_local_tiers(self, hashes: tuple[int, ...]) -> npt.NDArray[np.int32] | None:
        if not self.below:
            return None
        deep = [self.held.get(each, 0) + self.below.get(each, 0) for each in self.workers]
        return np.array([self.find(hashes), *[np.minimum(deep, len(hashes))] * 4], dtype=np.int32)

    def slot_of(self, instance_id: InstanceId, dp_rank: int = 0) -> int | None:
        return self.workers.index(instance_id) if instance_id in self.workers else None

    def resync(self, instance_id: InstanceId) -> None:
        self.asked.append(instance_id)


class Shop:
    """HybridIndex with a clock by hand."""

    def __init__(self, exact: Exact | None, *workers: InstanceId, **trust: Any) -> None:
        self.time_s = 0.0
        self.tickets = 0
        self.holders = HybridIndex(exact, lambda: self.time_s, health_options=IndexHealthOptions(**trust))
        self.holders.set_workers(dict.fromkeys(workers, INFO))

    def held(self, instance_id: InstanceId, *hashes: int) -> int | None:
        slot = self.holders.slot_of(instance_id)
        return None if slot is None else int(self.holders.find(hashes)[slot])

    def serve(self, instance_id: InstanceId, *hashes: int, cached: int | None = None) -> None:
        """A request with these blocks, of which the worker says that it had so many."""
        self.tickets += 1
        request = msgspec.structs.replace(
            make_request(prompt=len(hashes) * BLOCK + 1),
            block_size=BLOCK,
            sequence_hashes=tuple(SequenceHash(each) for each in hashes),
        )
        held = self.held(instance_id, *hashes) or 0
        choice = WorkerChoice(
            WorkerDpRank(instance_id, 0), held, 0.0, 0.0, False, request, len(request.token_ids), 9.0, held
        )
        self.holders.on_reserved(self.tickets, choice)
        cached_tokens = None if cached is None else cached * BLOCK
        self.holders.on_first_token(self.tickets, choice, cached_tokens, self.time_s)
        self.holders.on_released(self.tickets)


def test_without_events_all_are_approximate() -> None:
    shop = Shop(None, A, B)
    shop.serve(A, 1, 2, 3)
    assert (shop.held(A, 1, 2, 9), shop.held(B, 1, 2, 9)) == (2, 0)
    assert shop.holders.is_approximate(A)
    shop.time_s = 1000.0
    assert shop.held(A, 1, 2, 9) == 0


def test_some_are_exact_and_others_not() -> None:
    exact = Exact(B)
    shop = Shop(exact, A, B)
    exact.held[B] = 5
    shop.serve(A, 1, 2)
    shop.serve(B, 1, 2, cached=2)
    assert (shop.held(A, *range(1, 9)), shop.held(B, *range(1, 9))) == (2, 5)
    assert [shop.holders.is_approximate(each) for each in (A, B)] == [True, False]
    assert shop.holders.approximate.worker_ranks == [(A, 0)]


def test_a_worker_becomes_event_fed_and_a_removed_one_is_forgotten() -> None:
    exact = Exact()
    shop = Shop(exact, A, B)
    shop.serve(A, 1, 2)
    before = shop.holders.slots_version
    exact.workers, exact.slots_version, exact.held = [B, A], 1, {A: 7}
    assert shop.holders.slots_version != before
    assert (shop.held(A, *range(9)), shop.holders.is_approximate(A)) == (7, False)
    before = shop.holders.slots_version
    shop.holders.set_workers({})
    assert shop.holders.slots_version != before
    assert shop.holders.approximate.num_worker_ranks == 0


def test_a_worker_with_other_reports_is_flagged_resynced_and_approximate(
    caplog: pytest.LogCaptureFixture,
) -> None:
    exact = Exact(A, B)
    exact.held = {A: 8, B: 8}
    shop = Shop(exact, A, B, min_reports=4, min_agreeing=4)
    version = shop.holders.slots_version
    with caplog.at_level(logging.INFO, mixed.__name__):
        for number in range(6):
            shop.serve(A, *range(10 * number, 10 * number + 8), cached=0)
            shop.serve(B, *range(8), cached=8)
    assert exact.asked == [A]
    assert shop.holders.health.flagged == [A]
    assert shop.holders.slots_version != version
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert shop.held(A, *range(50, 58)) == 8, "it was sent this"
    assert shop.held(A, *range(100, 108)) == 0, "though the index says that it holds it"
    assert shop.held(B, *range(100, 108)) == 8


def test_a_flagged_worker_is_cleared_by_its_reports() -> None:
    exact = Exact(A)
    exact.held = {A: 8}
    shop = Shop(exact, A, min_reports=4, min_agreeing=20, min_flagged_s=1.0)
    for _ in range(4):
        shop.serve(A, *range(8), cached=0)
    assert shop.holders.is_approximate(A)
    exact.held = {A: 3}
    shop.time_s = 5.0
    for number in range(60):
        shop.serve(A, *range(10 * number, 10 * number + 8), cached=3)
    assert not shop.holders.is_approximate(A)
    assert shop.held(A, *range(8)) == 3


def test_a_returning_worker_starts_unflagged() -> None:
    exact = Exact(A)
    exact.held = {A: 8}
    shop = Shop(exact, A, min_reports=4)
    for _ in range(4):
        shop.serve(A, *range(8), cached=0)
    shop.holders.set_workers({})
    shop.holders.set_workers({A: INFO})
    assert not shop.holders.is_approximate(A)


def test_workers_beyond_the_limit_are_logged_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvolt.router.index.approximate.MAX_WORKER_RANKS", 1)
    with caplog.at_level(logging.WARNING, mixed.__name__):
        shop = Shop(None, A, B)
        shop.holders.set_workers({A: INFO, B: INFO, C: None})
    assert len(caplog.records) == 1
    assert shop.held(A, 1) == 0
    assert shop.held(B, 1) is None


# --- with workers


class Foreign(SimEngine):
    """Its blocks have other names."""

    async def start(self) -> EngineInfo:
        return msgspec.structs.replace(await super().start(), hash_scheme="sha256")


class Silent(SimEngine):
    """Tells nothing of what it stores, and so the index is wrong about it."""

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for step in super().steps():
            yield msgspec.structs.replace(step, kv_changes=())


def engine(kind: type[SimEngine]) -> SimEngine:
    return kind(EngineSpec(model="sim-tiny", role=Role.AGGREGATED), PRICED)


async def opened(lab: Lab, engines: list[SimEngine], settings: RouterSettings) -> tuple[Scene, Any]:
    workers = [await lab.worker(f"w{number}", each) for number, each in enumerate(engines)]
    runtime = await lab.runtime("edge")
    client = await runtime.client(workers[0].endpoint)
    await until(lambda: len(client.candidates()) == len(workers))
    router = EventFedRouter(RouterContext(client, runtime, BLOCK, settings), latency())
    task_group = TaskGroup("journeys")

    async def close() -> None:
        await task_group.close()
        await router.close()

    return Scene(lab, router, JourneyContext(router, client, task_group)), close


def conversations(number: int, turns: int, seed: int = 1) -> list[Request]:
    """Prompts that grow, in turn with each other."""
    rng = random.Random(seed)
    texts = [tuple(rng.randrange(3, 200) for _ in range(4 * BLOCK)) for _ in range(number)]
    requests = []
    for turn in range(turns):
        for at, text in enumerate(texts):
            texts[at] = (*text, *(rng.randrange(3, 200) for _ in range(BLOCK)))
            requests.append(prompt(f"c{at}-{turn}", texts[at]))
    return requests


def test_prompts_return_to_their_worker_without_events() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await opened(lab, [sim(PRICED) for _ in range(3)], RouterSettings(events=False))
            where: dict[str, set[str]] = {}
            for request in conversations(6, 5):
                worker, cached = await scene.ask(request)
                where.setdefault(str(request.request_id).split("-")[0], set()).add(worker)
                if not str(request.request_id).endswith("-0"):
                    assert cached is not None
                    assert cached >= 4 * BLOCK
            assert all(len(workers) == 1 for workers in where.values())
            assert scene.router.block_index.num_pairs == 0
            assert scene.router.prefix_index.approximate.num_entries > 0
            await close()

    run_virtual(scenario)


def test_workers_whose_events_are_refused_are_approximate_beside_exact_ones() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await opened(lab, [engine(Foreign), sim(PRICED), sim(PRICED)], RouterSettings())
            await until(lambda: scene.router.ingest.num_in_state(FeedState.EXACT) == 2)
            for request in conversations(9, 4):
                _, cached = await scene.ask(request)
                if not str(request.request_id).endswith("-0"):
                    assert cached is not None
                    assert cached >= 4 * BLOCK
            holders = scene.router.prefix_index
            assert holders.approximate.num_worker_ranks == 1
            assert holders.health.flagged == []
            assert holders.health.num_wrong == 0
            await close()

    run_virtual(scenario)


def test_a_worker_of_which_the_index_is_wrong_is_found_out() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            scene, close = await opened(lab, [engine(Silent)], RouterSettings())
            holders = scene.router.prefix_index
            await until(lambda: scene.router.ingest.num_in_state(FeedState.EXACT) == 1)
            num_snapshots = scene.router.ingest.stats.num_snapshots
            for request in conversations(3, 12):
                await scene.ask(request)
            assert len(holders.health.flagged) == 1
            assert holders.is_approximate(holders.health.flagged[0])
            await until(lambda: scene.router.ingest.stats.num_snapshots > num_snapshots)
            await close()

    run_virtual(scenario)


def test_tiers_beside_workers_without_events() -> None:
    exact = Exact(A)
    shop = Shop(exact, A, B)
    hashes = tuple(range(8))
    assert shop.holders.find_local_tiers(hashes) is None, "no worker publishes any"
    exact.held, exact.below = {A: 2}, {A: 3}
    below = shop.holders.find_local_tiers(hashes)
    assert below is not None
    at_a, at_b = shop.holders.slot_of(A), shop.holders.slot_of(B)
    assert below[:, at_a].tolist() == [2, 5, 5, 5, 5]
    assert below[:, at_b].tolist() == [0, 0, 0, 0, 0]
