"""Journeys whose two workers have the request at the same time, on virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.unit.engines.lab import until
from tests.unit.journey.stage import Inbox
from tests.unit.journey.test_remote_prefill import Pair, Split, paired
from tests.unit.worker.test_roles import EXPECTED, asked, at_rest

from kvolt.core.errors import EngineFailed, KvoltError, Unavailable
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request, Role
from kvolt.journey import remote_prompt
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.prefill import RoleTarget
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.metrics import describe_breakers
from kvolt.router.port import Decision
from kvolt.router.selection.forecast import Forecast
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.worker.kv import rendezvous as meetings


def journey_context(pair: Pair, target: RoleTarget | None = None) -> JourneyContext:
    router = RoundRobinRouter(pair.client, Role.DECODE)
    return JourneyContext(
        router, pair.client, pair.task_group, prefill_modes=Split(target or pair.target), is_decode_first=True
    )


async def answered(journey: Journey, inbox: Inbox) -> None:
    await journey.start()
    await until(lambda: bool(inbox.ends))
    assert (inbox.ends, inbox.tokens()) == ([None], EXPECTED)


class Counting(RoundRobinRouter):
    """Tells what is booked."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.num_booked = self.num_freed = 0
        self.error: KvoltError | None = None

    async def route(self, request: Request, excluded: frozenset[Any] = frozenset()) -> Decision:
        if self.error is not None:
            raise self.error
        self.num_booked += 1
        return await super().route(request, excluded)

    def release(self, decision: Decision, usage: Any, outcome: object = None) -> None:
        self.num_freed += 1


def test_kv_comes_while_the_prompt_is_computed() -> None:
    async def body(pair: Pair) -> None:
        router = Counting(pair.target.client, Role.PREFILL)
        way, inbox = journey_context(pair, RoleTarget(router, pair.target.client)), Inbox()
        journey = Journey(way, asked(), inbox, Deadlines())
        await answered(journey, inbox)
        assert pair.air.num_pulls > 0
        assert way.stats.num_prefills == 1
        assert journey.prefill_decision is not None
        assert journey.stages is not None
        assert journey.stages.prefill_ms is not None
        assert journey.stages.transfer_path == "air"
        usage = inbox.items[-1].usage
        assert usage is not None
        assert (inbox.items[0].cached_tokens, usage.cached_tokens) == (0, 0)  # nobody had it before
        await at_rest(pair.prefill, pair.decode)
        assert (router.num_booked, router.num_freed) == (1, 1)
        assert not pair.air.offers

    paired(body)


def test_prefill_workers_without_room_are_not_waited_for() -> None:
    async def body(pair: Pair) -> None:
        class Full(Counting):
            async def route(self, request: Request, excluded: frozenset[Any] = frozenset()) -> Decision:
                await asyncio.Event().wait()
                raise AssertionError

        way, inbox = (
            journey_context(pair, RoleTarget(Full(pair.target.client, Role.PREFILL), pair.target.client)),
            Inbox(),
        )
        began_at = asyncio.get_running_loop().time()
        await answered(Journey(way, asked(), inbox, Deadlines()), inbox)
        assert asyncio.get_running_loop().time() - began_at < 2 * remote_prompt._RESERVE_S
        assert way.stats.prefill_failures == {"deadline_exceeded": 1}

    paired(body)


def test_a_prompt_is_held_for_as_long_as_its_prefill_worker_is_predicted_to_be_busy() -> None:
    async def body(pair: Pair) -> None:
        class Busy(Counting):
            def forecast(self, request: Request) -> Forecast:
                zeros = dict.fromkeys(Forecast.__struct_fields__, 0)
                return Forecast(**(zeros | {"instance": InstanceId("p"), "queue_s": 8.0}))  # type: ignore[arg-type]

            async def route(self, request: Request, excluded: frozenset[Any] = frozenset()) -> Decision:
                await asyncio.sleep(8.0)
                return await super().route(request, excluded)

        way = journey_context(pair, RoleTarget(Busy(pair.target.client, Role.PREFILL), pair.target.client))
        inbox = Inbox()
        journey = Journey(way, asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(inbox.ends), timeout_s=20)
        assert (inbox.ends, inbox.tokens()) == ([None], EXPECTED)
        assert (way.stats.num_prefills, way.stats.prefill_failures) == (1, {})

    paired(body)


