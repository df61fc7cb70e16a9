"""Reservations of frontends at a router process: updated, released, and ended with the session."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from tests.unit.engines.lab import ARGUMENTS, NAMESPACE, Lab, RunningWorker, make_request, sim, until
from tests.unit.router.test_event_fed_router import PRICED, Reader, prompt

from kvolt.core.delta import Usage
from kvolt.core.errors import KvoltError, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.core.request import (
    Grammar,
    GrammarKind,
    Handoff,
    Request,
    Role,
    RoutingHints,
    Sampling,
    StopConditions,
)
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.router.balancing import LeastLoadedRouter, RoundRobinRouter
from kvolt.router.breaker import FIRST_BACKOFF_S, Outcome
from kvolt.router.choice import WorkerChoice
from kvolt.router.event_fed_router import EventFedRouter
from kvolt.router.metrics import describe_breakers
from kvolt.router.port import Decision, Router, RouterContext
from kvolt.router.queue.queue_router import QueueOptions, QueueRouter, deciding_router
from kvolt.router.registry import ROUTERS, NewRouter
from kvolt.router.selection.forecast import SupportsForecast
from kvolt.router.service import service as service_module
from kvolt.router.service.client import RemoteRouter, remote_router
from kvolt.router.service.link import RemoteReservation, RouterLink
from kvolt.router.service.messages import (
    SESSION_ENDPOINT,
    OpenSession,
    ReservationUpdates,
    RouteRequest,
    router_endpoint,
    to_route_request,
)
from kvolt.router.service.metrics import RouterCollector
from kvolt.router.service.service import RouterService
from kvolt.runtime.endpoint.call import Deadlines, open_stream
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.port import Destination
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual

BLOCK = ARGUMENTS.block_size
TOLD_S = 0.02
"""Time by which updates have been sent."""


@dataclass(slots=True)
class Edge:
    runtime: Runtime
    client: EndpointClient
    link: RouterLink
    router: RemoteRouter
    journey_context: JourneyContext

    async def book(self, number: int) -> list[Decision]:
        return [await self.router.route(make_request(f"r{index}")) for index in range(number)]

    async def ask(self, request: Request) -> tuple[str, int | None]:
        """Which worker answered, and how much of the prompt it had."""
        reader = Reader()
        journey = Journey(self.journey_context, request, reader, Deadlines())
        await journey.start()
        await until(lambda: reader.is_over)
        assert reader.error is None
        assert journey.decision is not None
        return journey.decision.instance.process, reader.cached_tokens


class Scene:
    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.workers: list[RunningWorker] = []

    async def add_workers(self, number: int) -> None:
        self.workers += [await self.lab.worker(f"w{index}", sim(PRICED)) for index in range(number)]

    async def start_router(self, new_router: NewRouter, name: str = "router") -> RouterService:
        service = RouterService(await self.lab.runtime(name), NAMESPACE, new_router)
        await service.start()
        self.lab._closing.append(service.close)
        return service

    async def start_edge(self, name: str = "edge") -> Edge:
        runtime = await self.lab.runtime(name)
        routers = await runtime.client(router_endpoint(NAMESPACE))
        client = await runtime.client(self.workers[0].endpoint)
        link = RouterLink(runtime, routers)
        self.lab._closing.append(link.close)
        await until(lambda: len(client.candidates()) == len(self.workers) and link.present)
        router = RemoteRouter(link, client, RoundRobinRouter(client), BLOCK)
        return Edge(runtime, client, link, router, JourneyContext(router, client, TaskGroup("requests")))


def scene(body: Any, num_workers: int = 2) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            here = Scene(lab)
            await here.add_workers(num_workers)
            await body(here)

    run_virtual(scenario)


def router_of(service: RouterService) -> Any:
    (component,) = service.components.values()
    return deciding_router(component.router)


def inner_of(service: RouterService) -> EventFedRouter:
    router = router_of(service)
    assert isinstance(router, EventFedRouter)
    return router


def under_way(router: Any) -> int:
    counted = router.num_in_flight
    return sum(counted.values()) if isinstance(counted, dict) else counted


def latency(context: RouterContext) -> Router:
    return ROUTERS["latency"](context)


def test_reservations_of_frontends_are_shared_until_released() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edges = [await here.start_edge(f"edge-{number}") for number in range(2)]
        sent = [(edge, await edge.book(5)) for edge in edges]
        chosen = [decision.instance.id for _, decisions in sent for decision in decisions]
        assert sorted(map(chosen.count, set(chosen))) == [5, 5]
        assert service.num_held == under_way(router_of(service)) == 10
        assert service._describe()["sessions"] == 2
        for edge, decisions in sent:
            for decision in decisions[1:]:
                edge.router.mark_first_token(decision, 3)
                edge.router.release(decision, Usage(completion_tokens=7))
        await asyncio.sleep(TOLD_S)
        assert service.num_held == under_way(router_of(service)) == 2
        for edge, decisions in sent:
            for _ in range(2):
                edge.router.release(decisions[0], None)
            assert edge.router.num_in_flight == 0
        await asyncio.sleep(TOLD_S)
        assert service.num_held == under_way(router_of(service)) == 0

    scene(body)


def test_what_began_and_ended_reaches_the_router_with_its_figures() -> None:
    calls: list[tuple[str, Any]] = []

    class Listening(LeastLoadedRouter):
        def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
            calls.append(("begun", cached_tokens))

        def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
            calls.append(("free", usage))

    async def body(here: Scene) -> None:
        await here.start_router(lambda context: Listening(context.client))
        edge = await here.start_edge()
        first, second = await edge.book(2)
        edge.router.mark_first_token(first, 48)
        edge.router.release(first, Usage(100, 20, 48))
        edge.router.mark_first_token(second, None)
        await edge.book(1)
        assert calls == [("begun", 48), ("begun", None), ("free", Usage(100, 20, 48))], (
            "with the next question"
        )
        edge.router.release(second, None)
        await asyncio.sleep(TOLD_S)
        assert calls[3:] == [("free", None)]

    scene(body)


def test_many_releases_travel_in_few_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    updates: list[Any] = []

    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        decisions = await edge.book(300)
        hear = service_module.FrontendReservations.apply_updates

        def listen(session: service_module.FrontendReservations, started_at: Any, freed: Any) -> None:
            updates.append(freed)
            hear(session, started_at, freed)

        monkeypatch.setattr(service_module.FrontendReservations, "apply_updates", listen)
        for decision in decisions:
            edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == 0
        assert [len(freed) for freed in updates] == [300]

    scene(body)


@pytest.mark.parametrize("silent", [False, True])
def test_a_frontend_that_dies_frees_all_that_it_had(silent: bool) -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        dying, living = [await here.start_edge(f"edge-{number}") for number in range(2)]
        await dying.book(7)
        await living.book(3)
        assert service.num_held == 10
        here.lab.network.crash("edge-0", silent=silent)
        # Without a word it may be stalled, and its workers go on with what it has: that counts for the grace.
        await until(lambda: service.num_held == 3, 35.0 if silent else 1.0)
        assert under_way(router_of(service)) == 3
        assert len(service.sessions) == 1

    scene(body)


def test_a_link_closed_with_pending_updates_leaves_nothing() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        decisions = await edge.book(2)
        edge.router.release(decisions[0], None)
        await edge.link.close()
        await asyncio.sleep(TOLD_S)
        assert service.num_held == under_way(router_of(service)) == 0
        edge.router.release(decisions[1], None)

    scene(body)


def test_many_first_questions_at_once_begin_one_session() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        decisions = await asyncio.gather(*(edge.router.route(make_request(f"r{n}")) for n in range(5)))
        assert (len(service.sessions), len(service.components)) == (1, 1)
        assert service.num_held == len(decisions) == 5

    scene(body)


def test_a_router_that_cannot_be_connected_to_is_left_alone_for_a_while() -> None:
    async def body(here: Scene) -> None:
        await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        here.lab.network.partition("edge", "router")
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await edge.book(10)
        assert loop.time() - started_at == pytest.approx(1.0, abs=0.01), "one deadline, not one each"
        assert sum(edge.link.stats.fallbacks.values()) == 10
        assert edge.link.stats.num_answered == 0

    scene(body)


def test_requests_without_a_session_and_queries_reserve_nothing() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(latency)
        edge = await here.start_edge()
        route_request = to_route_request(str(here.workers[0].endpoint), make_request(), frozenset(), BLOCK)
        answer = await edge.link._call(route_request, edge.link._client.candidates()[0])
        assert answer.instance is not None
        asking = msgspec.structs.replace(make_request(), routing=RoutingHints(query_only=True))
        seen = await edge.router.route(asking)
        assert service.num_held == inner_of(service).num_in_flight == 0
        edge.router.release(seen, None)
        await asyncio.sleep(TOLD_S)
        assert [type(router) for router in service.routers()] == [QueueRouter]

    scene(body)


def test_what_is_decided_for_a_session_that_is_over_is_over() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        await edge.book(1)
        router = router_of(service)
        (session,) = service.sessions.values()
        session.close()
        session.hold(9, router, await router.route(make_request()))
        assert session.num_held == under_way(router) == 0

    scene(body)


def test_a_wait_cancelled_in_the_tick_of_its_decision_reserves_nothing() -> None:
    async def body(here: Scene) -> None:
        made = QueueEntry()
        await here.start_router(made)
        edge = await here.start_edge()
        edge.router.release((await edge.book(1))[0], None)
        await asyncio.sleep(TOLD_S)
        assert made.inner is not None
        assert made.router is not None
        made.inner.has_room = False
        task_group = TaskGroup("waiting")
        async with service_module._PendingRoute(
            task_group, made.router, make_request(), frozenset()
        ) as pending:
            assert not await pending.wait()
            made.inner.has_room = True
            made.inner.on_capacity_freed()
            await until(pending._task.done)
        assert not made.inner.booked

    scene(body)


def test_nothing_ends_by_age() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        await edge.book(2)
        await asyncio.sleep(2 * 3600)
        assert service.num_held == 2

    scene(body)


def test_a_cancelled_route_request_leaves_no_reservation() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        await edge.book(1)
        task_group = TaskGroup("asking")
        for pause_s in (0.0, 0.0003, 0.0006, 0.0009, 0.00099):  # on its way, there, and on its way back
            asking = task_group.start(edge.router.route(make_request()), "ask")
            await asyncio.sleep(pause_s)
            asking.cancel()
        await asyncio.sleep(TOLD_S)
        assert service.num_held == under_way(router_of(service)) == 1
        assert edge.router.num_in_flight == 1

    scene(body)


def test_the_next_router_starts_empty_and_old_releases_are_ignored() -> None:
    async def body(here: Scene) -> None:
        first = await here.start_router(ROUTERS["least-loaded"], "router-0")
        edge = await here.start_edge()
        before = await edge.book(4)
        await first._runtime.abort()
        second = await here.start_router(ROUTERS["least-loaded"], "router-1")
        await until(lambda: [router.process for router in edge.link._client.candidates()] == ["router-1"])
        after = await edge.book(3)
        assert second.num_held == 3
        for decision in before:
            edge.router.mark_first_token(decision, None)
            edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert second.num_held == 3
        for decision in after:
            edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert second.num_held == 0
        assert edge.router.num_in_flight == 0

    scene(body)


def test_local_decisions_are_reported_to_the_local_router() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        local = LeastLoadedRouter(edge.client)
        router = RemoteRouter(edge.link, edge.client, local)
        await service._runtime.abort()
        await until(lambda: not edge.link.present)
        decisions = [await router.route(make_request()) for _ in range(4)]
        assert under_way(local) == 4
        router.mark_first_token(decisions[0], None)
        for decision in decisions:
            router.release(decision, None)
        assert under_way(local) == router.num_in_flight == 0
        await router.close()

    scene(body)


def test_a_prompt_returns_to_its_worker_from_any_frontend() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(latency)
        edges = [await here.start_edge(f"edge-{number}") for number in range(2)]
        text = tuple(range(1, 8 * BLOCK + 4))
        first, cached = await edges[0].ask(prompt("a", text))
        assert not cached
        await asyncio.sleep(0.1)  # the worker's KV events reach the router
        for number, edge in enumerate([*edges, *edges]):
            again = await edge.ask(prompt(f"b{number}", text))
            assert again == (first, 8 * BLOCK)
        await asyncio.sleep(TOLD_S)
        assert inner_of(service).num_in_flight == service.num_held == 0

    scene(body, num_workers=3)


def test_a_cordoned_router_still_hears_what_is_over_and_drains_though_sessions_are_open() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        decisions = await edge.book(2)
        await service._runtime.cordon()
        for decision in decisions:
            edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == 0
        loop = asyncio.get_running_loop()
        started_at = loop.time()
        await service._runtime.drain(30.0)
        assert loop.time() - started_at < 1.0

    scene(body)


def test_updates_that_fail_are_sent_later() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        decisions = await edge.book(2)
        here.lab.network.partition("edge", "router")
        for decision in decisions:
            edge.router.release(decision, None)
        await asyncio.sleep(1.5)  # longer than it is tried, and not long enough for the connection to be lost
        assert service.num_held == 2
        here.lab.network.heal("edge", "router")
        await until(lambda: service.num_held == 0, 5.0)

    scene(body)


def test_an_unknown_session_is_opened_again() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        await edge.book(1)
        service.sessions.popitem()[1].close()
        await edge.book(1)
        assert edge.link.stats.num_answered == 3
        assert service.num_held == 1

    scene(body)


def test_what_is_held_is_bounded_and_nonsense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(here: Scene) -> None:
        monkeypatch.setattr(service_module, "MAX_SESSIONS", 1)
        monkeypatch.setattr(service_module, "MAX_HELD", 2)
        service = await here.start_router(ROUTERS["least-loaded"])
        edge = await here.start_edge()
        await edge.book(2)
        with pytest.raises(Overloaded, match="this frontend has 2 reservations"):
            await edge.book(1)
        to = Destination(service._runtime.plane.address or "", SESSION_ENDPOINT)
        for updates, error in (
            (OpenSession("other"), Overloaded),
            (ReservationUpdates("nobody"), None),
            ("?", KvoltError),
        ):
            async with await open_stream(edge.runtime.plane, to, updates, Deadlines()) as stream:
                if error is None:
                    assert await anext(stream, None) is None
                else:
                    with pytest.raises(error):
                        await anext(stream)
        monkeypatch.setattr(service_module, "MAX_SESSIONS", 9)
        known = next(iter(service.sessions))
        async with await open_stream(edge.runtime.plane, to, OpenSession(known), Deadlines()) as stream:
            with pytest.raises(KvoltError, match="already"):
                await anext(stream)
        assert service.num_held == 2

    scene(body)


def test_another_block_size_is_refused_with_both_named() -> None:
    async def body(here: Scene) -> None:
        await here.start_router(latency)
        edge = await here.start_edge()
        await edge.book(1)
        other = to_route_request(str(here.workers[0].endpoint), make_request(), frozenset(), BLOCK + 1)
        routed = await edge.link.route(other)
        assert routed is not None
        assert routed.response.refused is not None
        assert routed.response.refused.code == Unavailable.code
        assert f"{BLOCK} tokens here and {BLOCK + 1}" in routed.response.refused.message

    scene(body)


def test_a_worker_of_another_role_is_refused_with_both_named() -> None:
    async def body(here: Scene) -> None:
        await here.start_router(latency)
        edge = await here.start_edge()
        await edge.book(1)
        other = to_route_request(
            str(here.workers[0].endpoint), make_request(), frozenset(), BLOCK, Role.PREFILL
        )
        routed = await edge.link.route(other)
        assert routed is not None
        assert routed.response.refused is not None
        assert "is aggregated here and prefill at the caller" in routed.response.refused.message

    scene(body)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_a_pin_for_a_role_counts_among_the_workers_of_that_role(role: Role) -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(latency)
        edge = await here.start_edge()
        context = RouterContext(edge.client, edge.runtime, BLOCK, role=role)
        router = remote_router(edge.link, ROUTERS["latency"])(context)
        here.lab._closing.append(router.close)
        one, other = (each.id for each in edge.client.candidates())
        for number, pinned in enumerate((one, other) * 3):
            pins = {role: pinned, Role.AGGREGATED: InstanceId("somebody else")}
            request = msgspec.structs.replace(make_request(f"r{number}"), routing=RoutingHints(pins=pins))
            assert (await router.route(request)).instance.id == pinned
        assert service._describe()["decisions"] == 6, "the router process has decided all of them"

    scene(body)


def handed_over(request: Request, first_tokens: tuple[int, ...] | None = (5,)) -> Request:
    handoff = Handoff(
        ticket=b"secret",
        prefill_instance=InstanceId("p0"),
        block_hashes=request.sequence_hashes,
        token_ids=request.token_ids,
        first_tokens=first_tokens,
        cached_tokens=3,
    )
    return msgspec.structs.replace(request, handoff=handoff)


def test_a_route_request_carries_the_handoff() -> None:
    for first_tokens in ((5,), None):
        request = handed_over(prompt("r", tuple(range(1, 40))), first_tokens)
        route_request = to_route_request("ns.c.generate", request, frozenset(), BLOCK, Role.DECODE)
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(route_request), type=RouteRequest)
        assert (decoded.role, decoded.full_request().prefill_only) == (Role.DECODE, False)
        assert decoded.full_request().handoff == Handoff(
            ticket=b"", prefill_instance=InstanceId("p0"), first_tokens=first_tokens, cached_tokens=3
        )


def test_a_route_request_carries_prefill_only() -> None:
    request = msgspec.structs.replace(prompt("r", tuple(range(1, 40))), prefill_only=True)
    assert (
        to_route_request("ns.c.generate", request, frozenset(), BLOCK, Role.PREFILL)
        .full_request()
        .prefill_only
    )


def test_a_remote_router_forecasts_if_its_local_one_does() -> None:
    async def body(here: Scene) -> None:
        await here.start_router(latency)
        edge = await here.start_edge()
        context = RouterContext(edge.client, edge.runtime, BLOCK)
        alone = ROUTERS["latency"](context)
        asking = remote_router(edge.link, lambda context: alone)(context)
        here.lab._closing.append(asking.close)
        assert isinstance(alone, SupportsForecast)
        assert isinstance(asking, SupportsForecast)
        request = prompt("r", tuple(range(1, 200)))
        foreseen, alike = asking.forecast(request), alone.forecast(request)
        assert msgspec.structs.replace(foreseen, instance=alike.instance) == alike, (
            "two are as good, and chance decides"
        )
        assert not isinstance(edge.router, SupportsForecast), "round-robin has no forecast"

    scene(body)


def test_a_handoff_costs_the_same_at_the_router_process() -> None:
    async def body(here: Scene) -> None:
        await here.start_router(latency)
        edge = await here.start_edge()
        local = ROUTERS["latency"](RouterContext(edge.client, edge.runtime, BLOCK))
        here.lab._closing.append(local.close)
        whole = prompt("r", tuple(range(1, 200)))
        for request in (whole, handed_over(whole), handed_over(whole, None)):
            there = await edge.router.route(request)
            edge.router.release(there, None)
            await asyncio.sleep(TOLD_S)
            alone = await local.route(request)
            local.release(alone, None)
            assert there.predicted_ms == pytest.approx(alone.predicted_ms)
            assert there.overlap_blocks == alone.overlap_blocks
            assert (there.withdraw_hook is None) == (alone.withdraw_hook is None)

    scene(body)


def test_a_question_carries_hashes_and_lengths_and_no_tokens() -> None:
    request = msgspec.structs.replace(
        prompt("r", tuple(range(1, 40))),
        lora="sql",
        sampling=Sampling(seed=1, num_choices=3),
        stop=StopConditions(max_tokens=70, ignore_eos=True),
        grammar=Grammar(GrammarKind.REGEX, "a*" * 1000),
    )
    route_request = to_route_request(
        "ns.c.generate", request, frozenset([InstanceId("b"), InstanceId("a")]), BLOCK
    )
    assert route_request.excluded == ("a", "b")
    assert len(route_request.hashes) == 8 * len(request.sequence_hashes)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(route_request), type=RouteRequest)
    whole = decoded.full_request()
    assert whole.token_ids == ()
    assert whole.num_prompt_tokens == 39
    assert whole.sequence_hashes == request.sequence_hashes
    assert (whole.block_size, whole.lora) == (BLOCK, "sql")
    assert (whole.stop, whole.sampling) == (request.stop, Sampling(num_choices=3))
    assert whole.grammar == Grammar(GrammarKind.REGEX, "")
    with pytest.raises(ValueError, match="multiple of"):
        RouteRequest("e", request, hashes=b"123")


def test_a_route_request_carries_prior_token_counts() -> None:
    request = prompt("r", tuple(range(1, 40)))
    several = msgspec.structs.replace(
        request, sampling=Sampling(num_choices=3), prior_tokens_by_choice=((7, 8), None, ())
    )
    for routed, told in (
        (msgspec.structs.replace(request, prior_tokens=(7, 8)), (2,)),
        (several, (2, None, 0)),
    ):
        route_request = to_route_request("ns.c.generate", routed, frozenset(), BLOCK)
        assert route_request.prior_token_counts == told
        decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(route_request), type=RouteRequest)
        whole = decoded.full_request()
        assert whole.has_prior_tokens
        assert (whole.num_context_tokens, list(whole.open_choices)) == (41, list(routed.open_choices))
        assert 7 not in [token for tokens in whole.prior_tokens_by_choice for token in tokens or ()]
    with pytest.raises(ValueError, match="more tokens than an answer"):
        RouteRequest("e", request, prior_token_counts=(1 << 40,))


class Busy:
    """A router over all workers in turn that is saturated until released."""

    def __init__(self, context: RouterContext) -> None:
        self._client = context.client
        self.has_room = True
        self.on_capacity_freed: Callable[[], None] = lambda: None
        self.booked: dict[int, InstanceId] = {}
        self.num_booked = 0

    def try_route(
        self, request: Request, excluded: frozenset[InstanceId] = frozenset(), accepts: object = None
    ) -> Decision | None:
        left = [each for each in self._client.candidates() if each.id not in excluded]
        if not self.has_room:
            return None
        self.num_booked += 1
        self.booked[self.num_booked] = left[0].id
        return Decision(left[0], predicted_ms=1.0, reservation_id=self.num_booked)

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        decision = self.try_route(request, excluded)
        assert decision is not None
        return decision

    def find_choice(self, decision: Decision) -> WorkerChoice | None:
        return None

    def predict_ttft_s(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> float | None:
        return 0.0

    def queue_s(self, decision: Decision) -> float:
        return 100.0

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        pass

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None:
        self.booked.pop(decision.reservation_id, None)

    async def close(self) -> None:
        pass


class QueueEntry:
    """A router process in which requests wait."""

    def __init__(self) -> None:
        self.inner: Busy | None = None
        self.router: QueueRouter | None = None

    def __call__(self, context: RouterContext) -> Router:
        self.inner = Busy(context)
        clock = context.runtime.ports.clock
        self.router = QueueRouter(self.inner, clock.monotonic, QueueOptions(max_wait_s=60.0))
        return self.router


def test_a_request_queues_in_the_router_process() -> None:
    async def body(here: Scene) -> None:
        made = QueueEntry()
        service = await here.start_router(made)
        edge = await here.start_edge()
        (first,) = await edge.book(1)
        assert made.inner is not None
        assert made.router is not None
        made.inner.has_room = False
        task_group = TaskGroup("asking")
        waiting = [
            task_group.start(edge.router.route(make_request(f"w{index}")), "ask") for index in range(2)
        ]
        await asyncio.sleep(20.0)  # twenty times what a silent router would be given
        assert made.router.num_waiting == 2
        assert not edge.link.stats.fallbacks
        waiting[0].cancel()
        await asyncio.sleep(TOLD_S)
        assert made.router.num_waiting == 1
        made.inner.has_room = True
        edge.router.release(first, None)
        await until(waiting[1].done)
        assert service.num_held == len(made.inner.booked) == 1
        edge.router.release(waiting[1].result(), None)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == len(made.inner.booked) == 0

    scene(body)


def test_a_queue_timeout_at_the_router_process_is_no_fallback() -> None:
    async def body(here: Scene) -> None:
        made = QueueEntry()
        await here.start_router(made)
        edge = await here.start_edge()
        edge.router.release((await edge.book(1))[0], None)
        assert made.inner is not None
        made.inner.has_room = False
        with pytest.raises(Overloaded, match="no worker had capacity"):
            await edge.router.route(make_request())
        assert not made.inner.booked

    scene(body)


def test_an_unstarted_request_moves_on_a_reroute_notice() -> None:
    async def body(here: Scene) -> None:
        made = QueueEntry()
        service = await here.start_router(made)
        edge = await here.start_edge()
        decisions = await edge.book(2)
        moves: list[Decision] = []
        assert all(decision.withdraw_hook is not None for decision in decisions)
        for decision in decisions:
            assert decision.withdraw_hook is not None
            decision.withdraw_hook.try_move = lambda elsewhere: not moves.append(elsewhere)  # type: ignore[func-returns-value]
        await asyncio.sleep(0.1)
        edge.router.release((await edge.book(1))[0], None)  # something happens, so it looks again
        await until(lambda: bool(moves))
        assert moves[0].instance.id != decisions[1].instance.id
        assert made.inner is not None
        await asyncio.sleep(TOLD_S)
        assert service.num_held == len(made.inner.booked) == 2 + len(moves), (
            "here and there until it has moved"
        )
        for decision in [*decisions, *moves]:
            edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == len(made.inner.booked) == 0
        assert edge.router.num_in_flight == 0

    scene(body)


@pytest.mark.parametrize("why", ["begun", "refuses", "not carried", "unknown place"])
def test_a_late_reroute_notice_reserves_nothing(why: str) -> None:
    async def body(here: Scene) -> None:
        made = QueueEntry()
        service = await here.start_router(made)
        edge = await here.start_edge()
        (decision,) = await edge.book(1)
        assert decision.withdraw_hook is not None
        if why == "begun":
            edge.router.mark_first_token(decision, None)
        elif why == "refuses":
            decision.withdraw_hook.try_move = lambda elsewhere: False
        elif why == "unknown place":
            decision.withdraw_hook.try_move = lambda elsewhere: True
        assert made.inner is not None
        (session,) = service.sessions.values()
        _, held = session._held[1]
        elsewhere = made.inner.try_route(make_request())
        assert elsewhere is not None
        if why == "unknown place":
            gone = msgspec.structs.replace(elsewhere.instance, id=InstanceId("gone"))
            elsewhere = msgspec.structs.replace(elsewhere, instance=gone)
        assert held.withdraw_hook is not None
        assert held.withdraw_hook.try_move is not None
        assert held.withdraw_hook.try_move(elsewhere)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == len(made.inner.booked) == 1
        edge.router.release(decision, None)
        await asyncio.sleep(TOLD_S)
        assert service.num_held == len(made.inner.booked) == 0
        assert not held.withdraw_hook.try_move(elsewhere), "it is over"

    scene(body)


def test_a_closed_service_holds_nothing() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(latency)
        edge = await here.start_edge()
        await edge.book(3)
        router = inner_of(service)
        await service.close()
        assert (service.num_held, len(service.sessions), len(service.components)) == (0, 0, 0)
        assert router.num_in_flight == 0

    scene(body)


@pytest.mark.parametrize("seed", range(8))
def test_after_any_faults_only_requests_in_flight_are_reserved(seed: int) -> None:
    """Three frontends ask, begin, free and give up at random while the way to the router is cut and healed, briefly
    or until the connection is lost, and the router is killed and replaced."""

    async def body(here: Scene) -> None:
        rng = random.Random(seed)
        services = [await here.start_router(latency, "router-0")]
        edges = [await here.start_edge(f"edge-{number}") for number in range(3)]
        under_way: list[tuple[Edge, Decision]] = []
        asking = TaskGroup("asking", on_error=lambda error: None)

        async def ask(edge: Edge, patience_s: float) -> None:
            try:
                async with asyncio.timeout(patience_s):
                    decision = await edge.router.route(make_request())
            except TimeoutError:
                return
            under_way.append((edge, decision))

        async def heal(name: str, router: str, after_s: float) -> None:
            await asyncio.sleep(after_s)
            here.lab.network.heal(name, router)

        for _ in range(150):
            edge = rng.choice(edges)
            move = rng.random()
            if move < 0.5:
                asking.start(ask(edge, rng.choice([0.0005, 0.0011, 0.01, 5.0])), "ask")
            elif move < 0.8 and under_way:
                edge, decision = under_way.pop(rng.randrange(len(under_way)))
                if rng.random() < 0.5:
                    edge.router.mark_first_token(decision, None)
                edge.router.release(decision, None)
            elif move < 0.9:
                name, router = f"edge-{edges.index(edge)}", services[-1]._runtime.options.name
                here.lab.network.partition(name, router)
                asking.start(heal(name, router, rng.choice([0.2, 1.5, 8.0])), "heal")
            elif move < 0.93:
                await services[-1]._runtime.abort()
                services.append(await here.start_router(latency, f"router-{len(services)}"))
            await asyncio.sleep(rng.choice([0.0, 0.0003, 0.002, 0.05, 1.0]))
        await asking.drain()
        await asyncio.sleep(20.0)

        for edge in edges:
            mine = [decision for each, decision in under_way if each is edge]
            assert edge.router.num_in_flight == len(mine)
        held = [
            booked
            for edge, decision in under_way
            if isinstance(booked := edge.router._reserved[decision.reservation_id], RemoteReservation)
            and booked.session.is_open
        ]
        service = services[-1]
        assert service.num_held == len(held)
        if service.components:
            assert inner_of(service).num_in_flight == len(held)
        while under_way:
            edge, decision = under_way.pop()
            edge.router.release(decision, None)
        await asyncio.sleep(1.0)
        assert service.num_held == 0
        assert not any(edge.router.num_in_flight for edge in edges)

    scene(body)


def test_failures_that_several_frontends_see_open_one_breaker() -> None:
    async def body(here: Scene) -> None:
        service = await here.start_router(ROUTERS["round-robin"])
        edges = [await here.start_edge(f"edge{number}") for number in range(2)]
        broken: InstanceId | None = None
        for number in range(12):
            edge = edges[number % 2]
            (decision,) = await edge.book(1)
            broken = broken or decision.instance.id
            outcome = Outcome.FAILED if decision.instance.id == broken else Outcome.ANSWERED
            edge.router.release(decision, None, outcome)
            await asyncio.sleep(TOLD_S)
        (breaker,) = describe_breakers(service.routers())
        assert (breaker["worker"], breaker["state"]) == (broken, "open")
        series = f'endpoint="{edges[0].client.endpoint}",worker_id="{broken}"'
        assert f"kvolt_router_breaker_state{{{series}}} 2.0" in _exposed(service)
        for edge in edges:
            decisions = await edge.book(3)
            assert broken not in {decision.instance.id for decision in decisions}
            for decision in decisions:
                edge.router.release(decision, None)

    scene(body, 3)


@pytest.mark.parametrize("new_router", [latency, ROUTERS["round-robin"]], ids=["latency", "round-robin"])
def test_a_prompt_for_prefill_workers_that_all_fail_is_refused(new_router: NewRouter) -> None:
    """Also by the frontend, whose own router knows nothing of the failures. A pin is respected."""

    async def body(here: Scene) -> None:
        service = await here.start_router(new_router)
        edge = await here.start_edge()
        context = RouterContext(edge.client, edge.runtime, BLOCK, role=Role.PREFILL)
        router = remote_router(edge.link, ROUTERS["round-robin"])(context)
        here.lab._closing.append(router.close)
        prompt_only = msgspec.structs.replace(make_request("r"), prefill_only=True)
        for _ in range(6):
            router.release(await router.route(prompt_only), None, Outcome.FAILED)
            await asyncio.sleep(TOLD_S)
        assert [each["state"] for each in describe_breakers(service.routers())] == ["open", "open"]
        with pytest.raises(Unavailable, match="fail") as caught:
            await router.route(prompt_only)
        assert caught.value.fields["reason"] == "all_failing"
        pin = RoutingHints(pins={Role.PREFILL: edge.client.candidates()[0].id})
        router.release(await router.route(msgspec.structs.replace(prompt_only, routing=pin)), None)
        router.release(await router.route(make_request("an answer")), None)
        await asyncio.sleep(FIRST_BACKOFF_S)
        router.release(await router.route(prompt_only), None)  # a probe

    scene(body)


def _exposed(service: RouterService) -> str:
    registry = CollectorRegistry()
    registry.register(RouterCollector(service))
    return generate_latest(registry).decode()
