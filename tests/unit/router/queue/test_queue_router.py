"""QueueRouter: late binding, order, cancellation, refusal with retry-after."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
import uvloop
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import Usage
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.choice import WorkerChoice
from kvolt.router.metrics import describe_queues, queue_families
from kvolt.router.port import Decision
from kvolt.router.queue.priority_level import QueueLimits
from kvolt.router.queue.queue_router import (
    QueueOptions,
    QueueRouter,
    deciding_router,
)
from kvolt.router.queue.queued_request import constraints_of, tokens_of
from kvolt.router.queue.waiting_queue import Order
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.testing import run_virtual


class Rooms:
    """A router over workers with so much room each."""

    def __init__(self, **rooms: int) -> None:
        self.rooms = dict(rooms)
        self.tickets = itertools.count(1)
        self.reserved: dict[int, str] = {}
        self.begun_once: list[int] = []
        self.num_tries = 0
        self.is_closed = False
        self.on_capacity_freed: Callable[[], None] = lambda: None

    def try_route(
        self, request: Request, excluded: frozenset[InstanceId] = frozenset(), accepts: object = None
    ) -> Decision | None:
        self.num_tries += 1
        pinned = request.routing.pins.get(Role.AGGREGATED)
        able = [each for each in self.rooms if each not in excluded and pinned in (None, each)]
        if not able:
            raise Unavailable("nobody")
        for name in able:
            if self.rooms[name] > 0:
                self.rooms[name] -= 1
                ticket = next(self.tickets)
                self.reserved[ticket] = name
                endpoint = EndpointAddress("n", "c", "e")
                return Decision(
                    Instance(id=InstanceId(name), endpoint=endpoint, address="host:1"), reservation_id=ticket
                )
        return None

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        decision = self.try_route(request, excluded)
        assert decision is not None
        return decision

    def predict_ttft_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        return None

    def queue_s(self, decision: Decision) -> float:
        return 0.0

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self.begun_once.append(decision.reservation_id)

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
        self.rooms[self.reserved.pop(decision.reservation_id)] += 1

    def find_choice(self, decision: Decision) -> WorkerChoice | None:
        return None

    async def close(self) -> None:
        self.is_closed = True


def asking(name: str = "r", *, pin: str | None = None, prompt: int = 20, **hints: object) -> Request:
    pins = {} if pin is None else {Role.AGGREGATED: InstanceId(pin)}
    routing = RoutingHints(pins=pins, **hints)  # type: ignore[arg-type]
    return replace(make_request(name, prompt=prompt), routing=routing)


class Scene:
    def __init__(self, inner: Rooms, options: QueueOptions | None = None) -> None:
        self.inner = inner
        self.loop = asyncio.get_running_loop()
        self.router = QueueRouter(inner, self.loop.time, options)
        self.got: list[str] = []

    def start(
        self, request: Request, excluded: frozenset[InstanceId] = frozenset()
    ) -> asyncio.Task[Decision]:
        async def ask() -> Decision:
            decision = await self.router.route(request, excluded)
            self.got.append(request.request_id)
            return decision

        return self.loop.create_task(ask())

    async def fill(self) -> list[Decision]:
        """Every room is taken."""
        return [await self.router.route(asking("first")) for _ in range(sum(self.inner.rooms.values()))]


def scene(
    body: Callable[[Scene], Awaitable[None]], inner: Rooms, options: QueueOptions | None = None
) -> None:
    async def scenario() -> None:
        here = Scene(inner, options)
        await body(here)
        await here.router.close()
        assert inner.is_closed
        assert here.router.num_waiting == 0
        assert here.router.num_unstarted == len(inner.reserved)

    run_virtual(scenario)


async def ticks(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_with_capacity_no_request_waits() -> None:
    async def body(here: Scene) -> None:
        decisions = await here.fill()
        assert [decision.instance.id for decision in decisions] == ["a", "b"]
        assert all(decision.withdraw_hook is not None for decision in decisions)
        assert (here.router.num_waiting, here.router.stats.num_immediate) == (0, 2)
        assert here.router.num_unstarted == 2
        here.router.mark_first_token(decisions[0], 7)
        assert here.inner.begun_once == [decisions[0].reservation_id]
        for decision in decisions:
            here.router.release(decision, None)
        assert here.inner.reserved == {}

    scene(body, Rooms(a=1, b=1))


def test_a_request_waits_for_free_capacity() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        task = here.start(asking("late"))
        await asyncio.sleep(2.0)
        assert not task.done()
        assert (here.router.num_waiting, here.router.num_waiting_tokens) == (1, 28)
        here.router.release(first[1], None)
        assert (await task).instance.id == "b"
        assert here.loop.time() == pytest.approx(2.0)
        stats = here.router.stats
        assert (stats.num_immediate, stats.waits_s.num_observed) == (2, 1)
        assert stats.waits_s.total == pytest.approx(2.0)

    scene(body, Rooms(a=1, b=1))


def test_requests_of_one_tick_are_dispatched_together() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        tasks = [here.start(asking(f"r{number}")) for number in range(100)]
        await ticks()
        tried = here.inner.num_tries
        for decision in first[:3]:
            here.router.mark_first_token(decision, None)
            here.router.release(decision, None)
        await ticks()
        assert here.got == ["r0", "r1", "r2"]
        assert here.inner.num_tries - tried == 4, "three that went, and one that could not"
        for _ in range(10):
            here.inner.on_capacity_freed()
        await ticks()
        assert here.inner.num_tries - tried == 5
        for task in tasks:
            task.cancel()
        await ticks()
        assert here.router.stats.refused["cancelled"] == 97

    scene(body, Rooms(a=4))


def test_many_are_bound_without_keeping_the_loop_from_its_work() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        tasks = [here.start(asking(f"r{number}")) for number in range(200)]
        await ticks()
        for decision in first:
            here.router.release(decision, None)
        await ticks(2)
        assert 0 < len(here.got) < 150
        await ticks(10)
        assert here.got == [f"r{number}" for number in range(200)]
        for task in tasks:
            here.router.release(await task, None)

    scene(body, Rooms(a=200))


def test_a_blocked_head_does_not_block_others_and_stays_queued() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        pinned = here.start(asking("pinned", pin="a"))
        await ticks()
        others = [here.start(asking(f"r{number}")) for number in range(3)]
        await ticks()
        here.router.release(first[1], None)  # of b
        await ticks()
        assert here.got == ["r0"]
        here.router.release(first[0], None)  # of a: it is first in line there
        await ticks()
        assert here.got == ["r0", "pinned"]
        assert (await pinned).instance.id == "a"
        for task in others:
            task.cancel()

    scene(body, Rooms(a=1, b=1))


def test_a_request_with_free_candidates_does_not_wait_for_others() -> None:
    async def body(here: Scene) -> None:
        blocked = here.start(asking("blocked", pin="a"))
        await ticks()
        assert here.router.num_waiting == 1
        assert (await here.start(asking("free"))).instance.id == "b"
        assert here.loop.time() == 0.0
        blocked.cancel()

    scene(body, Rooms(a=0, b=5))


def test_with_many_kinds_each_is_tried_in_the_end() -> None:
    async def body(here: Scene) -> None:
        tasks = [here.start(asking(f"r{number}", pin=f"w{number}")) for number in range(50)]
        await asyncio.sleep(0.1)
        tried = here.inner.num_tries
        here.inner.rooms["w49"] = 1
        here.inner.on_capacity_freed()
        await ticks()
        assert here.inner.num_tries - tried == 16, "no event costs more"
        while not tasks[49].done():
            here.inner.on_capacity_freed()  # whatever happens in between
            await asyncio.sleep(0.002)
        assert here.loop.time() < 0.2
        for task in tasks:
            task.cancel()

    scene(body, Rooms(**{f"w{number}": 0 for number in range(50)}))


def test_unreported_capacity_is_found() -> None:
    async def body(here: Scene) -> None:
        task = here.start(asking("r"))
        await ticks()
        here.inner.rooms["a"] = 1
        await task
        assert here.loop.time() == pytest.approx(1.0)

    scene(body, Rooms(a=0))


def test_tenants_take_turns() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        flood = [here.start(asking(f"f{number}", tenant="flood", prompt=92)) for number in range(20)]
        await ticks()
        polite = [here.start(asking(f"p{number}", tenant="polite", prompt=92)) for number in range(3)]
        await ticks()
        for _ in range(6):
            here.router.release(first.pop(), None)
            await ticks()
        assert here.got == ["f0", "p0", "f1", "p1", "f2", "p2"]
        for task in (*flood, *polite):
            task.cancel()

    scene(body, Rooms(a=6), QueueOptions(limits=QueueLimits(quantum_tokens=100)))


# --- given up


@pytest.mark.parametrize("when", ["waiting", "bound", "same tick"])
def test_a_cancelled_request_leaves_the_queue_once(when: str) -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        task = here.start(asking("cancelled"))
        behind = here.start(asking("behind"))
        await ticks()
        if when == "waiting":
            task.cancel()
            await ticks()
            assert here.router.num_waiting == 1
            here.router.release(first, None)
        elif when == "bound":
            here.router.release(first, None)
            here.loop.call_soon(task.cancel)  # after it was given a place, before it could take it
        else:
            here.router.release(first, None)
            task.cancel()
        decision = await behind
        assert here.got == ["behind"]
        assert task.cancelled()
        assert list(here.inner.reserved) == [decision.reservation_id]

    scene(body, Rooms(a=1))


def test_a_timeout_in_the_queue_reports_no_gpu_work() -> None:
    async def body(here: Scene) -> None:
        await here.fill()
        patient = here.start(asking("patient"))
        await ticks()
        hasty = here.start(replace(asking("hasty"), deadline_s=0.5))
        with pytest.raises(Overloaded, match=r"within 0\.5 s; no GPU work was spent") as caught:
            await hasty
        assert here.loop.time() == pytest.approx(0.5)
        assert caught.value.fields["gpu_work"] == "none"
        with pytest.raises(Overloaded):
            await patient
        assert here.loop.time() == pytest.approx(3.0)
        assert here.router.stats.refused == {"deadline": 2}

    scene(body, Rooms(a=1), QueueOptions(max_wait_s=3.0))


def test_a_request_without_candidates_fails() -> None:
    async def body(here: Scene) -> None:
        task = here.start(asking("r", pin="a"))
        await ticks()
        del here.inner.rooms["a"]
        here.inner.on_capacity_freed()
        with pytest.raises(Unavailable, match="nobody"):
            await task
        assert here.router.stats.refused == {"unavailable": 1}

    scene(body, Rooms(a=0, b=1))


def test_close_routes_the_waiting_requests() -> None:
    async def body(here: Scene) -> None:
        tasks = [
            here.start(asking(f"r{number}", pin=pin)) for number, pin in enumerate((None, "a", "b", "b"))
        ]
        await ticks()
        tasks[3].cancel()
        here.inner.on_capacity_freed()
        here.inner.rooms = {"a": 2}  # as `route` sees it, which ignores saturation
        await here.router.close()
        assert [(await task).instance.id for task in tasks[:2]] == ["a", "a"]
        with pytest.raises(Unavailable):
            await tasks[2]
        here.inner.on_capacity_freed()
        for task in tasks[:2]:
            here.router.release(await task, None)

    scene(body, Rooms(a=0, b=0))


# --- refused


def test_beyond_its_bound_the_queue_refuses_with_retry_after() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        tasks = [here.start(asking(f"r{number}")) for number in range(4)]
        await ticks()
        with pytest.raises(Overloaded, match="4 requests wait; no GPU work") as caught:
            await here.router.route(asking("one too many"))
        assert caught.value.fields == {
            "queue": "router",
            "limit": 4,
            "retry_after_s": 1.0,
            "gpu_work": "none",
        }
        for decision in first:  # one each two seconds
            await asyncio.sleep(2.0)
            here.router.release(decision, None)
            await ticks()
            tasks.append(here.start(asking("more")))
            await ticks()
        with pytest.raises(Overloaded) as caught:
            await here.router.route(asking("one too many"))
        assert 6.0 <= float(caught.value.fields["retry_after_s"] or 0) <= 10.0, "four times two seconds"
        await asyncio.sleep(1000.0)
        assert here.router.stats.refused["full"] == 2
        for task in tasks:
            task.cancel()

    scene(body, Rooms(a=5), QueueOptions(limits=QueueLimits(max_requests=4), max_wait_s=5000.0))


def test_a_higher_priority_displaces_the_newest_of_the_lowest() -> None:
    async def body(here: Scene) -> None:
        tasks = [here.start(asking(f"r{number}")) for number in range(2)]
        await ticks()
        urgent = here.start(asking("urgent", priority=1))
        with pytest.raises(Overloaded, match="displaced") as caught:
            await tasks[1]
        assert caught.value.fields["gpu_work"] == "none"
        assert here.router.stats.refused == {"displaced": 1}
        here.inner.rooms["a"] = 2
        here.inner.on_capacity_freed()
        await asyncio.gather(urgent, tasks[0])
        assert here.got == ["urgent", "r0"]

    scene(body, Rooms(a=0), QueueOptions(limits=QueueLimits(max_requests=2)))


# --- what is asked and how it is counted


def test_a_question_does_not_wait() -> None:
    async def body(here: Scene) -> None:
        blocked = here.start(asking("blocked", pin="a"))
        await ticks()
        decision = await here.router.route(asking("question", query_only=True))
        assert (decision.withdraw_hook, here.router.num_unstarted) == (None, 0)
        here.inner.reserved.clear()
        blocked.cancel()

    scene(body, Rooms(a=0, b=1))


def test_constraints_describe_the_possible_workers() -> None:
    plain = constraints_of(asking(), frozenset())
    assert plain is None
    assert constraints_of(asking(tenant="t", priority=3, session="s"), frozenset()) is None
    kinds = [
        constraints_of(asking(pin="a"), frozenset()),
        constraints_of(asking(), frozenset({InstanceId("a")})),
        constraints_of(replace(asking(), lora="poems"), frozenset()),
        constraints_of(asking(pinned_dp_rank=0), frozenset()),
        constraints_of(asking(allowed=(InstanceId("a"),)), frozenset()),
        constraints_of(asking(required_taints=("big",)), frozenset()),
    ]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)


def test_a_request_counts_with_prompt_and_expected_output() -> None:
    assert tokens_of(make_request(prompt=20, tokens=8)) == 28
    assert tokens_of(make_request(prompt=20, tokens=8, choices=2)) == 36
    assert tokens_of(make_request(prompt=20, tokens=100_000)) == 20 + 256
    assert tokens_of(replace(asking(expected_output_tokens=3), stop=make_request(tokens=90).stop)) == 23


def test_options_come_from_settings() -> None:
    settings = RouterSettings(
        queue_requests=7,
        queue_tokens=70,
        queue_wait_s=3.0,
        queue_order="shortest",
        queue_quantum_tokens=512,
        queue_aging_tokens_per_s=5.0,
        withdraw_max_moves=1,
        withdraw_min_gain_s=2.0,
    )
    options = QueueOptions.of(settings)
    assert options.limits == QueueLimits(
        max_requests=7, max_tokens=70, quantum_tokens=512, aging_tokens_per_s=5.0
    )
    assert (options.order, options.max_wait_s) == (Order.SHORTEST, 3.0)
    assert (options.withdrawal.max_moves, options.withdrawal.min_gain_s) == (1, 2.0)
    assert QueueOptions.of(RouterSettings()) == QueueOptions()


# --- metrics


def test_queue_metrics() -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        tasks = [here.start(asking(f"r{number}", prompt=100)) for number in range(3)]
        await asyncio.sleep(0.3)
        here.router.release(first, None)
        await ticks()
        tasks[2].cancel()
        await ticks()
        told = {
            (sample.name, *sample.labels.values()): sample.value
            for family in queue_families([("ns.c.e", here.router), ("ns.c.other", here.inner)])
            for sample in family.samples
        }
        assert told["kvolt_router_queue_requests", "ns.c.e"] == 1
        assert describe_queues([here.router, here.inner]) == {"requests": 1, "tokens": 108}
        assert told["kvolt_router_queue_tokens", "ns.c.e"] == 108
        assert told["kvolt_router_unstarted_requests", "ns.c.e"] == 1
        assert told["kvolt_router_queue_passed_total", "ns.c.e"] == 1
        assert told["kvolt_router_queue_wait_seconds_count", "ns.c.e"] == 1
        assert told["kvolt_router_queue_wait_seconds_sum", "ns.c.e"] == pytest.approx(0.3)
        assert told["kvolt_router_queue_refused_total", "ns.c.e", "cancelled"] == 1
        assert told["kvolt_router_withdrawals_total", "ns.c.e"] == 0
        assert not any("other" in key for key in map(str, told))
        assert list(queue_families([("ns.c.other", here.inner)])) == [], (
            "where nobody can wait nothing is told of it"
        )
        tasks[1].cancel()

    scene(body, Rooms(a=1))


def test_the_deciding_router_is_behind_the_queue() -> None:
    async def body(here: Scene) -> None:
        assert deciding_router(here.router) is here.inner
        assert deciding_router(here.inner) is here.inner

    scene(body, Rooms(a=1))


class Crowded(Rooms):
    """Accepts any request in `route`, saturated or not."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        self.rooms["a"] += 1
        return await super().route(request, excluded)


def test_a_migrated_request_does_not_wait() -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        waiting = here.start(asking("waits"))
        await ticks()
        assert here.router.num_waiting == 1
        resumed = replace(asking("goes on"), prior_tokens=(300, 301))
        decision = await here.router.route(resumed)
        assert decision.withdraw_hook is None
        assert not waiting.done()
        here.router.mark_first_token(decision, 0)
        here.router.release(decision, None)
        here.router.release(first, None)
        here.router.release(await waiting, None)

    scene(body, Crowded(a=1))


def test_requests_whose_time_is_almost_up_wait_on_uvloop_too() -> None:
    """Its timers within half a millisecond are handles without a time."""

    async def scenario() -> None:
        here = Scene(Rooms(a=0))
        tasks = [here.start(replace(asking(str(at)), deadline_s=at)) for at in (4e-4, 3e-4, 2e-4, 1e-4)]
        assert {type(each) for each in await asyncio.gather(*tasks, return_exceptions=True)} == {Overloaded}

    uvloop.run(scenario())
