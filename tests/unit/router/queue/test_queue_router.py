"""Requests that wait in the router: bound late, in turn, once; given up once; refused with a word on when to return."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import make_request

from kvolt.core.delta import Usage
from kvolt.core.errors import Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import Request, Role, RoutingHints
from kvolt.router.port import Decision
from kvolt.router.queue.metrics import queue_families
from kvolt.router.queue.queue_router import QueueOptions, QueueRouter, kind_of, tokens_of, who_decides
from kvolt.router.queue.waiting_queue import Order, QueueLimits
from kvolt.runtime.config.router_settings import RouterSettings
from kvolt.runtime.endpoint.address import EndpointAddress, Instance
from kvolt.testing import run_virtual


class Rooms:
    """A LateRouter over workers with so much room each."""

    def __init__(self, **rooms: int) -> None:
        self.rooms = dict(rooms)
        self.tickets = itertools.count(1)
        self.booked: dict[int, str] = {}
        self.begun_once: list[int] = []
        self.num_tries = 0
        self.is_closed = False
        self.on_relief: Callable[[], None] = lambda: None

    def try_route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision | None:
        self.num_tries += 1
        pinned = request.routing.pins.get(Role.AGGREGATED)
        able = [each for each in self.rooms if each not in excluded and pinned in (None, each)]
        if not able:
            raise Unavailable("nobody")
        for name in able:
            if self.rooms[name] > 0:
                self.rooms[name] -= 1
                ticket = next(self.tickets)
                self.booked[ticket] = name
                endpoint = EndpointAddress("n", "c", "e")
                return Decision(
                    Instance(id=InstanceId(name), endpoint=endpoint, address="host:1"), booking=ticket
                )
        return None

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        decision = self.try_route(request, excluded)
        assert decision is not None
        return decision

    def foresee_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        return None

    def queue_s(self, decision: Decision) -> float:
        return 0.0

    def begun(self, decision: Decision, cached_tokens: int | None) -> None:
        self.begun_once.append(decision.booking)

    def free(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
        self.rooms[self.booked.pop(decision.booking)] += 1

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
        assert here.router.num_unstarted == len(inner.booked)

    run_virtual(scenario)


async def ticks(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def test_with_room_nobody_waits() -> None:
    async def body(here: Scene) -> None:
        decisions = await here.fill()
        assert [decision.instance.id for decision in decisions] == ["a", "b"]
        assert all(decision.recall is not None for decision in decisions)
        assert (here.router.num_waiting, here.router.stats.num_at_once) == (0, 2)
        assert here.router.num_unstarted == 2
        here.router.begun(decisions[0], 7)
        assert here.inner.begun_once == [decisions[0].booking]
        for decision in decisions:
            here.router.free(decision, None)
        assert here.inner.booked == {}

    scene(body, Rooms(a=1, b=1))


def test_a_request_waits_until_something_is_free_and_goes_there() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        task = here.start(asking("late"))
        await asyncio.sleep(2.0)
        assert not task.done()
        assert (here.router.num_waiting, here.router.num_waiting_tokens) == (1, 28)
        here.router.free(first[1], None)
        assert (await task).instance.id == "b"
        assert here.loop.time() == pytest.approx(2.0)
        stats = here.router.stats
        assert (stats.num_at_once, stats.waits_s.num_observed) == (2, 1)
        assert stats.waits_s.total == pytest.approx(2.0)

    scene(body, Rooms(a=1, b=1))


def test_those_of_one_tick_are_woken_together_and_nobody_is_asked_for_in_vain() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        tasks = [here.start(asking(f"r{number}")) for number in range(100)]
        await ticks()
        tried = here.inner.num_tries
        for decision in first[:3]:
            here.router.begun(decision, None)
            here.router.free(decision, None)
        await ticks()
        assert here.got == ["r0", "r1", "r2"]
        assert here.inner.num_tries - tried == 4, "three that went, and one that could not"
        for _ in range(10):
            here.inner.on_relief()
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
            here.router.free(decision, None)
        await ticks(2)
        assert 0 < len(here.got) < 150
        await ticks(10)
        assert here.got == [f"r{number}" for number in range(200)]
        for task in tasks:
            here.router.free(await task, None)

    scene(body, Rooms(a=200))


def test_a_head_that_cannot_go_blocks_nobody_and_is_not_forgotten() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        pinned = here.start(asking("pinned", pin="a"))
        await ticks()
        others = [here.start(asking(f"r{number}")) for number in range(3)]
        await ticks()
        here.router.free(first[1], None)  # of b
        await ticks()
        assert here.got == ["r0"]
        here.router.free(first[0], None)  # of a: it is first in line there
        await ticks()
        assert here.got == ["r0", "pinned"]
        assert (await pinned).instance.id == "a"
        for task in others:
            task.cancel()

    scene(body, Rooms(a=1, b=1))


def test_one_of_a_kind_that_somebody_can_take_does_not_wait_for_others() -> None:
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
        here.inner.on_relief()
        await ticks()
        assert here.inner.num_tries - tried == 16, "no event costs more"
        while not tasks[49].done():
            here.inner.on_relief()  # whatever happens meanwhile
            await asyncio.sleep(0.002)
        assert here.loop.time() < 0.2
        for task in tasks:
            task.cancel()

    scene(body, Rooms(**{f"w{number}": 0 for number in range(50)}))


def test_room_that_nobody_told_of_is_found() -> None:
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
            here.router.free(first.pop(), None)
            await ticks()
        assert here.got == ["f0", "p0", "f1", "p1", "f2", "p2"]
        for task in (*flood, *polite):
            task.cancel()

    scene(body, Rooms(a=6), QueueOptions(limits=QueueLimits(quantum_tokens=100)))


# --- given up


@pytest.mark.parametrize("when", ["waiting", "bound", "same tick"])
def test_a_cancelled_request_gives_up_its_place_once(when: str) -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        task = here.start(asking("cancelled"))
        behind = here.start(asking("behind"))
        await ticks()
        if when == "waiting":
            task.cancel()
            await ticks()
            assert here.router.num_waiting == 1
            here.router.free(first, None)
        elif when == "bound":
            here.router.free(first, None)
            here.loop.call_soon(task.cancel)  # after it was given a place, before it could take it
        else:
            here.router.free(first, None)
            task.cancel()
        decision = await behind
        assert here.got == ["behind"]
        assert task.cancelled()
        assert list(here.inner.booked) == [decision.booking]

    scene(body, Rooms(a=1))


def test_who_waits_too_long_is_refused_and_told_that_nothing_was_spent() -> None:
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


def test_when_nobody_is_left_who_could_take_it_it_is_told_so() -> None:
    async def body(here: Scene) -> None:
        task = here.start(asking("r", pin="a"))
        await ticks()
        del here.inner.rooms["a"]
        here.inner.on_relief()
        with pytest.raises(Unavailable, match="nobody"):
            await task
        assert here.router.stats.refused == {"unavailable": 1}

    scene(body, Rooms(a=0, b=1))


def test_when_the_router_stops_those_who_wait_are_sent_all_the_same() -> None:
    async def body(here: Scene) -> None:
        tasks = [
            here.start(asking(f"r{number}", pin=pin)) for number, pin in enumerate((None, "a", "b", "b"))
        ]
        await ticks()
        tasks[3].cancel()
        here.inner.on_relief()
        here.inner.rooms = {"a": 2}  # as `route` sees it, which asks nobody whether there is room
        await here.router.close()
        assert [(await task).instance.id for task in tasks[:2]] == ["a", "a"]
        with pytest.raises(Unavailable):
            await tasks[2]
        here.inner.on_relief()
        for task in tasks[:2]:
            here.router.free(await task, None)

    scene(body, Rooms(a=0, b=0))


# --- refused


def test_beyond_its_bound_it_refuses_and_says_when_to_come_back() -> None:
    async def body(here: Scene) -> None:
        first = await here.fill()
        tasks = [here.start(asking(f"r{number}")) for number in range(4)]
        await ticks()
        with pytest.raises(Overloaded, match="4 requests wait for a worker already; no GPU work") as caught:
            await here.router.route(asking("one too many"))
        assert caught.value.fields == {
            "queue": "router",
            "limit": 4,
            "retry_after_s": 1.0,
            "gpu_work": "none",
        }
        for decision in first:  # one each two seconds
            await asyncio.sleep(2.0)
            here.router.free(decision, None)
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


def test_a_higher_priority_takes_the_place_of_the_newest_of_the_lowest() -> None:
    async def body(here: Scene) -> None:
        tasks = [here.start(asking(f"r{number}")) for number in range(2)]
        await ticks()
        urgent = here.start(asking("urgent", priority=1))
        with pytest.raises(Overloaded, match="make room") as caught:
            await tasks[1]
        assert caught.value.fields["gpu_work"] == "none"
        assert here.router.stats.refused == {"displaced": 1}
        here.inner.rooms["a"] = 2
        here.inner.on_relief()
        await asyncio.gather(urgent, tasks[0])
        assert here.got == ["urgent", "r0"]

    scene(body, Rooms(a=0), QueueOptions(limits=QueueLimits(max_requests=2)))


# --- what is asked and how it is counted


def test_a_question_does_not_wait() -> None:
    async def body(here: Scene) -> None:
        blocked = here.start(asking("blocked", pin="a"))
        await ticks()
        decision = await here.router.route(asking("question", query_only=True))
        assert (decision.recall, here.router.num_unstarted) == (None, 0)
        here.inner.booked.clear()
        blocked.cancel()

    scene(body, Rooms(a=0, b=1))


def test_kinds_are_told_apart_by_who_may_take_a_request() -> None:
    plain = kind_of(asking(), frozenset())
    assert plain is None
    assert kind_of(asking(tenant="t", priority=3, session="s"), frozenset()) is None
    kinds = [
        kind_of(asking(pin="a"), frozenset()),
        kind_of(asking(), frozenset({InstanceId("a")})),
        kind_of(replace(asking(), lora="poems"), frozenset()),
        kind_of(asking(pinned_dp_rank=0), frozenset()),
        kind_of(asking(allowed=(InstanceId("a"),)), frozenset()),
        kind_of(asking(required_taints=("big",)), frozenset()),
    ]
    assert None not in kinds
    assert len(set(kinds)) == len(kinds)


def test_a_request_counts_as_its_prompt_and_what_will_come_of_it() -> None:
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
        take_back_moves=1,
        take_back_gain_s=2.0,
    )
    options = QueueOptions.of(settings)
    assert options.limits == QueueLimits(
        max_requests=7, max_tokens=70, quantum_tokens=512, aging_tokens_per_s=5.0
    )
    assert (options.order, options.max_wait_s) == (Order.SHORTEST, 3.0)
    assert (options.take_back.max_moves, options.take_back.min_gain_s) == (1, 2.0)
    assert QueueOptions.of(RouterSettings()) == QueueOptions()


# --- what is told


def test_metrics_tell_what_waits_and_what_became_of_it() -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        tasks = [here.start(asking(f"r{number}", prompt=100)) for number in range(3)]
        await asyncio.sleep(0.3)
        here.router.free(first, None)
        await ticks()
        tasks[2].cancel()
        await ticks()
        told = {
            (sample.name, *sample.labels.values()): sample.value
            for family in queue_families([("ns.c.e", here.router), ("ns.c.other", here.inner)])
            for sample in family.samples
        }
        assert told["dynamo_frontend_router_queue_pending_requests", "ns.c.e"] == 1
        assert told["kvolt_router_queue_tokens", "ns.c.e"] == 108
        assert told["kvolt_router_unstarted_requests", "ns.c.e"] == 1
        assert told["kvolt_router_queue_passed_total", "ns.c.e"] == 1
        assert told["kvolt_router_queue_wait_seconds_count", "ns.c.e"] == 1
        assert told["kvolt_router_queue_wait_seconds_sum", "ns.c.e"] == pytest.approx(0.3)
        assert told["kvolt_router_queue_refused_total", "ns.c.e", "cancelled"] == 1
        assert told["kvolt_router_take_backs_total", "ns.c.e"] == 0
        assert not any("other" in key for key in map(str, told))
        assert list(queue_families([("ns.c.other", here.inner)])) == [], (
            "where nobody can wait nothing is told of it"
        )
        tasks[1].cancel()

    scene(body, Rooms(a=1))


def test_who_decides_is_behind_who_waits() -> None:
    async def body(here: Scene) -> None:
        assert who_decides(here.router) is here.inner
        assert who_decides(here.inner) is here.inner

    scene(body, Rooms(a=1))


class Crowded(Rooms):
    """Takes whom it is told to take, room or not."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        self.rooms["a"] += 1
        return await super().route(request, excluded)


def test_an_answer_that_goes_on_does_not_wait_in_line() -> None:
    async def body(here: Scene) -> None:
        (first,) = await here.fill()
        waiting = here.start(asking("waits"))
        await ticks()
        assert here.router.num_waiting == 1
        resumed = replace(asking("goes on"), resume=(300, 301))
        decision = await here.router.route(resumed)
        assert decision.recall is None
        assert not waiting.done()
        here.router.begun(decision, 0)
        here.router.free(decision, None)
        here.router.free(first, None)
        here.router.free(await waiting, None)

    scene(body, Crowded(a=1))
