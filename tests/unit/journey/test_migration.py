"""Workers that are lost amid an answer: another goes on, and the receiver sees one answer."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import LIMITS, ScriptedEngine, is_empty, make_request, until
from tests.unit.journey.stage import Fixed, Inbox, Refusing, Stage, staged

from kvolt.core.delta import Delta, FinishReason, StepOutput, Usage
from kvolt.core.errors import (
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.engines.sim.model import word_token_ids
from kvolt.engines.sim.script import answer_tokens
from kvolt.journey.context import RerouteKey, RerouteOutcome
from kvolt.journey.events import JourneyState
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.migration import are_choices_finished
from kvolt.router.port import Decision

TOKENS = 12
R = RequestId("r")


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def expected(num_tokens: int = TOKENS, prompt: int = 20) -> list[int]:
    return answer_tokens(make_request(prompt=prompt).token_ids, 1, num_tokens, word_token_ids())


class Strikes:
    """Does something as soon as a receiver has so many tokens."""

    def __init__(self, inbox: Inbox, strikes: dict[int, Callable[[], None]]) -> None:
        self._inbox = inbox
        self._strikes = dict(strikes)
        inbox.watch = self._look

    def _look(self) -> None:
        for at in [at for at in self._strikes if self._inbox.num_tokens >= at]:
            asyncio.get_running_loop().call_soon(self._strikes.pop(at))


def crash(stage: Stage, number: int) -> Callable[[], None]:
    return lambda: stage.lab.network.crash(f"w{number}", silent=False)


def in_turn(stage: Stage) -> Fixed:
    """A router that names the workers one after the other."""
    return Fixed(*(stage.decision(number) for number in range(len(stage.workers))))


async def begun(stage: Stage, journey_context: JourneyContext, inbox: Inbox, tokens: int = TOKENS) -> Journey:
    journey = Journey(journey_context, make_request(tokens=tokens), inbox, LIMITS)
    await journey.start()
    return journey


# --- one answer


@pytest.mark.parametrize("cut", range(1, TOKENS))
def test_another_worker_continues_after_any_token(cut: int) -> None:
    async def body(stage: Stage) -> None:
        inbox, journey_context = Inbox(), stage.journey_context(in_turn(stage))
        Strikes(inbox, {cut: crash(stage, 0)})
        journey = await begun(stage, journey_context, inbox)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], expected())
        usage = Usage(prompt_tokens=20, completion_tokens=TOKENS)
        assert [delta.usage for delta in inbox.items if delta.usage is not None] == [usage]
        assert [delta.finish for delta in inbox.items if delta.finish is not None] == [FinishReason.LENGTH]
        assert [delta.cached_tokens for delta in inbox.items if delta.cached_tokens is not None] == [0]
        first, second = (stage.decision(number) for number in (0, 1))
        [booking] = stage.bookings
        assert booking.begun_once == [first, second]
        assert booking.usages == [None, usage]
        assert booking.excluded == [frozenset(), frozenset({first.instance.id})]
        assert [len(asked.prior_tokens) for asked in booking.asked] == [0, cut]
        assert (journey_context.stats.retries, journey_context.stats.migrations) == ({}, {"worker_lost": 1})
        assert journey.decision == second
        assert journey.num_attempts == 1
        [(kind, took)] = journey_context.stats.reroute_s.items()
        assert (kind, took.num_observed) == (RerouteKey(True, RerouteOutcome.SUCCESS), 1)
        assert 0 < took.total < 0.1
        stage.nothing_left()

    staged(body, lambda: [None, None])


def test_what_the_first_worker_said_of_the_prompt_stays_said() -> None:
    async def body(stage: Stage) -> None:
        # The second worker has it all by then; the first has it the next time.
        for number, cached in ((0, 0), (1, 0), (0, 16)):
            inbox = Inbox()
            if number:
                await begun(stage, stage.journey_context(Fixed(stage.decision(number))), inbox)
            else:
                await begun(stage, stage.journey_context(Fixed(stage.decision(0), stage.decision(1))), inbox)
            if cached:
                Strikes(inbox, {3: crash(stage, 0)})
            await until(lambda inbox=inbox: bool(inbox.ends))
            assert inbox.tokens() == expected()
            assert inbox.items[0].cached_tokens == cached
            assert all(delta.cached_tokens is None for delta in inbox.items[1:])
            assert inbox.items[-1].usage == Usage(20, TOKENS, cached)

    staged(body, lambda: [None, None])


def test_a_second_worker_may_be_lost_too(caplog: pytest.LogCaptureFixture) -> None:
    async def body(stage: Stage) -> None:
        inbox, journey_context = Inbox(), stage.journey_context(in_turn(stage))
        Strikes(inbox, {4: crash(stage, 0), 8: crash(stage, 1)})
        with caplog.at_level(logging.INFO, logger="kvolt.journey.attempt_state"):
            await begun(stage, journey_context, inbox)
            await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], expected())
        assert inbox.items[-1].usage == Usage(20, TOKENS)
        assert [len(asked.prior_tokens) for asked in stage.bookings[0].asked] == [0, 4, 8]
        assert journey_context.stats.migrations == {"worker_lost": 2}
        told = [record.getMessage() for record in caplog.records if "request migrated" in record.getMessage()]
        assert [text.split("tokens=")[1].split()[0] for text in told] == ["4", "8"]
        stage.nothing_left()

    staged(body, lambda: [None, None, None])


def test_log_probabilities_and_the_prompts_come_once() -> None:
    async def body(stage: Stage) -> None:
        request = make_request(tokens=8)
        request = replace(request, sampling=replace(request.sampling, logprobs=2, prompt_logprobs=1))
        answers = []
        for struck in (False, True):
            inbox = Inbox()
            if struck:
                Strikes(inbox, {3: crash(stage, 0)})
            await Journey(stage.journey_context(in_turn(stage)), request, inbox, LIMITS).start()
            await until(lambda inbox=inbox: bool(inbox.ends))
            assert [delta.prompt_logprobs is not None for delta in inbox.items] == [True] + [False] * 7
            answers.append([delta.logprobs for delta in inbox.items])
        assert answers[0] == answers[1]

    staged(body, lambda: [None, None])


def test_held_answer_stays_held_after_migration() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = Journey(
            stage.journey_context(in_turn(stage)), make_request(tokens=400, prompt=5), inbox, LIMITS
        )
        await journey.start()
        await until(lambda: inbox.num_tokens >= 5)
        journey.hold()
        crash(stage, 0)()
        await until(lambda: bool(stage.workers[1].worker._open))
        await asyncio.sleep(8)  # all are made by now
        assert inbox.num_tokens < 400
        journey.release()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], expected(400, prompt=5))

    staged(body, lambda: [None, None])


# --- several choices


def test_each_choice_continues_after_its_own_tokens() -> None:
    async def body(stage: Stage) -> None:
        request = make_request(tokens=9, choices=3)
        undisturbed = Inbox(3)
        await Journey(stage.journey_context(Fixed(stage.decision(1))), request, undisturbed, LIMITS).start()
        await until(lambda: bool(undisturbed.ends))
        for cut in range(1, 20, 3):
            inbox, journey_context = (
                Inbox(3),
                stage.journey_context(Fixed(stage.decision(0), stage.decision(1))),
            )
            Strikes(inbox, {cut: lambda: stage.lab.network.cut("w0", "caller", silent=False)})
            await Journey(journey_context, request, inbox, LIMITS).start()
            await until(lambda inbox=inbox: bool(inbox.ends))
            assert inbox.ends == [None]
            for index in range(3):
                assert inbox.tokens(index) == undisturbed.tokens(index)
            told = [delta.usage.completion_tokens for delta in inbox.items if delta.usage is not None]
            assert told == [9, 9, 9]
            assert sum(delta.cached_tokens is not None for delta in inbox.items if not delta.index) == 1
            assert journey_context.stats.migrations == {"worker_lost": 1}
            usage = stage.bookings[-1].usages[-1]
            assert usage is not None
            assert usage.completion_tokens == 27
            await until(lambda: len(stage.client.candidates()) == 2)
        stage.nothing_left()

    staged(body, lambda: [None, None])


def scripted(number: int) -> Callable[[], list[ScriptedEngine]]:
    return lambda: [ScriptedEngine() for _ in range(number)]


async def given(stage: Stage, number: int, *deltas: Delta) -> Request:
    """What a worker was asked, once it was; it says all this and no more."""
    engine = stage.workers[number].engine
    await until(lambda: bool(engine.submitted))
    for delta in deltas:
        engine.put(StepOutput(((R, delta),)))
    request = engine.submitted[0]
    assert isinstance(request, Request)
    return request


def test_a_choice_that_is_over_is_not_computed_again() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox(4)
        request = make_request(tokens=3, choices=4)
        await Journey(stage.journey_context(in_turn(stage)), request, inbox, LIMITS).start()
        said = (
            Delta((300,), cached_tokens=4),
            Delta((301, 302), index=1, finish=FinishReason.STOP, usage=Usage(20, 2)),
            Delta((303, 304, 305), index=3),  # all that it may have, without a word that it is over
        )
        await given(stage, 0, *said)
        await until(lambda: inbox.num_tokens == 6)
        crash(stage, 0)()
        rest = await given(
            stage, 1, Delta((306,), index=2, finish=FinishReason.STOP, usage=Usage(20, 1)), Delta((307, 308))
        )
        assert (rest.prior_tokens, rest.prior_tokens_by_choice) == ((), ((300,), None, (), None))
        await until(lambda: inbox.num_tokens == 9)
        stage.workers[1].engine.put(
            StepOutput(((R, Delta((), finish=FinishReason.LENGTH, usage=Usage(20, 3))),))
        )
        await until(lambda: bool(inbox.ends))
        assert inbox.ends == [None]
        assert [inbox.tokens(index) for index in range(4)] == [
            [300, 307, 308],
            [301, 302],
            [306],
            [303, 304, 305],
        ]
        ends = [(delta.index, delta.finish) for delta in inbox.items if delta.finish is not None]
        stop, length = FinishReason.STOP, FinishReason.LENGTH
        assert ends == [(1, stop), (3, length), (2, stop), (0, length)]
        usage = stage.bookings[0].usages[-1]
        assert usage is not None
        assert usage.completion_tokens == 9
        stage.nothing_left()

    staged(body, scripted(2))


# --- nothing is missing but the end


@pytest.mark.parametrize(
    ("tokens", "finish", "reason"),
    [
        ((300, 301, 302), FinishReason.LENGTH, None),
        ((300, 7), FinishReason.STOP, None),
        ((300, 99), FinishReason.STOP, 99),
    ],
)
@pytest.mark.parametrize("limit", [0, 3])
def test_an_answer_that_has_all_its_tokens_ends_without_another_worker(
    tokens: tuple[int, ...], finish: FinishReason, reason: int | None, limit: int
) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey_context = dataclasses.replace(
            stage.journey_context(in_turn(stage), migration_limit=limit), eos_token_ids=(7,)
        )
        request = make_request(tokens=3)
        request = replace(request, stop=replace(request.stop, stop_token_ids=(99,)))
        await Journey(journey_context, request, inbox, LIMITS).start()
        await given(stage, 0, Delta(tokens, cached_tokens=0))
        await until(lambda: bool(inbox.items))
        crash(stage, 0)()
        await until(lambda: bool(inbox.ends))
        assert inbox.ends == [None]
        last = inbox.items[-1]
        assert (last.token_ids, last.finish, last.stop_reason) == ((), finish, reason)
        assert last.usage == Usage(20, len(tokens))
        assert stage.bookings[0].usages == [last.usage]
        assert stage.workers[1].engine.submitted == []
        assert not journey_context.stats.migrations

    staged(body, scripted(2))


def test_a_receiver_that_leaves_with_the_last_of_these_ends_hears_no_more() -> None:
    """As one does that has several choices: with the last of them it needs no worker."""

    async def body(stage: Stage) -> None:
        inbox = Inbox(2)
        journey = Journey(
            stage.journey_context(in_turn(stage)), make_request(tokens=2, choices=2), inbox, LIMITS
        )
        inbox.watch = lambda: journey.cancel() if are_choices_finished(inbox.received_tokens()) else None
        await journey.start()
        await given(stage, 0, Delta((300, 301), cached_tokens=0), Delta((302, 303), index=1))
        await until(lambda: inbox.num_tokens == 4)
        crash(stage, 0)()
        await until(lambda: journey._machine.state is JourneyState.DONE)
        assert [delta.finish for delta in inbox.items[2:]] == [FinishReason.LENGTH] * 2
        await asyncio.sleep(0.1)
        assert inbox.ends == []
        assert stage.workers[1].engine.submitted == []

    staged(body, scripted(2))


def test_eos_that_is_ignored_ends_nothing() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey_context = dataclasses.replace(stage.journey_context(in_turn(stage)), eos_token_ids=(7,))
        request = make_request(tokens=3)
        request = replace(request, stop=replace(request.stop, ignore_eos=True))
        journey = Journey(journey_context, request, inbox, LIMITS)
        await journey.start()
        await given(stage, 0, Delta((300, 7), cached_tokens=0))
        await until(lambda: bool(inbox.items))
        crash(stage, 0)()
        assert (await given(stage, 1)).prior_tokens == (300, 7)
        journey.cancel()

    staged(body, scripted(2))


def test_a_worker_lost_between_the_last_delta_and_its_end_is_not_missed() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey = await begun(stage, stage.journey_context(in_turn(stage)), inbox)
        await given(stage, 0)
        journey.on_item(Delta((300,), cached_tokens=0))
        journey.on_item(Delta((301,), finish=FinishReason.STOP, usage=Usage(20, 2)))
        journey.on_end(WorkerLost("w0 was lost"))
        assert inbox.ends == [None]
        assert stage.bookings[0].usages == [Usage(20, 2)]
        crash(stage, 0)()
        await asyncio.sleep(0.1)
        assert stage.workers[1].engine.submitted == []

    staged(body, scripted(2))


# --- who else dies, refuses, or is not there


def test_an_engine_that_dies_is_replaced_and_a_second_one_ends_it() -> None:
    async def body(stage: Stage) -> None:
        inbox, journey_context = Inbox(), stage.journey_context(in_turn(stage))
        await begun(stage, journey_context, inbox)
        for number in range(2):
            await given(stage, number, Delta((300 + number,), cached_tokens=0))
            await until(lambda number=number: inbox.num_tokens == number + 1)
            stage.workers[number].engine.put(RuntimeError("a kernel failed"))
        await until(lambda: bool(inbox.ends))
        assert [type(error) for error in inbox.ends] == [EngineFailed]
        assert stage.workers[1].engine.submitted[0].prior_tokens == (300,)
        assert stage.workers[2].engine.submitted == [], "it may be the request"
        assert journey_context.stats.migrations == {"engine_died": 1}
        stage.lab.errors.clear()

    staged(body, scripted(3))


@pytest.mark.parametrize("number", [1, 2])
def test_when_all_workers_are_gone_the_error_says_so(number: int) -> None:
    async def body(stage: Stage) -> None:
        inbox, journey_context = Inbox(), stage.journey_context()
        journey = await begun(stage, journey_context, inbox)
        for turn in range(number):
            await until(lambda turn=turn: inbox.num_tokens >= 4 * (turn + 1))
            [holder] = [
                each for each in range(number) if stage.decision(each).instance == journey.decision.instance
            ]
            crash(stage, holder)()
        await until(lambda: bool(inbox.ends), journey_context.client.stall_grace_s + 5)
        [error] = inbox.ends
        assert isinstance(error, WorkerLost)
        assert (
            "the request could not be migrated to another worker: another instance cannot be reached; waited 30 s"
            in error.message
        )
        assert error.fields["gpu_work"] == "some"
        assert inbox.tokens() == expected()[: inbox.num_tokens]
        assert RerouteKey(True, RerouteOutcome.FAILURE) in journey_context.stats.reroute_s
        stage.nothing_left()

    staged(body, lambda: [None] * number)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_migrations_are_limited(limit: int) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        journey_context = stage.journey_context(in_turn(stage), migration_limit=limit)
        Strikes(inbox, {3 * (number + 1): crash(stage, number) for number in range(limit + 1)})
        await begun(stage, journey_context, inbox)
        await until(lambda: bool(inbox.ends))
        [error] = inbox.ends
        assert isinstance(error, WorkerLost)
        assert inbox.tokens() == expected()[: inbox.num_tokens]
        assert 3 * (limit + 1) <= inbox.num_tokens < TOKENS
        assert sum(journey_context.stats.migrations.values()) == limit
        assert ("the maximum set by migration_limit" in error.message) == (limit > 0)
        stage.nothing_left()

    staged(body, lambda: [None] * 4)


def test_refusing_worker_is_skipped() -> None:
    async def body(stage: Stage) -> None:
        inbox, journey_context = Inbox(), stage.journey_context(in_turn(stage))
        Strikes(inbox, {3: crash(stage, 0)})
        await begun(stage, journey_context, inbox)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], expected())
        [booking] = stage.bookings
        names = [stage.decision(number).instance.id for number in range(2)]
        assert booking.excluded == [frozenset(), frozenset(names[:1]), frozenset(names)]
        assert journey_context.stats.migrations == {"worker_lost": 1, "overloaded": 1}

    staged(body, lambda: [None, Refusing(Overloaded("full")), None])


@pytest.mark.parametrize("error", [InvalidRequest("bad"), Unsupported("cannot resume")], ids=repr)
def test_a_refusal_for_good_is_no_fault_of_the_request(error: KvoltError) -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        Strikes(inbox, {3: crash(stage, 0)})
        await begun(stage, stage.journey_context(in_turn(stage)), inbox)
        await until(lambda: bool(inbox.ends))
        [told] = inbox.ends
        assert isinstance(told, WorkerLost)
        assert told.message.endswith(f"the request could not be migrated to another worker: {error.message}")

    staged(body, lambda: [None, Refusing(error), None])


def test_who_was_lost_may_be_asked_again_once_it_got_further() -> None:
    """A cut connection is no dead worker."""

    async def body(stage: Stage) -> None:
        inbox, journey_context = (
            Inbox(),
            stage.journey_context(Fixed(*(stage.decision(number) for number in (0, 1, 0)))),
        )
        Strikes(inbox, {4: lambda: stage.lab.network.cut("w0", "caller", silent=False), 200: crash(stage, 1)})
        await begun(stage, journey_context, inbox, tokens=300)
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], expected(300))
        assert stage.bookings[0].excluded[-1] == {stage.decision(1).instance.id}

    staged(body, lambda: [None, None])


# --- cancelled, or too late


@pytest.mark.parametrize("moment", ["rerouting", "reopening", "migrating"])
def test_cancelled_amid_a_migration_it_leaves_nothing(moment: str) -> None:
    async def body(stage: Stage) -> None:
        inbox, router = Inbox(), in_turn(stage)
        journey_context = stage.journey_context(router)
        if moment == "reopening":
            stage.lab.network.crash("w1", silent=False)
            await asyncio.sleep(0.1)
            stage.lab.network.restart("w1")  # known, not connected
        journey = await begun(stage, journey_context, inbox)
        await given(stage, 0, Delta((300,), cached_tokens=0))
        await until(lambda: bool(inbox.items))
        gate = router.gate = asyncio.Event()
        if moment != "rerouting":
            gate.set()
        crash(stage, 0)()
        while journey._machine.state is not JourneyState(moment):
            await asyncio.sleep(0.0001)
        if moment == "migrating":
            await until(lambda: bool(stage.workers[1].engine.submitted))
        journey.cancel()
        gate.set()
        await asyncio.sleep(3)
        assert inbox.ends == []
        assert inbox.num_tokens == 1
        assert [kind.outcome for kind in journey_context.stats.reroute_s] == [RerouteOutcome.CANCELLED]
        second = stage.workers[1].engine
        assert len(second.aborted) == len(second.submitted) == (moment == "migrating")
        stage.nothing_left()

    staged(body, scripted(2))


class Dozing(Fixed):
    """Takes for ever when it is asked again."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if excluded:
            await asyncio.sleep(10_000)
        return await super().route(request, excluded)


