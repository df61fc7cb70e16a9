"""The journey: goes where the router says, tries elsewhere while it may, and leaves nothing when cancelled."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import (
    ARGUMENTS,
    LIMITS,
    ScriptedEngine,
    is_empty,
    make_request,
    sim,
    until,
)
from tests.unit.journey.stage import Fixed, Inbox, Refusing, Stage, staged

from kvolt.core.delta import Delta, FinishReason, StepOutput, Usage
from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NetworkFault,
    Overloaded,
    Unavailable,
    Unsupported,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import Tier
from kvolt.core.request import KvSource, Request
from kvolt.engines.sim.engine import SimEngine
from kvolt.journey.events import JourneyState
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.prefill import withdraw_request
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, WithdrawHook
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing.cluster.deltas import Deltas


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


# --- the plain way


def test_deltas_come_and_leaving_cancels_up_to_the_engine() -> None:
    async def body(stage: Stage) -> None:
        (running,) = stage.workers
        async with await Deltas.of(
            stage.journey_context(), make_request("short", tokens=5), LIMITS
        ) as deltas:
            assert sum([len(delta.token_ids) async for delta in deltas]) == 5
            with pytest.raises(StopAsyncIteration):
                await anext(deltas)
        async with await Deltas.of(
            stage.journey_context(), make_request("long", tokens=300), LIMITS
        ) as deltas:
            await anext(deltas)
            assert not is_empty(running.engine)
        await until(lambda: is_empty(running.engine), 1.0)
        stage.nothing_left()

    staged(body, lambda: [None])


def test_the_decision_is_obeyed_and_its_sources_travel_with_the_request() -> None:
    engines = []

    async def body(stage: Stage) -> None:
        source = KvSource(InstanceId("peer"), Tier.HOST, 4)
        request = make_request()
        chosen = stage.decision(1)
        for decision, sources in ((replace(chosen, kv_sources=(source,)), (source,)), (chosen, ())):
            inbox = Inbox()
            journey = Journey(stage.journey_context(Fixed(decision)), request, inbox, LIMITS)
            await journey.start()
            assert journey.decision == decision
            await until(lambda: bool(engines[1].submitted))
            got = engines[1].submitted.pop()
            assert got.deadline_s is not None  # the worker's own addition
            assert got == replace(request, kv_sources=sources, deadline_s=got.deadline_s)
            journey.cancel()
            await until(lambda: bool(engines[1].aborted))
            engines[1].aborted.clear()
        assert engines[0].submitted == []

    def make() -> list[ScriptedEngine]:
        engines[:] = [ScriptedEngine(), ScriptedEngine()]
        return engines

    staged(body, make)


def test_the_router_hears_what_was_cached_and_what_it_came_to() -> None:
    async def body(stage: Stage) -> None:
        for name, tokens, choices, is_cancelled in (
            ("a", 6, 1, False),
            ("b", 4, 3, False),
            ("c", 300, 1, True),
        ):
            request = make_request(name, tokens=tokens, choices=choices)
            async with await Deltas.of(stage.journey_context(), request, LIMITS) as deltas:
                await anext(deltas)
                if not is_cancelled:
                    assert [delta async for delta in deltas]
        assert [booking.cached for booking in stage.bookings] == [[0], [16], [16]]
        first, several, cancelled = (booking.usages for booking in stage.bookings)
        assert first == [Usage(prompt_tokens=20, completion_tokens=6)]
        assert several == [Usage(prompt_tokens=20, completion_tokens=12, cached_tokens=16)]
        assert cancelled == [None]

    staged(body, lambda: [None])


def test_a_refusal_of_the_router_is_the_answer() -> None:
    async def body(stage: Stage) -> None:
        for error in (Overloaded("too many wait"), Unavailable("nobody")):
            inbox = Inbox()
            router = Fixed(error)
            journey = Journey(stage.journey_context(router), make_request(), inbox, LIMITS)
            with pytest.raises(type(error)):
                await journey.start()
            assert (inbox.items, inbox.ends) == ([], [])
            assert router.excluded == [frozenset()]
        with pytest.raises(Overloaded):
            await Deltas.of(stage.journey_context(Fixed(Overloaded("full"))), make_request(), LIMITS)

    staged(body, lambda: [None])


# --- taken back


def with_withdraw_hook(decision: Decision) -> Decision:
    return replace(decision, withdraw_hook=WithdrawHook())


async def waiting_at_first(
    stage: Stage, journey_context: JourneyContext, inbox: Inbox, decision: Decision
) -> Journey:
    """The first worker computes one long answer and can do no other: the request waits there."""
    journey = Journey(journey_context, make_request(tokens=6), inbox, LIMITS)
    await journey.start()
    await until(lambda: stage.workers[0].engine.load().waiting == 1)
    assert decision.withdraw_hook is not None
    assert decision.withdraw_hook.try_move is not None
    return journey


async def busy(stage: Stage) -> Journey:
    journey = Journey(
        stage.journey_context(Fixed(stage.decision(0))), make_request("long", tokens=400), Inbox(), LIMITS
    )
    await journey.start()
    await until(lambda: stage.workers[0].engine.load().running == 1)
    return journey


def alone() -> SimEngine:
    return sim(replace(ARGUMENTS, max_num_seqs=1))


def test_a_request_that_waits_at_its_worker_can_be_moved() -> None:
    async def body(stage: Stage) -> None:
        first = await busy(stage)
        inbox, here, there = (
            Inbox(),
            with_withdraw_hook(stage.decision(0)),
            with_withdraw_hook(stage.decision(1)),
        )
        journey_context = stage.journey_context(Fixed(here))
        journey = await waiting_at_first(stage, journey_context, inbox, here)
        booking = stage.bookings[-1]
        booking.open.append(there)
        assert here.withdraw_hook is not None
        assert here.withdraw_hook.try_move is not None
        assert here.withdraw_hook.try_move(there)
        assert not journey.move(there), "it is asked for already"
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 6)
        assert journey.decision is there
        assert (journey.num_attempts, journey_context.stats.num_moves, journey_context.stats.retries) == (
            1,
            1,
            {},
        )
        assert here.withdraw_hook.try_move is None
        assert booking.begun_once == [there]
        assert [usage is None for usage in booking.usages] == [True, False]
        first.cancel()
        await until(lambda: is_empty(stage.workers[0].engine))
        tokens = stage.workers[0].worker.metrics
        assert tokens._prompt_tokens == 20, "the other prompt was never computed there"

    staged(body, lambda: [alone(), None])


def test_what_its_worker_has_begun_stays_there() -> None:
    async def body(stage: Stage) -> None:
        inbox, here, there = (
            Inbox(),
            with_withdraw_hook(stage.decision(0)),
            with_withdraw_hook(stage.decision(1)),
        )
        journey_context = stage.journey_context(Fixed(here))
        journey = Journey(journey_context, make_request(tokens=6), inbox, LIMITS)
        await journey.start()
        booking = stage.bookings[-1]
        booking.open.append(there)
        assert journey.move(there), "nobody here knows yet that it is being computed"
        await until(lambda: there not in booking.open)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens, journey_context.stats.num_moves) == ([None], 6, 0)
        assert journey.decision is here
        assert not journey.move(there), "it is over"

    staged(body, lambda: [None, None])


@pytest.mark.parametrize("when", ["asking", "moved"])
def test_a_request_that_is_cancelled_while_it_is_moved_leaves_nothing(when: str) -> None:
    async def body(stage: Stage) -> None:
        first = await busy(stage)
        inbox, here, there = (
            Inbox(),
            with_withdraw_hook(stage.decision(0)),
            with_withdraw_hook(stage.decision(1)),
        )
        journey_context = stage.journey_context(Fixed(here))
        journey = await waiting_at_first(stage, journey_context, inbox, here)
        stage.bookings[-1].open.append(there)
        assert journey.move(there)
        if when == "moved":
            await until(lambda: journey_context.stats.num_moves == 1)
        journey.cancel()
        assert stage.bookings[-1].open == []
        first.cancel()
        await until(lambda: all(is_empty(running.engine) for running in stage.workers))
        await until(lambda: len(stage.task_group) == 0)
        assert inbox.ends == []
        stage.nothing_left()

    staged(body, lambda: [alone(), None])


def test_a_request_whose_new_worker_is_gone_is_tried_elsewhere() -> None:
    async def body(stage: Stage) -> None:
        first = await busy(stage)
        here = with_withdraw_hook(stage.decision(0))
        gone = Decision(replace(stage.decision(1).instance, id=InstanceId("gone"), address="w1:9"))
        inbox, journey_context = Inbox(), stage.journey_context(Fixed(here, stage.decision(1)))
        journey = await waiting_at_first(stage, journey_context, inbox, here)
        stage.bookings[-1].open.append(gone)
        assert journey.move(gone)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 6)
        assert (journey_context.stats.num_moves, journey_context.stats.retries, journey.num_attempts) == (
            1,
            {"connect_failed": 1},
            2,
        )
        first.cancel()

    staged(body, lambda: [alone(), None])


def test_who_may_not_be_moved_is_not() -> None:
    async def body(stage: Stage) -> None:
        first = await busy(stage)
        here = with_withdraw_hook(stage.decision(0))
        inbox, journey_context = Inbox(), replace_moves(stage.journey_context(Fixed(here)), 0)
        journey = await waiting_at_first(stage, journey_context, inbox, here)
        assert not journey.move(stage.decision(1))
        journey.cancel()
        first.cancel()

    staged(body, lambda: [alone(), None])


def replace_moves(journey_context: JourneyContext, max_moves: int) -> JourneyContext:
    return dataclasses.replace(journey_context, max_moves=max_moves)


def test_a_request_that_was_given_back_and_has_no_other_place_is_tried_elsewhere() -> None:
    async def body(stage: Stage) -> None:
        first = await busy(stage)
        here = with_withdraw_hook(stage.decision(0))
        inbox, journey_context = Inbox(), stage.journey_context(Fixed(here, stage.decision(1)))
        journey = await waiting_at_first(stage, journey_context, inbox, here)
        assert await withdraw_request(stage.client.plane, here.instance, journey.request.request_id)
        assert not await withdraw_request(stage.client.plane, here.instance, journey.request.request_id)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens, journey_context.stats.retries) == (
            [None],
            6,
            {"unavailable": 1},
        )
        nobody = replace(here.instance, address="w0:9")
        assert not await withdraw_request(stage.client.plane, nobody, journey.request.request_id)
        first.cancel()

    staged(body, lambda: [alone(), None])


@pytest.mark.parametrize(("num_tokens", "spent"), [(0, "none"), (2, "some")])
def test_an_error_says_whether_anything_was_computed(num_tokens: int, spent: str) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        await Journey(stage.journey_context(max_attempts=1), make_request(), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        (error,) = inbox.ends
        assert error is not None
        assert error.fields["gpu_work"] == spent

    staged(body, lambda: [Refusing(Overloaded("full"), num_tokens)])


# --- elsewhere


@pytest.mark.parametrize("error", [Overloaded("full"), Unavailable("draining")], ids=repr)
def test_a_worker_that_gives_up_early_is_replaced(error: KvoltError) -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0), stage.decision(1))
        journey_context = stage.journey_context(router)
        inbox = Inbox()
        journey = Journey(journey_context, make_request(tokens=6), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 6)
        first = stage.decision(0).instance.id
        assert router.excluded == [frozenset(), frozenset({first})]
        assert journey_context.stats.retries == {error.code: 1}
        assert journey.num_attempts == 2
        assert journey.decision == stage.decision(1)
        assert journey.instances == [stage.decision(0).instance, stage.decision(1).instance]
        assert journey.num_retries == 1
        stage.nothing_left()

    staged(body, lambda: [Refusing(error), None])


def test_a_lost_worker_is_replaced_before_its_first_token() -> None:
    async def body(stage: Stage) -> None:
        silent = stage.workers[0].engine
        inbox = Inbox()
        router = Fixed(stage.decision(0), stage.decision(1))
        journey_context = stage.journey_context(router)
        await Journey(journey_context, make_request(tokens=6), inbox, LIMITS).start()
        await until(lambda: bool(silent.submitted))
        stage.lab.network.crash("w0", silent=False)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 6)
        assert journey_context.stats.retries == {"worker_lost": 1}

    staged(body, lambda: [ScriptedEngine(), None])


def test_an_instance_that_cannot_be_reached_is_replaced_within_begin() -> None:
    async def body(stage: Stage) -> None:
        nobody = Decision(replace(stage.decision(0).instance, id=InstanceId("gone"), address="w0:9"))
        router = Fixed(nobody, stage.decision(1))
        journey_context = stage.journey_context(router)
        inbox = Inbox()
        journey = Journey(journey_context, make_request(tokens=3), inbox, LIMITS)
        await journey.start()
        assert journey.num_attempts == 2
        await until(lambda: inbox.ends == [None])
        assert journey_context.stats.retries == {"connect_failed": 1}
        assert router.excluded[-1] == {"gone"}

    staged(body, lambda: [None, None])


@pytest.mark.parametrize(
    "error", [Overloaded("full"), Unavailable("draining"), InvalidRequest("bad")], ids=repr
)
def test_after_the_first_token_nothing_is_tried_again_where_it_may_not(error: KvoltError) -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0), stage.decision(1))
        journey_context = stage.journey_context(
            router, migration_limit=3 if isinstance(error, InvalidRequest) else 0
        )
        inbox = Inbox()
        await Journey(journey_context, make_request(), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        assert [type(end) for end in inbox.ends] == [type(error)]
        assert inbox.num_tokens == 2
        assert len(router.excluded) == 1
        assert not journey_context.stats.retries
        stage.nothing_left()

    staged(body, lambda: [Refusing(error, 2), None])


def test_the_only_worker_that_crashes_after_its_first_token_ends_the_stream() -> None:
    async def body(stage: Stage) -> None:
        async with await Deltas.of(stage.journey_context(), make_request(tokens=300), LIMITS) as deltas:
            await anext(deltas)
            stage.lab.network.crash("w0", silent=False)
            with pytest.raises(NetworkFault):
                async for _ in deltas:
                    pass

    staged(body, lambda: [None])


@pytest.mark.parametrize("error", [EngineFailed("oops"), KvoltError("internal error (KeyError)")], ids=repr)
def test_what_a_worker_fails_at_is_retried_at_another(error: KvoltError) -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0), stage.decision(1))
        journey_context, inbox = stage.journey_context(router), Inbox()
        await Journey(journey_context, make_request(), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        assert inbox.ends == [None]
        assert journey_context.stats.retries == {error.code: 1}
        stage.nothing_left()

    staged(body, lambda: [Refusing(error), None])


@pytest.mark.parametrize("error", [Unsupported("oops"), InvalidRequest("bad")], ids=repr)
def test_what_another_worker_could_not_do_better_is_final(error: KvoltError) -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0), stage.decision(1))
        inbox = Inbox()
        await Journey(stage.journey_context(router), make_request(), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        assert [type(end) for end in inbox.ends] == [type(error)]
        assert len(router.excluded) == 1

    staged(body, lambda: [Refusing(error), None])


@pytest.mark.parametrize("max_attempts", [1, 2, 3])
def test_attempts_are_bounded_and_each_goes_to_another(max_attempts: int) -> None:
    async def body(stage: Stage) -> None:
        journey_context = stage.journey_context(max_attempts=max_attempts)
        inbox = Inbox()
        journey = Journey(journey_context, make_request(), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert [type(end) for end in inbox.ends] == [Overloaded]
        assert journey.num_attempts == max_attempts
        asked = [len(running.engine.submitted) for running in stage.workers]
        assert sorted(asked, reverse=True) == [1] * max_attempts + [0] * (4 - max_attempts)
        assert sum(journey_context.stats.retries.values()) == max_attempts - 1

    staged(body, lambda: [Refusing(Overloaded("full")) for _ in range(4)])


def test_last_failure_is_reported_without_workers() -> None:
    async def body(stage: Stage) -> None:
        journey_context = stage.journey_context(max_attempts=5)
        inbox = Inbox()
        await Journey(journey_context, make_request(), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        (end,) = inbox.ends
        assert isinstance(end, Overloaded)
        assert end.message == "full"
        assert sum(journey_context.stats.retries.values()) == 1  # the third had nowhere to go, so it was none
        stage.nothing_left()

    staged(body, lambda: [Refusing(Overloaded("full")) for _ in range(2)])


def test_one_deadline_for_all_attempts() -> None:
    """Each of three silent workers is lost after a while; the time of the third ends with the request's."""

    async def body(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox()
        router = Fixed(stage.decision(0), stage.decision(1), stage.decision(2))
        limits = Deadlines(connect_s=1.0, first_s=5.0, between_s=5.0, total_s=5.0)
        started = loop.time()
        await Journey(stage.journey_context(router), make_request(), inbox, limits).start()
        for number in range(2):
            await asyncio.sleep(2)
            stage.lab.network.crash(f"w{number}", silent=False)
        await until(lambda: bool(inbox.ends))
        (end,) = inbox.ends
        assert isinstance(end, DeadlineExceeded)
        assert end.fields["stage"] == "total"
        assert 4.9 < loop.time() - started < 5.2
        last = stage.workers[2].engine
        assert 0.8 < last.submitted[0].deadline_s < 1.1
        await until(lambda: bool(last.aborted))

    staged(body, lambda: [ScriptedEngine() for _ in range(3)])


# --- cancel


@pytest.mark.parametrize("moment", ["new", "routing", "opening", "waiting", "streaming", "retrying", "ended"])
def test_cancelled_at_any_moment_it_leaves_nothing(moment: str) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        first, second = stage.workers
        router = Fixed(stage.decision(0), stage.decision(1))
        if moment == "opening":
            stage.lab.network.crash("w0", silent=False)
            await asyncio.sleep(0.1)
            stage.lab.network.restart("w0")  # known, not connected
        journey = Journey(stage.journey_context(router), make_request(tokens=200), inbox, LIMITS)
        gate = router.gate = asyncio.Event()
        begun = TaskGroup("begin", on_error=stage.lab.errors.append)
        if moment == "new":
            journey.cancel()
        else:
            task = begun.start(journey.start(), "begin")
        if moment in ("routing", "retrying"):
            await asyncio.sleep(0.1)
        if moment == "retrying":
            gate.set()
            await until(lambda: bool(first.engine.submitted))
            gate.clear()
            stage.lab.network.crash("w0", silent=False)
            await until(lambda: len(router.excluded) == 2)
        if moment in ("opening", "waiting", "streaming", "ended"):
            gate.set()
        if moment == "opening":
            while journey._machine.state is not JourneyState.OPENING:
                await asyncio.sleep(0)
        if moment in ("waiting", "streaming", "ended"):
            await until(lambda: bool(first.engine.submitted))
            request_id = RequestId("r")
            if moment != "waiting":
                first.engine.put(StepOutput(((request_id, Delta((300,))),)))
                await until(lambda: bool(inbox.items))
            if moment == "ended":
                first.engine.put(StepOutput(((request_id, Delta((300,), finish=FinishReason.STOP)),)))
                await until(lambda: bool(inbox.ends))
        journey.cancel()
        journey.cancel()  # twice does no harm
        gate.set()
        await asyncio.sleep(3)
        assert inbox.ends == ([None] if moment == "ended" else [])
        assert len(begun) == 0
        if moment != "new":
            assert task.exception() is None
        stage.nothing_left()
        if moment != "retrying":  # a worker that was lost is told nothing
            for engine in (first.engine, second.engine):
                ended = moment == "ended" and engine is first.engine
                assert len(engine.aborted) == len(engine.submitted) - ended
        assert second.engine.submitted == []
        await begun.close()

    staged(body, lambda: [ScriptedEngine(), ScriptedEngine()])


def test_a_task_that_is_cancelled_within_begin_opens_nothing() -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0))
        router.gate = asyncio.Event()
        task_group = TaskGroup("ask")
        task = task_group.start(Deltas.of(stage.journey_context(router), make_request(), LIMITS), "ask")
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.sleep(0.1)
        router.gate.set()
        await asyncio.sleep(1)
        assert task.cancelled()
        assert stage.workers[0].engine.submitted == []
        await task_group.close()

    staged(body, lambda: [ScriptedEngine()])


