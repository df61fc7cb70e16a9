"""Shared pools: their blocks count for the workers that use them, once, while both exist."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from tests.unit.engines.lab import (
    ARGUMENTS,
    NAMESPACE,
    Lab,
    RunningWorker,
    ScriptedEngine,
    make_request,
    until,
)

from kvolt.core.card import EngineInfo
from kvolt.core.delta import StepOutput
from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request
from kvolt.router.choice import CandidateCost
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.ingest.feed import FeedState
from kvolt.router.ingest.pools import PoolSharing
from kvolt.router.policy.policy import latency
from kvolt.router.port import RouterContext
from kvolt.runtime.runtime import Runtime
from kvolt.testing import run_virtual
from kvolt.worker.kv.pool_event_publisher import PoolEventPublisher

BLOCK = ARGUMENTS.block_size
HOST_WEIGHT, DISK_WEIGHT = 0.9, 0.7
"""As settings have them."""


class Engine(ScriptedEngine):
    """Holds what a test says; what it need not compute is worth something."""

    def __init__(self, dp_ranks: tuple[int, ...] = (0,)) -> None:
        super().__init__()
        self._dp_ranks = dp_ranks

    async def start(self) -> EngineInfo:
        model = LatencyModel(base_s=0.01, prefill_token_s=0.001)
        info = await super().start()
        return msgspec.structs.replace(info, latency=model, dp_ranks=self._dp_ranks)

    async def clear_kv(self) -> int:
        return 0

    def tell(self, *changes: KvChange) -> None:
        self.put(StepOutput(kv_changes=changes))


def prompt(first: int, num_blocks: int = 6) -> Request:
    """Of so many blocks and a token, as all tests here: the last block counts then."""
    tokens = tuple(range(first, first + num_blocks * BLOCK + 1))
    hasher = SequenceHasher(BLOCK, request_seed(None, None))
    hasher.extend(list(tokens))
    return msgspec.structs.replace(
        make_request(),
        request_id=RequestId(f"p{first}"),
        token_ids=tokens,
        block_size=BLOCK,
        sequence_hashes=tuple(hasher.sequence),
    )


def stored(request: Request, tier: Tier, start: int = 0, end: int | None = None) -> Stored:
    return Stored.from_hashes(request.sequence_hashes[start:end], start_position=start, tier=tier)


class Pool:
    def __init__(self, runtime: Runtime, publisher: PoolEventPublisher, name: InstanceId) -> None:
        self.runtime, self.publisher, self.name = runtime, publisher, name

    @classmethod
    async def of(cls, lab: Lab, process: str) -> Pool:
        runtime = await lab.runtime(process)
        publisher = PoolEventPublisher(runtime, NAMESPACE)
        return cls(runtime, publisher, await publisher.start())

    def tell(self, *changes: KvChange) -> None:
        self.publisher.publish(changes)


class Scene:
    """Workers, and a router that knows them."""

    def __init__(self, lab: Lab, router: EventFedRouter, workers: dict[str, RunningWorker]) -> None:
        self.lab, self.router, self.workers = lab, router, workers

    @classmethod
    async def of(cls, lab: Lab, **reached: Pool | None) -> Scene:
        workers = {name: await lab.worker(name, Engine()) for name in reached}
        scene = cls(lab, await cls.new_router(lab, "edge", *workers.values()), workers)
        for name, pool in reached.items():
            await scene.reach(name, pool)
        return scene

    @staticmethod
    async def new_router(lab: Lab, process: str, *workers: RunningWorker) -> EventFedRouter:
        runtime = await lab.runtime(process)
        client = await runtime.client(workers[0].endpoint)
        await until(lambda: len(client.candidates()) == len(workers))
        router = EventFedRouter(RouterContext(client, runtime, BLOCK), latency())
        lab._closing.append(router.close)
        await until(lambda: router.ingest.num_in_state(FeedState.EXACT) == len(workers))
        return router

    async def reach(self, name: str, pool: Pool | None) -> None:
        await self.workers[name].worker.update_registration(kv_pool=None if pool is None else pool.name)

    def explained(self, request: Request) -> dict[str, CandidateCost]:
        process_of = self.router.process_of
        return {process_of(each.instance): each for each in self.router.explain(request)}

    def worth(self, request: Request) -> dict[str, float]:
        return {name: round(each.overlap_blocks, 6) for name, each in self.explained(request).items()}

    async def until_worth(self, request: Request, **blocks: float) -> None:
        due = {name: round(number, 6) for name, number in blocks.items()}
        try:
            await until(lambda: self.worth(request) == due)
        except TimeoutError:
            assert self.worth(request) == due

    async def goes_to(self, request: Request) -> str:
        decision = await self.router.route(request)
        self.router.release(decision, None)
        return decision.instance.process


# --- counting


def test_a_worker_has_what_its_pool_has_if_that_is_more() -> None:
    below = np.array([[4, 0, 0, 0, 0], [4, 5, 0, 6, 1], [7, 5, 0, 6, 3]], dtype=np.int32)
    PoolSharing([(0, 3), (1, 3), (2, 4)]).add_pool_blocks(below)
    assert below.tolist() == [[4, 0, 0, 0, 0], [6, 6, 1, 6, 1], [7, 6, 3, 6, 3]]


def test_slots_that_are_not_adjacent() -> None:
    below = np.array([[0, 0, 0, 0], [1, 5, 0, 3], [1, 5, 2, 3]], dtype=np.int32)
    PoolSharing([(3, 1), (0, 1)]).add_pool_blocks(below)
    assert below.tolist() == [[0, 0, 0, 0], [5, 5, 0, 5], [5, 5, 2, 5]]
    PoolSharing().add_pool_blocks(below)
    assert below.tolist() == [[0, 0, 0, 0], [5, 5, 0, 5], [5, 5, 2, 5]]


# --- events to choices


def test_a_prompt_goes_to_a_worker_with_its_blocks_in_the_pool() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            one, two = await Pool.of(lab, "pool-a"), await Pool.of(lab, "pool-b")
            scene = await Scene.of(lab, a0=one, a1=one, b0=two, b1=two)
            first, second = prompt(1), prompt(1000)
            one.tell(stored(first, Tier.HOST))
            two.tell(stored(second, Tier.HOST, 0, 2), stored(second, Tier.DISK))
            await scene.until_worth(first, a0=6 * HOST_WEIGHT, a1=6 * HOST_WEIGHT, b0=0, b1=0)
            far = 2 * HOST_WEIGHT + 4 * DISK_WEIGHT
            await scene.until_worth(second, a0=0, a1=0, b0=far, b1=far)
            assert await scene.goes_to(first) in ("a0", "a1")
            assert await scene.goes_to(second) in ("b0", "b1")
            one.tell(Removed.from_hashes(first.sequence_hashes[3:], Tier.HOST))
            await scene.until_worth(first, a0=3 * HOST_WEIGHT, a1=3 * HOST_WEIGHT, b0=0, b1=0)
            one.tell(Cleared(Tier.HOST))
            await scene.until_worth(first, a0=0, a1=0, b0=0, b1=0)
            assert scene.router.ingest.num_in_state(FeedState.EXACT) == 4, "pools are no workers"

    run_virtual(scenario)


def test_what_a_worker_has_itself_is_not_counted_twice() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool, a1=pool, b0=None)
            request = prompt(1)
            pool.tell(stored(request, Tier.HOST, 0, 5), stored(request, Tier.DISK))
            shared = 5 * HOST_WEIGHT + DISK_WEIGHT
            await scene.until_worth(request, a0=shared, a1=shared, b0=0)
            scene.workers["a0"].engine.tell(stored(request, Tier.DEVICE, 0, 4))
            own = 4 + HOST_WEIGHT + DISK_WEIGHT
            await scene.until_worth(request, a0=own, a1=shared, b0=0)
            assert scene.explained(request)["a0"].held_blocks == 4
            assert scene.explained(request)["a1"].held_blocks == 0
            scene.workers["a0"].engine.tell(stored(request, Tier.HOST, 0, 5), stored(request, Tier.DISK))
            scene.workers["b0"].engine.tell(stored(request, Tier.DEVICE, 0, 1))
            await scene.until_worth(request, a0=own, a1=shared, b0=1)
            assert await scene.goes_to(request) == "a0"
            scene.workers["a0"].engine.tell(Cleared())
            await scene.until_worth(request, a0=shared, a1=shared, b0=1)

    run_virtual(scenario)


def test_every_rank_of_a_worker_reaches_its_pool() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            running = await lab.worker("w0", Engine(dp_ranks=(0, 1)))
            router = await Scene.new_router(lab, "edge", running)
            await running.worker.update_registration(kv_pool=pool.name)
            request = prompt(1)
            pool.tell(stored(request, Tier.HOST))
            await until(lambda: [each.overlap_blocks for each in router.explain(request)] == [5.4, 5.4])

    run_virtual(scenario)


def test_a_pool_that_no_worker_names_is_not_indexed() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool, other = await Pool.of(lab, "pool-a"), await Pool.of(lab, "pool-b")
            scene = await Scene.of(lab, a0=None)
            request = prompt(1)
            other.tell(stored(request, Tier.HOST))
            pool.tell(stored(request, Tier.HOST))
            await asyncio.sleep(1.0)
            assert scene.router.ingest._worker_pools._client is None, "nothing is looked for"
            await scene.reach("a0", pool)
            await scene.until_worth(request, a0=6 * HOST_WEIGHT)
            assert scene.router.block_index.num_pairs == 6
            assert scene.router.ingest.num_pools == 1

    run_virtual(scenario)


# --- coming and going


def test_workers_join_late_and_leave() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool, a1=None)
            request = prompt(1)
            pool.tell(stored(request, Tier.HOST))
            await scene.until_worth(request, a0=6 * HOST_WEIGHT, a1=0)
            await scene.reach("a1", pool)
            await scene.until_worth(request, a0=6 * HOST_WEIGHT, a1=6 * HOST_WEIGHT)
            await scene.reach("a0", None)
            await scene.until_worth(request, a0=0, a1=6 * HOST_WEIGHT)
            scene.workers["a2"] = await lab.worker("a2", Engine())
            await scene.reach("a2", pool)
            await scene.until_worth(request, a0=0, a1=6 * HOST_WEIGHT, a2=6 * HOST_WEIGHT)
            await scene.reach("a1", None)
            await scene.reach("a2", None)
            await scene.until_worth(request, a0=0, a1=0, a2=0)
            assert scene.router.block_index.num_pairs == 0, "and no blocks are kept"

    run_virtual(scenario)


def test_a_pool_that_starts_anew_is_another_one() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool, b0=None)
            kept, lost = prompt(1), prompt(1000)
            pool.tell(stored(kept, Tier.HOST), stored(kept, Tier.DISK), stored(lost, Tier.HOST))
            await scene.until_worth(lost, a0=6 * HOST_WEIGHT, b0=0)
            await pool.runtime.abort()
            await scene.until_worth(lost, a0=0, b0=0)
            again = await Pool.of(lab, "pool-a2")
            again.tell(stored(kept, Tier.DISK))
            await asyncio.sleep(1.0)
            assert scene.worth(kept) == {"a0": 0, "b0": 0}, "it is not reached yet"
            await scene.reach("a0", again)
            await scene.until_worth(kept, a0=6 * DISK_WEIGHT, b0=0)
            assert scene.worth(lost) == {"a0": 0, "b0": 0}
            assert scene.router.block_index.num_pairs == 6

    run_virtual(scenario)


@pytest.mark.parametrize("silent", [False, True], ids=["with a reset", "silent"])
def test_a_lost_pool_does_not_count(silent: bool) -> None:
    """Though the worker has not noticed, and says that it reaches it."""

    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool, b0=None)
            request = prompt(1)
            pool.tell(stored(request, Tier.HOST))
            await scene.until_worth(request, a0=6 * HOST_WEIGHT, b0=0)
            began_at = asyncio.get_running_loop().time()
            lab.network.crash("pool-a", silent)
            await scene.until_worth(request, a0=0, b0=0)
            if not silent:
                assert asyncio.get_running_loop().time() - began_at < 0.5, "before its lease is over"
            assert scene.router.block_index.num_pairs == 0

    run_virtual(scenario)


# --- what is lost on the way


def test_lost_events_of_a_pool_are_recovered() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool)
            request, other = prompt(1), prompt(1000)
            pool.tell(stored(other, Tier.HOST))
            await scene.until_worth(other, a0=6 * HOST_WEIGHT)
            lab.bus.drop_next(pool.runtime.events.publisher, 1)
            pool.tell(stored(request, Tier.HOST, 0, 3))
            pool.tell(stored(request, Tier.HOST, 3))
            await scene.until_worth(request, a0=6 * HOST_WEIGHT)
            stats = scene.router.ingest.stats
            assert (stats.num_gaps, stats.num_replays) == (1, 1)
            lab.bus.drop_next(pool.runtime.events.publisher, 1)
            pool.tell(Removed.from_hashes(other.sequence_hashes, Tier.HOST))  # and nothing after it
            await scene.until_worth(other, a0=0)
            assert stats.num_snapshots == 2, "of the worker and of the pool, at the beginning"

    run_virtual(scenario)


def test_a_late_router_gets_a_snapshot_of_a_pool() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            pool = await Pool.of(lab, "pool-a")
            scene = await Scene.of(lab, a0=pool, b0=None)
            request = prompt(1)
            pool.tell(stored(request, Tier.HOST, 0, 4), stored(request, Tier.DISK))
            late = Scene(
                lab, await Scene.new_router(lab, "late", *scene.workers.values()), dict(scene.workers)
            )
            await late.until_worth(request, a0=4 * HOST_WEIGHT + 2 * DISK_WEIGHT, b0=0)
            assert await late.goes_to(request) == "a0"

    run_virtual(scenario)