@pytest.mark.parametrize("stage_told", ["route", "total"])
def test_deadline_includes_migrations(stage_told: str) -> None:
    async def body(stage: Stage) -> None:
        loop = asyncio.get_running_loop()
        inbox, started = Inbox(), loop.time()
        decisions = [stage.decision(0), stage.decision(1)]
        router = Dozing(*decisions) if stage_told == "route" else Fixed(*decisions)
        limits = replace(LIMITS, total_s=5.0, first_s=5.0)
        await Journey(stage.journey_context(router), make_request(), inbox, limits).start()
        await given(stage, 0, Delta((300,), cached_tokens=0))
        await asyncio.sleep(2)
        crash(stage, 0)()
        await until(lambda: bool(inbox.ends))
        [error] = inbox.ends
        assert isinstance(error, DeadlineExceeded)
        assert error.fields["stage"] == stage_told
        assert 4.9 < loop.time() - started < 5.2
        if stage_told == "total":
            assert stage.workers[1].engine.submitted[0].prior_tokens == (300,)
            await until(lambda: bool(stage.workers[1].engine.aborted))

    staged(body, scripted(2))


def test_silent_workers_are_replaced_once() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        limits = replace(LIMITS, between_s=1.0)
        await Journey(stage.journey_context(in_turn(stage)), make_request(), inbox, limits).start()
        await given(stage, 0, Delta((300,), cached_tokens=0))
        await until(lambda: bool(stage.workers[1].engine.submitted))
        assert stage.workers[1].engine.submitted[0].prior_tokens == (300,)
        assert stage.workers[0].engine.aborted, "the hung worker does not go on as well"
        await given(stage, 1, Delta((301,), cached_tokens=0))
        await until(lambda: bool(inbox.ends))
        [error] = inbox.ends
        assert isinstance(error, DeadlineExceeded)
        assert error.fields["stage"] == "between"
        assert inbox.tokens() == [300, 301]
        assert stage.workers[2].engine.submitted == []

    staged(body, scripted(3))


def test_total_deadline_is_not_retried() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        limits = replace(LIMITS, total_s=1.0)
        await Journey(stage.journey_context(in_turn(stage)), make_request(), inbox, limits).start()
        await given(stage, 0, Delta((300,), cached_tokens=0))
        await until(lambda: bool(inbox.ends))
        assert [type(error) for error in inbox.ends] == [DeadlineExceeded]
        assert stage.workers[1].engine.submitted == []

    staged(body, scripted(2))


def test_failed_migration_reports_both_reasons() -> None:
    async def body(stage: Stage) -> None:
        inbox = Inbox()
        router = Fixed(stage.decision(0), Unavailable("the pin is gone"))
        Strikes(inbox, {3: crash(stage, 0)})
        await begun(stage, stage.journey_context(router), inbox)
        await until(lambda: bool(inbox.ends))
        [error] = inbox.ends
        assert isinstance(error, WorkerLost)
        assert error.message.endswith("the pin is gone")
        assert is_empty(stage.workers[1].engine)

    staged(body, lambda: [None, None])