def test_a_task_that_is_cancelled_while_it_connects_books_nothing() -> None:
    async def body(stage: Stage) -> None:
        stage.lab.network.crash("w0", silent=False)
        await asyncio.sleep(0.1)
        stage.lab.network.restart("w0")  # known, not connected
        journey_context = stage.journey_context(Fixed(stage.decision(0)))
        journey = Journey(journey_context, make_request(), Inbox(), LIMITS)
        task_group = TaskGroup("ask")
        task = task_group.start(journey.start(), "ask")
        while journey._machine.state is not JourneyState.OPENING:
            await asyncio.sleep(0)
        [booking] = stage.bookings
        assert len(booking.open) == 1
        task.cancel()
        await asyncio.sleep(0.1)
        assert task.cancelled()
        assert (booking.num_booked, booking.open) == (1, [])
        await task_group.close()

    staged(body, lambda: [ScriptedEngine()])


def test_what_is_under_way_stays_booked() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        await Journey(stage.journey_context(), make_request(tokens=5), inbox, LIMITS).start()
        await until(lambda: bool(inbox.items))
        [booking] = stage.bookings
        assert len(booking.open) == 1
        await until(lambda: bool(inbox.ends))
        assert (booking.num_booked, booking.open) == (1, [])

    staged(body, lambda: [None])