def test_a_decode_worker_that_waits_for_a_prompt_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pair: Pair) -> None:
        compute = pair.prefill.engine.prefill

        async def late(request: Request) -> Any:
            await asyncio.sleep(50)
            return await compute(request)

        monkeypatch.setattr(pair.prefill.engine, "prefill", late)
        pair.decode.worker._progress._limit_s = 1.0
        inbox = Inbox()
        journey = Journey(journey_context(pair), asked(), inbox, Deadlines(first_s=100.0))
        await journey.start()
        await asyncio.sleep(10)
        assert not pair.decode.worker._progress.stuck
        await until(lambda: bool(inbox.ends), timeout_s=100)
        assert (inbox.ends, inbox.tokens()) == ([None], EXPECTED)

    paired(body)


def test_decode_worker_prefills_without_prefill_workers() -> None:
    async def body(pair: Pair) -> None:
        router = Counting(pair.target.client, Role.PREFILL)
        router.error = Unavailable("nobody is there", reason="no_workers")
        way, inbox = journey_context(pair, RoleTarget(router, pair.target.client)), Inbox()
        await answered(Journey(way, asked(), inbox, Deadlines()), inbox)
        assert pair.air.num_pulls == 0
        assert way.stats.prefill_failures == {"unavailable": 1}
        await at_rest(pair.prefill, pair.decode)

    paired(body)


def test_a_worker_that_cannot_be_met_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pair: Pair) -> None:
        monkeypatch.setattr(remote_prompt, "_new_rendezvous", lambda instance, reader: None)
        router, inbox = Counting(pair.target.client, Role.PREFILL), Inbox()
        way = journey_context(pair, RoleTarget(router, pair.target.client))
        await answered(Journey(way, asked(), inbox, Deadlines()), inbox)
        assert (router.num_booked, router.num_freed) == (1, 1)
        assert pair.air.num_pulls == 0

    paired(body)


def test_a_prefill_worker_that_fails_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pair: Pair) -> None:
        def refuse(request: Request) -> None:
            raise Unavailable("no room", reason="full")

        monkeypatch.setattr(pair.prefill.engine, "prefill", refuse)
        way, inbox = journey_context(pair), Inbox()
        await answered(Journey(way, asked(), inbox, Deadlines()), inbox)
        assert way.stats.num_prefills == 0
        assert sum(way.stats.prefill_failures.values()) == 1
        await at_rest(pair.prefill, pair.decode)

    paired(body)


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.002, 0.01, 0.05])
def test_who_leaves_frees_both_sides(after_s: float) -> None:
    async def body(pair: Pair) -> None:
        router, inbox = Counting(pair.target.client, Role.PREFILL), Inbox()
        journey = Journey(
            journey_context(pair, RoleTarget(router, pair.target.client)), asked(), inbox, Deadlines()
        )
        beginning = asyncio.ensure_future(journey.start())
        await asyncio.sleep(after_s)
        journey.cancel()
        await asyncio.wait([beginning])
        await at_rest(pair.prefill, pair.decode, timeout_s=2 * meetings.BEGIN_S)
        await until(lambda: router.num_booked == router.num_freed)
        assert inbox.ends == []

    paired(body, pull_s=0.004)


@pytest.mark.parametrize("is_decode_first", [False, True])
def test_prompts_that_fail_elsewhere_open_the_breaker_of_that_worker(is_decode_first: bool) -> None:
    """Every request is answered: who answers computes the prompt itself."""

    async def body(pair: Pair) -> None:
        async def fail(request: Request) -> None:
            raise EngineFailed("a kernel could not be launched")

        pair.prefill.engine.prefill = fail
        for number in range(3):
            way = replace(journey_context(pair), is_decode_first=is_decode_first)
            inbox = Inbox()
            request = msgspec.structs.replace(asked(), request_id=RequestId(f"r{number}"))
            await answered(Journey(way, request, inbox, Deadlines()), inbox)
            await until(lambda: not len(pair.task_group))
            assert way.stats.prefill_failures["engine_failed"] == 1
        (breaker,) = describe_breakers([pair.target.router])
        assert breaker["state"] == "open"

    paired(body)
