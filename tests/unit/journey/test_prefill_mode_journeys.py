"""Journeys on each way: whole requests at a prefill worker, what becomes of them, and whose bookings are whose."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import Lab, RunningWorker, until
from tests.unit.journey.stage import Booking, Fixed, Inbox
from tests.unit.worker.test_roles import EXPECTED, Air, asked, at_rest, read, start

from kvolt.core.delta import StageTimes
from kvolt.core.errors import EngineDied, EngineFailed, Unavailable, Unsupported
from kvolt.core.ids import InstanceId
from kvolt.core.request import LinkCosts, Request, Role
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.prefill import RoleTarget
from kvolt.journey.prefill_mode import PrefillMode, PrefillPlan
from kvolt.router.balancing import RoundRobinRouter
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


class Always:
    """The same way for every request; knows what was learned."""

    def __init__(self, way: PrefillMode, target: RoleTarget | None) -> None:
        self._plan = PrefillPlan(way, target)
        self.learned: list[tuple[StageTimes, InstanceId, InstanceId]] = []

    def plan(self, request: Request) -> PrefillPlan:
        return self._plan

    def observe_transfer(
        self, request: Request, stages: StageTimes, source: InstanceId, target: InstanceId
    ) -> None:
        self.learned.append((stages, source, target))

    def link_costs_from(self, source: InstanceId) -> LinkCosts:
        return LinkCosts(token_s=1.0, by_peer={source: 0.0})

    def link_costs_to(self, target: InstanceId) -> LinkCosts:
        return LinkCosts(token_s=2.0, by_peer={target: 0.0})


@dataclass
class Stage:
    prefill: RunningWorker
    decode: RunningWorker
    there: Booking
    here: Booking
    client: EndpointClient
    target: RoleTarget
    task_group: TaskGroup

    def journey_context(self, way: PrefillMode) -> tuple[JourneyContext, Always]:
        ways = Always(way, None if way is PrefillMode.LOCAL else self.target)
        return JourneyContext(self.here, self.client, self.task_group, prefill_modes=ways), ways

    async def answered(self, way: PrefillMode) -> Inbox:
        inbox = Inbox()
        await Journey(self.journey_context(way)[0], asked(), inbox, Deadlines()).start()
        await until(lambda: bool(inbox.ends))
        return inbox

    def booked(self) -> tuple[int, int]:
        return self.there.num_booked, self.here.num_booked


def staged(body: Callable[[Stage], Coroutine[Any, Any, None]], there: Any = None) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air()
            prefill, to_prefill = await start(lab, air, Role.PREFILL)
            decode, client = await start(lab, air, Role.DECODE)
            await until(lambda: bool(client.candidates() and to_prefill.candidates()))
            task_group = TaskGroup("journeys", on_error=lab.errors.append)
            booking = Booking(there or RoundRobinRouter(to_prefill, Role.PREFILL))
            stage = Stage(
                prefill,
                decode,
                booking,
                Booking(RoundRobinRouter(client)),
                client,
                RoleTarget(booking, to_prefill),
                task_group,
            )
            try:
                await body(stage)
                await until(lambda: not len(task_group), timeout_s=3)
            finally:
                await task_group.close()
            assert (stage.there.open, stage.here.open) == ([], []), "each was freed where it was booked"
            assert lab.errors == []

    run_virtual(scenario)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


@pytest.mark.parametrize(
    ("way", "booked"),
    [(PrefillMode.LOCAL, (0, 1)), (PrefillMode.REMOTE, (1, 1)), (PrefillMode.PREFILL_WORKER, (1, 0))],
    ids=list(PrefillMode),
)
def test_an_answer_is_the_same_on_each_way(way: PrefillMode, booked: tuple[int, int]) -> None:
    async def body(stage: Stage) -> None:
        inbox = await stage.answered(way)
        assert (inbox.ends, inbox.tokens(), stage.booked()) == ([None], EXPECTED, booked)
        asked_there = [request.prefill_only for request in stage.there.asked]
        assert (
            asked_there
            == {PrefillMode.LOCAL: [], PrefillMode.REMOTE: [True], PrefillMode.PREFILL_WORKER: [False]}[way]
        )
        assert not any(request.prefill_only for request in stage.here.asked)
        # Whoever answered hears of the first token and how long the answer got.
        answering = stage.there if way is PrefillMode.PREFILL_WORKER else stage.here
        assert len(answering.begun_once) == 1
        (usage,) = answering.usages
        assert usage is not None
        assert usage.completion_tokens == len(EXPECTED)
        await at_rest(stage.prefill, stage.decode)

    staged(body)


def test_how_long_kv_was_on_its_way_is_learned() -> None:
    async def body(stage: Stage) -> None:
        for way, num_learned in (
            (PrefillMode.REMOTE, 1),
            (PrefillMode.LOCAL, 0),
            (PrefillMode.PREFILL_WORKER, 0),
        ):
            journey_context, ways = stage.journey_context(way)
            inbox = Inbox()
            await Journey(journey_context, asked(way), inbox, Deadlines()).start()
            await until(lambda inbox=inbox: bool(inbox.ends))  # type: ignore[misc]
            assert len(ways.learned) == num_learned
            for stages, source, target in ways.learned:
                assert stages.transfer_bytes
                assert stages.transfer_ms
                assert (source, target) == _ids(stage)


def _ids(stage: Stage) -> tuple[InstanceId, InstanceId]:
    (prefill,), (decode,) = stage.target.client.candidates(), stage.client.candidates()
    return prefill.id, decode.id


@pytest.mark.parametrize("is_decode_first", [False, True])
def test_who_is_chosen_last_is_chosen_by_its_link_to_the_other(is_decode_first: bool) -> None:
    async def body(stage: Stage) -> None:
        journey_context, _ = stage.journey_context(PrefillMode.REMOTE)
        inbox = Inbox()
        journey_context = dataclasses.replace(journey_context, is_decode_first=is_decode_first)
        await Journey(journey_context, asked(), inbox, Deadlines()).start()
        await until(lambda: bool(inbox.ends))
        links = [each.routing.link_costs for each in (*stage.there.asked, *stage.here.asked)]
        prefill, decode = _ids(stage)
        if is_decode_first:
            assert links == [LinkCosts(token_s=2.0, by_peer={decode: 0.0}), None]
        else:
            assert links == [None, LinkCosts(token_s=1.0, by_peer={prefill: 0.0})]

    staged(body)

    staged(body)


def test_who_cannot_be_routed_there_is_answered_here() -> None:
    async def body(stage: Stage) -> None:
        inbox = await stage.answered(PrefillMode.PREFILL_WORKER)
        assert (inbox.ends, inbox.tokens(), stage.booked()) == ([None], EXPECTED, (0, 1))

    staged(body, Fixed(Unavailable("all are full", reason="none_reachable")))


@pytest.mark.parametrize("num_tokens", [0, 3], ids=["before a token", "amid the answer"])
def test_failed_request_continues_on_decode_workers(num_tokens: int) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(PrefillMode.PREFILL_WORKER)[0], asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: inbox.num_tokens >= num_tokens)
        await stage.prefill.worker.close()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens(), stage.booked()) == ([None], EXPECTED, (1, 1))
        (resumed,) = stage.here.asked
        assert bool(resumed.prior_tokens) is bool(num_tokens)
        assert stage.there.usages == [None]

    staged(body)


def test_leaving_while_it_is_answered_there_leaves_nothing() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(PrefillMode.PREFILL_WORKER)[0], asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(inbox.items))
        journey.cancel()
        assert stage.there.open == []
        await at_rest(stage.prefill, stage.decode)
        assert (inbox.ends, stage.booked()) == ([], (1, 0))

    staged(body)


def test_a_prompt_for_others_is_refused_by_who_hands_nothing_over() -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            alone, client = await start(lab, Air(), Role.AGGREGATED)
            with pytest.raises(Unsupported, match="aggregated does not serve remote prefill"):
                await read(client, replace(asked(), prefill_only=True))
            assert len(await read(client, asked("next"))) > 0, "nothing of it is left"
            await at_rest(alone)

    run_virtual(scenario)


def test_engines_that_die_of_it_there_and_here_end_it() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(PrefillMode.PREFILL_WORKER)[0], asked(), inbox, Deadlines())
        for running in (stage.prefill, stage.decode):
            running.engine.submit = _die
        with pytest.raises(EngineFailed, match="2 engines died"):
            await journey.start()
            await until(lambda: bool(inbox.ends))
            raise inbox.ends[0] or AssertionError("it was answered")

    staged(body)


def _die(request: Request) -> None:
    raise EngineDied("died of it")