def test_cancelling_sends_and_counts_nothing() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey_context = stage.journey_context()
        journey = Journey(journey_context, make_request(tokens=200), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.items))
        journey.cancel()
        seen = len(inbox.items)
        await asyncio.sleep(1)
        assert (len(inbox.items), inbox.ends) == (seen, [])
        assert not journey_context.stats.retries
        assert not any(isinstance(end, Cancelled) for end in inbox.ends)

    staged(body, lambda: [None])


# --- back-pressure


def test_a_held_journey_leaves_the_tokens_at_the_worker() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(), make_request(tokens=400, prompt=5), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.items))
        journey.hold()
        await asyncio.sleep(6)  # all are made by now
        seen = inbox.num_tokens
        assert seen < 400
        assert not inbox.ends
        await asyncio.sleep(LIMITS.between_s + 5)  # our own silence is not the worker's
        assert (inbox.num_tokens, inbox.ends) == (seen, [])
        journey.release()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.num_tokens) == ([None], 400)

    staged(body, lambda: [None])


def test_a_journey_held_before_it_has_a_worker_is_held_when_it_has_one() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(), make_request(tokens=400, prompt=5), inbox, LIMITS)
        journey.hold()
        await journey.start()
        await asyncio.sleep(8)
        assert inbox.num_tokens < 400
        assert not inbox.ends
        journey.release()
        await until(lambda: bool(inbox.ends))
        assert inbox.num_tokens == 400

    staged(body, lambda: [None])


