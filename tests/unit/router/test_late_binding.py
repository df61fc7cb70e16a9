"""Queue and withdrawal with real workers on virtual time: requests wait, are bound late, move, and end once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, LIMITS, Lab, RunningWorker, is_empty, make_request, sim, until

from kvolt.core.latency import LatencyModel
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.engines.sim.engine import SimArguments
from kvolt.journey.journey import JourneyContext
from kvolt.router.kv_router import KvRouter
from kvolt.router.port import RouterContext
from kvolt.router.queue.queue_router import QueueRouter, deciding_router
from kvolt.router.registry import ROUTERS
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual
from kvolt.testing.cluster.deltas import Deltas

TOKENS = 10
ONE_BY_ONE = replace(
    ARGUMENTS, max_num_seqs=1, latency=LatencyModel(base_s=0.01, prefill_token_s=0.001), block_size=16
)


class Scene:
    def __init__(
        self,
        journey_context: JourneyContext,
        router: QueueRouter,
        workers: list[RunningWorker],
        task_group: TaskGroup,
    ) -> None:
        self.journey_context = journey_context
        self.router = router
        self.workers = workers
        self.task_group = task_group
        self.ends: list[str] = []

    async def ask(self, name: str, prompt: int = 100, **hints: object) -> int:
        """How many tokens came."""
        request = replace(make_request(name, tokens=TOKENS, prompt=prompt), routing=RoutingHints(**hints))  # type: ignore[arg-type]
        count = await self.send(request)
        self.ends.append(name)
        return count

    async def send(self, request: Request) -> int:
        """How many tokens came."""
        async with await Deltas.of(self.journey_context, request, LIMITS) as deltas:
            return sum([len(delta.token_ids) async for delta in deltas])

    def served_by(self, number: int) -> float:
        return self.workers[number].worker.metrics._outcomes["finished"]


def scene(
    body: Callable[[Scene], Awaitable[None]], engines: Sequence[SimArguments], settings: RouterSettings
) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", sim(each)) for number, each in enumerate(engines)]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == len(workers))
            router = ROUTERS["latency"](RouterContext(client, await lab.runtime("router"), 16, settings))
            assert isinstance(router, QueueRouter)
            inner = deciding_router(router)
            assert isinstance(inner, KvRouter)
            task_group = TaskGroup("moves", on_error=lab.errors.append)
            await body(Scene(JourneyContext(router, client, task_group), router, workers, task_group))
            await until(lambda: len(task_group) == 0)
            assert (router.num_waiting, router.num_unstarted, inner.num_in_flight) == (0, 0, 0)
            await until(lambda: all(is_empty(running.engine) for running in workers))
            await router.close()
            await task_group.close()
            assert lab.errors == []

    run_virtual(scenario)


def test_what_no_worker_has_room_for_waits_and_is_answered_in_turn() -> None:
    async def body(here: Scene) -> None:
        tasks = [asyncio.ensure_future(here.ask(f"r{number}")) for number in range(12)]
        await asyncio.sleep(0.001)
        assert here.router.num_waiting == 10
        most = 0
        while not all(task.done() for task in tasks):
            most = max(most, *(running.engine.load().waiting for running in here.workers))
            await asyncio.sleep(0.005)
        assert most == 0, "a worker had one more than it could compute"
        assert {task.result() for task in tasks} == {TOKENS}
        assert sorted(here.ends) == sorted(f"r{number}" for number in range(12))
        assert here.ends[0] in ("r0", "r1")
        assert here.ends[-1] in ("r10", "r11")
        assert (here.served_by(0), here.served_by(1)) == (6, 6)

    scene(body, [ONE_BY_ONE, ONE_BY_ONE], RouterSettings(saturated_seqs=1.0))


def test_a_pinned_request_gets_its_worker_though_others_would_take_it() -> None:
    async def body(here: Scene) -> None:
        pinned_to = here.workers[0].worker._instance
        others = [asyncio.ensure_future(here.ask(f"r{number}")) for number in range(6)]
        await asyncio.sleep(0.001)
        pinned = asyncio.ensure_future(here.ask("pinned", pins={Role.AGGREGATED: pinned_to}))
        await asyncio.gather(*others, pinned)
        assert pinned.result() == TOKENS
        assert here.served_by(0) + here.served_by(1) == 7

    scene(body, [ONE_BY_ONE, ONE_BY_ONE], RouterSettings(saturated_seqs=1.0))


@pytest.mark.parametrize("moves", [0, 2])
def test_requests_at_a_slow_worker_are_withdrawn(moves: int) -> None:
    """Both register the same model; one takes twenty times as long."""

    async def body(here: Scene) -> None:
        tasks = [asyncio.ensure_future(here.ask(f"r{number}")) for number in range(8)]
        await asyncio.gather(*tasks)
        assert {task.result() for task in tasks} == {TOKENS}
        stats = here.journey_context.stats
        assert not stats.retries, "to be moved is no failure"
        slow, fast = here.served_by(0), here.served_by(1)
        assert slow + fast == 8
        assert here.workers[0].worker.metrics._outcomes["withdrawn"] == stats.num_moves
        if moves:
            assert stats.num_moves >= 2
            assert fast > slow
            assert here.router.stats.num_withdrawals >= stats.num_moves
        else:
            assert (stats.num_moves, slow, fast) == (0, 4, 4)

    settings = RouterSettings(
        saturated_seqs=100.0, saturated_batches=1000.0, withdraw_max_moves=moves, correct_times=False
    )
    scene(body, [replace(ONE_BY_ONE, slow_by=20.0), ONE_BY_ONE], settings)


def long_prompt(name: str) -> Request:
    """300 tokens that no other request has."""
    return replace(
        make_request(name, tokens=1), token_ids=tuple(range(1000 * ord(name), 1000 * ord(name) + 300))
    )


@pytest.mark.parametrize("is_paced", [True, False])
def test_prompts_of_a_worker_are_computed_one_after_the_other(is_paced: bool) -> None:
    """Two prompts arrive while a first one is computed. In one step both would end when the second one ends."""

    async def body(here: Scene) -> None:
        loop = asyncio.get_running_loop()

        async def first_token(name: str) -> float:
            async with await Deltas.of(here.journey_context, long_prompt(name), LIMITS) as deltas:
                async for _ in deltas:
                    return loop.time() - started
            raise AssertionError

        started = loop.time()
        tasks = []
        for name in "abc":
            tasks.append(asyncio.ensure_future(first_token(name)))
            await asyncio.sleep(0.02)
        times = await asyncio.gather(*tasks)
        one_step = 0.31
        expected = [1, 2, 3] if is_paced else [1, 3, 3]
        assert times == [pytest.approx(count * one_step, abs=0.05) for count in expected]
        assert here.router.holds_s.num_observed == (2 if is_paced else 0)

    scene(body, [replace(ONE_BY_ONE, max_num_seqs=8)], RouterSettings(pace_prompts=is_paced))


def test_a_request_that_is_cancelled_while_its_prompt_is_held_leaves_nothing() -> None:
    async def body(here: Scene) -> None:
        tasks = [asyncio.ensure_future(here.send(long_prompt(name))) for name in "abcd"]
        await asyncio.sleep(0.1)
        tasks[2].cancel()
        assert [await each for each in (tasks[0], tasks[1], tasks[3])] == [1] * 3
        assert here.served_by(0) == 3, "the cancelled one was never sent"

    scene(body, [replace(ONE_BY_ONE, max_num_seqs=8)], RouterSettings())


def test_a_request_whose_worker_is_lost_while_its_prompt_is_held_is_answered_elsewhere() -> None:
    async def body(here: Scene) -> None:
        tasks = [asyncio.ensure_future(here.send(long_prompt(name))) for name in "abcdef"]
        await asyncio.sleep(0.1)
        assert here.router.num_unstarted == 6
        await here.workers[0].worker.close()
        assert [await each for each in tasks] == [1] * 6

    scene(body, [replace(ONE_BY_ONE, max_num_seqs=8)] * 2, RouterSettings())


MANY_AT_ONE = RouterSettings(saturated_seqs=100.0, saturated_batches=1000.0, withdraw_min_gain_s=0.1)


@pytest.mark.parametrize("cancelled", [None, "h"])
def test_a_held_prompt_moves_to_a_worker_that_joins(cancelled: str | None) -> None:
    """Its old worker has not seen it: none has to be asked. The last one moves first, and may be cancelled then."""

    async def body(here: Scene) -> None:
        await here.workers[1].runtime.cordon()
        await asyncio.sleep(0.1)
        tasks = {name: asyncio.ensure_future(here.send(long_prompt(name))) for name in "abcdefgh"}
        await asyncio.sleep(0.05)
        await here.workers[1].runtime.resume()
        if cancelled is not None:
            await until(lambda: here.router.stats.num_withdrawals > 0)
            tasks.pop(cancelled).cancel()
        assert [await each for each in tasks.values()] == [1] * len(tasks)
        assert here.router.stats.num_withdrawals >= 2
        assert here.served_by(1) >= 2
        assert (here.journey_context.stats.num_moves, here.journey_context.stats.retries) == (0, {})

    scene(body, [ONE_BY_ONE, ONE_BY_ONE], MANY_AT_ONE)


def test_held_prompts_of_a_cordoned_worker_are_routed_again() -> None:
    """At once, and it is no failure: no attempt is spent."""

    async def body(here: Scene) -> None:
        tasks = [asyncio.ensure_future(here.send(long_prompt(name))) for name in "abcdefgh"]
        await asyncio.sleep(0.05)
        await here.workers[0].runtime.cordon()
        assert [await each for each in tasks] == [1] * 8
        assert (here.served_by(0), here.served_by(1)) == (1, 7)
        assert here.journey_context.stats.retries == {}

    scene(body, [ONE_BY_ONE, ONE_BY_ONE], MANY_AT_ONE)


def test_a_decision_that_must_be_held_is_not_made_at_once() -> None:
    async def body(here: Scene) -> None:
        first = here.router.route_now(long_prompt("a"))
        assert first is not None
        assert here.router.route_now(long_prompt("b")) is None
        small = here.router.route_now(make_request("small", prompt=3))
        assert small is not None, "it delays the first by nothing"
        here.router.release(small, None)
        here.router.release(first, None)

    scene(body, [replace(ONE_BY_ONE, max_num_seqs=8)], RouterSettings())


def test_without_a_queue_requests_are_sent_all_the_same() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            worker = await lab.worker("w0")
            client = await lab.client(worker)
            for name in ("latency", "classic"):
                context = RouterContext(client, await lab.runtime(name), 16, RouterSettings(queue=False))
                router = ROUTERS[name](context)
                assert isinstance(router, KvRouter)
                assert deciding_router(router) is router
                await router.close()

    run_virtual(scenario)