def test_a_slow_reader_of_deltas_holds_the_worker_back() -> None:
    async def body(stage: Stage) -> None:
        journey_context = stage.journey_context()
        request = make_request(tokens=400, prompt=5)
        async with await Deltas.of(journey_context, request, LIMITS, hold_above=8) as deltas:
            await asyncio.sleep(8)
            assert 8 < len(deltas._items) < 300
            tokens = [token async for delta in deltas for token in delta.token_ids]
        assert len(tokens) == 400

    staged(body, lambda: [None])


class Dozing:
    """A router that takes for ever, or breaks, when it is asked again."""

    def __init__(self, first: Decision | None, fault: Exception | None = None) -> None:
        self._first = first
        self._fault = fault

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self._first is not None and not excluded:
            return self._first
        if self._fault is not None:
            raise self._fault
        await asyncio.sleep(10_000)
        raise AssertionError

    async def close(self) -> None: ...

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None: ...

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None: ...


@pytest.mark.parametrize(
    ("predicted_s", "ends"),
    [(None, (60.0, "first")), (5.0, (60.0, "first")), (90.0, (270.0, "first")), (400.0, (600.0, "total"))],
)
def test_a_first_token_predicted_to_take_long_is_waited_for_within_the_total(
    predicted_s: float | None, ends: tuple[float, str]
) -> None:
    async def body(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        predicted_ms = None if predicted_s is None else 1e3 * predicted_s
        router, inbox = Fixed(replace(stage.decision(0), predicted_ms=predicted_ms)), Inbox()
        started = loop.time()
        journey_context = dataclasses.replace(stage.journey_context(router), max_attempts=1)
        await Journey(journey_context, make_request(), inbox, Deadlines()).start()
        await until(lambda: bool(inbox.ends), 700.0)
        (end,) = inbox.ends
        assert isinstance(end, DeadlineExceeded)
        after_s, stage_name = ends
        assert end.fields["stage"] == stage_name
        assert after_s <= loop.time() - started < after_s + 1.0
        await until(lambda: bool(stage.workers[0].engine.aborted))

    staged(body, lambda: [ScriptedEngine()])


def test_the_wait_for_a_worker_is_a_stage() -> None:
    async def body(stage: Stage) -> None:
        router = Fixed(stage.decision(0))
        router.gate = asyncio.Event()
        asyncio.get_running_loop().call_later(3.0, router.gate.set)
        inbox = Inbox()
        journey = Journey(stage.journey_context(router), make_request(tokens=2), inbox, LIMITS)
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert journey.stages.queue_ms == pytest.approx(3000.0)
        assert journey.num_retries == 0

    staged(body, lambda: [None])


def test_a_router_has_no_more_time_than_the_request() -> None:
    async def body(stage: Stage) -> None:
        receiver = Inbox()
        limits = replace(LIMITS, total_s=0.2)
        journey = Journey(stage.journey_context(Dozing(None)), make_request(), receiver, limits)
        with pytest.raises(DeadlineExceeded) as caught:
            await journey.start()
        assert caught.value.fields["stage"] == "route"
        assert receiver.ends == []

    staged(body, lambda: [ScriptedEngine()])


def test_whatever_goes_wrong_on_the_second_try_the_receiver_hears_of_it() -> None:
    async def body(stage: Stage) -> None:
        receiver = Inbox()
        router = Dozing(stage.decision(0), ZeroDivisionError())
        await Journey(stage.journey_context(router), make_request(), receiver, LIMITS).start()
        await until(lambda: bool(receiver.ends), 2.0)
        assert [type(error) for error in receiver.ends] == [KvoltError]

    staged(body, lambda: [Refusing(Overloaded("full"))])


@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_request_blames_one_worker_however_many_fail_it(num_tokens: int) -> None:
    """It may be the request; and a worker that fails amid an answer has failed as well."""

    async def body(stage: Stage) -> None:
        inbox = Inbox()
        await Journey(stage.journey_context(), make_request(tokens=20), inbox, LIMITS).start()
        await until(lambda: bool(inbox.ends))
        assert [type(end) for end in inbox.ends] == [EngineFailed]
        (booking,) = stage.bookings
        assert booking.outcomes[0] is Outcome.FAILED
        assert set(booking.outcomes[1:]) == {Outcome.UNKNOWN}
        assert len(booking.outcomes) > 1

    staged(body, lambda: [Refusing(EngineFailed("oops"), num_tokens) for _ in range(5)])


def test_a_client_that_leaves_amid_its_answer_is_reported_as_such() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(stage.journey_context(), make_request(tokens=100), inbox, LIMITS)
        await journey.start()
        await until(lambda: inbox.num_tokens >= 2)
        journey.cancel()
        (booking,) = stage.bookings
        assert len(booking.begun_once) == 1
        assert booking.outcomes == [Outcome.LEFT]

    staged(body, lambda: [sim()])
