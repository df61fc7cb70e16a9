"""Journeys whose prompt is computed by one worker and gone on with by another; KV that nobody fetches is let go."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import Lab, RunningWorker, until
from tests.unit.journey.stage import Fixed, Inbox
from tests.unit.worker.test_roles import BLOCK, EXPECTED, Air, asked, at_rest, start

from kvolt.core.delta import StageTimes
from kvolt.core.errors import DeadlineExceeded, KvoltError, Unavailable
from kvolt.core.ids import BlockKey, InstanceId, RequestId
from kvolt.core.request import Handoff, MediaSpan, Request, Role
from kvolt.journey import prefill as prefill_module
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.prefill import PrefillCall, RoleTarget
from kvolt.journey.prefill_mode import PrefillMode, PrefillModePolicy, PrefillPlan
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual
from kvolt.worker.kv.tiering import Tiering


class Split(PrefillModePolicy):
    """Every prompt is computed by somebody else than answers it."""

    def __init__(self, target: RoleTarget) -> None:
        self._plan = PrefillPlan(PrefillMode.REMOTE, target)

    def plan(self, request: Request) -> PrefillPlan:
        return self._plan


@dataclass
class Pair:
    """A prefill worker, a decode worker, and a road through both."""

    prefill: RunningWorker
    decode: RunningWorker
    client: EndpointClient
    target: RoleTarget
    air: Air
    task_group: TaskGroup

    def journey_context(self, router: Any) -> JourneyContext:
        return JourneyContext(router, self.client, self.task_group, prefill_modes=Split(self.target))

    def decided(self) -> Decision:
        return Decision(self.client.candidates()[0])

    @property
    def is_met(self) -> bool:
        """Whether KV waits to be fetched."""
        return bool(self.air.offers)


def paired(body: Callable[[Pair], Coroutine[Any, Any, None]], pull_s: float = 0.001) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            air = Air(pull_s)
            prefill, to_prefill = await start(lab, air, Role.PREFILL)
            decode, client = await start(lab, air, Role.DECODE)
            await until(lambda: bool(client.candidates() and to_prefill.candidates()))
            task_group = TaskGroup("journeys", on_error=lab.errors.append)
            target = RoleTarget(RoundRobinRouter(to_prefill, Role.PREFILL), to_prefill)
            try:
                await body(Pair(prefill, decode, client, target, air, task_group))
                await until(lambda: not len(task_group), timeout_s=3)
            finally:
                await task_group.close()
            assert lab.errors == []

    run_virtual(scenario)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> list[RequestId]:
    """Requests that a worker was asked to let go of."""
    told: list[RequestId] = []
    ask = prefill_module.withdraw_request

    async def note(plane: Any, instance: Any, request_id: RequestId) -> bool:
        told.append(request_id)
        return await ask(plane, instance, request_id)

    monkeypatch.setattr(prefill_module, "withdraw_request", note)
    return told


class Onboarding:
    """Tiering of a prefill worker that has onboarded blocks before or while the prompt is computed."""

    def __init__(self, is_concurrent: bool) -> None:
        self._is_concurrent = is_concurrent

    def find_offloaded(self, request: Request) -> tuple[BlockKey, ...]:
        return (BlockKey(b"k" * 16),)

    async def onboard(self, request: Request, keys: tuple[BlockKey, ...]) -> StageTimes | None:
        return None if self._is_concurrent else StageTimes(onboard_ms=1.5, onboard_blocks=3)

    def has_concurrent(self, request_id: RequestId) -> bool:
        return self._is_concurrent

    async def onboard_concurrently(self, request_id: RequestId) -> StageTimes | None:
        return StageTimes(onboard_ms=1.5, onboard_blocks=3)


@pytest.mark.parametrize("is_concurrent", [False, True])
def test_stage_times_have_the_onboarding_of_the_prefill_worker(is_concurrent: bool) -> None:
    async def body(pair: Pair) -> None:
        intake = pair.prefill.worker._intake
        assert intake is not None
        intake._tiering = cast(Tiering, Onboarding(is_concurrent))
        inbox = Inbox()
        journey = Journey(pair.journey_context(RoundRobinRouter(pair.client)), asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert inbox.tokens() == EXPECTED
        assert journey.stages is not None
        assert (journey.stages.onboard_ms, journey.stages.onboard_blocks) == (1.5, 3)
        assert journey.stages.transfer_path == "air"
        assert journey.stages.prefill_ms is not None
        assert journey.stages.queue_ms is not None

    paired(body)


def test_waits_for_prefill_and_for_decode_are_apart() -> None:
    async def body(pair: Pair) -> None:
        router = Fixed(pair.decided())
        router.gate = asyncio.Event()
        inbox = Inbox()
        journey = Journey(pair.journey_context(router), asked(), inbox, Deadlines())
        asyncio.get_running_loop().call_later(3.0, router.gate.set)
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert (journey.stages.queue_ms, journey.decode_wait_s) == (0.0, pytest.approx(3.0, abs=0.5))

    paired(body)


def test_pulled_blocks_are_not_released_again(released: list[RequestId]) -> None:
    async def body(pair: Pair) -> None:
        inbox = Inbox()
        journey = Journey(pair.journey_context(RoundRobinRouter(pair.client)), asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, inbox.tokens()) == ([None], EXPECTED)
        await at_rest(pair.prefill, pair.decode)
        assert released == []

    paired(body)


def test_who_leaves_before_the_kv_was_fetched_leaves_none_behind() -> None:
    async def body(pair: Pair) -> None:
        router = Fixed(pair.decided())
        router.gate = asyncio.Event()
        journey = Journey(pair.journey_context(router), asked(), Inbox(), Deadlines())
        beginning = asyncio.ensure_future(journey.start())
        await until(lambda: pair.is_met and bool(router.excluded))
        journey.cancel()
        await at_rest(pair.prefill, timeout_s=0.5)  # long before its time is over
        assert not pair.is_met
        router.gate.set()
        await beginning

    paired(body)


def test_who_leaves_while_the_kv_comes_leaves_none_behind() -> None:
    async def body(pair: Pair) -> None:
        journey = Journey(pair.journey_context(RoundRobinRouter(pair.client)), asked(), Inbox(), Deadlines())
        await journey.start()
        await until(lambda: bool(pair.air.num_pulls))
        journey.cancel()
        await at_rest(pair.prefill, pair.decode, timeout_s=0.5)

    paired(body, pull_s=5.0)


def test_failed_answer_releases_its_kv() -> None:
    async def body(pair: Pair) -> None:
        router = Fixed(Unavailable("nobody", reason="none_reachable"))
        journey = Journey(pair.journey_context(router), asked(), Inbox(), Deadlines())
        with pytest.raises(Unavailable):
            await journey.start()
        await at_rest(pair.prefill, timeout_s=0.5)

    paired(body)


def test_an_answer_that_fails_before_the_kv_was_fetched_leaves_none_behind() -> None:
    async def body(pair: Pair) -> None:
        inbox = Inbox()
        journey_context = pair.journey_context(
            Fixed(pair.decided(), Unavailable("nobody else", reason="none_left"))
        )
        journey = Journey(journey_context, asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(pair.air.num_pulls))
        await pair.decode.worker.close()
        await until(lambda: bool(inbox.ends))
        assert inbox.ends[0] is not None
        await at_rest(pair.prefill, timeout_s=0.5)

    paired(body, pull_s=5.0)


class Faulty(Fixed):
    """With a bug that shows the second time."""

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        if self.excluded:
            raise RuntimeError("a bug")
        return await super().route(request, excluded)


def test_a_fault_of_ours_leaves_no_kv_behind(caplog: pytest.LogCaptureFixture) -> None:
    async def body(pair: Pair) -> None:
        inbox = Inbox()
        journey = Journey(pair.journey_context(Faulty(pair.decided())), asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(pair.air.num_pulls))
        await pair.decode.worker.close()
        await until(lambda: bool(inbox.ends))
        await at_rest(pair.prefill, timeout_s=0.5)

    with caplog.at_level(logging.CRITICAL):
        paired(body, pull_s=5.0)


def test_who_leaves_in_the_moment_the_prompt_is_computed_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(pair: Pair) -> None:
        inbox = Inbox()
        journey = Journey(pair.journey_context(Fixed(pair.decided())), asked(), inbox, Deadlines())
        on_end = PrefillCall.on_end

        def end_and_leave(call: PrefillCall, error: KvoltError | None) -> None:
            on_end(call, error)
            journey.cancel()

        monkeypatch.setattr(PrefillCall, "on_end", end_and_leave)
        await journey.start()
        assert inbox.items == []
        await at_rest(pair.prefill, timeout_s=0.5)

    paired(body)


def test_unreachable_worker_causes_no_delay() -> None:
    async def body(pair: Pair) -> None:
        router = Fixed(Unavailable("nobody", reason="none_reachable"))
        journey = Journey(pair.journey_context(router), asked(), Inbox(), Deadlines())
        assert pair.prefill.worker._intake is not None
        pair.prefill.worker._intake.withdraw = _never  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        with pytest.raises(Unavailable):
            await journey.start()
        ended_at = loop.time()
        assert len(pair.task_group) == 1, "it is being told"
        await until(lambda: not len(pair.task_group))
        assert loop.time() - ended_at < 3.0

    paired(body)


def test_a_prompt_that_takes_all_the_time_there_is_counts_as_one_that_failed() -> None:
    class Full(RoundRobinRouter):
        async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
            await asyncio.Event().wait()
            raise AssertionError

    async def body(pair: Pair) -> None:
        client = pair.target.client
        ways = Split(RoleTarget(Full(client, Role.PREFILL), client))
        journey_context = JourneyContext(
            RoundRobinRouter(pair.client), pair.client, pair.task_group, prefill_modes=ways
        )
        journey = Journey(journey_context, asked(), Inbox(), Deadlines(total_s=2.0))
        with pytest.raises(DeadlineExceeded, match="no prompt within 2 s"):
            await journey.start()
        assert journey.num_retries == 1
        assert journey_context.stats.prefill_failures == {"deadline_exceeded": 1}

    paired(body)


EXTRA = tuple(range(500, 500 + BLOCK))
"""What a picture in a prompt is expanded to."""
SPANS = (MediaSpan(0, BLOCK, b"digest of a picture"),)


def expanding(pair: Pair) -> None:
    """From now on the prefill worker expands prompts."""
    compute = pair.prefill.engine.prefill

    async def prefill(request: Request) -> Handoff:
        handoff: Handoff = await compute(replace(request, token_ids=EXTRA + request.token_ids, media=SPANS))
        return handoff

    pair.prefill.engine.prefill = prefill


def test_what_prefill_has_expanded_is_not_expanded_again() -> None:
    async def body(pair: Pair) -> None:
        expanding(pair)
        given: list[Request] = []
        submit = pair.decode.engine.submit

        def note(request: Request) -> None:
            given.append(request)
            submit(request)

        pair.decode.engine.submit = note
        inbox = Inbox()
        journey = Journey(pair.journey_context(RoundRobinRouter(pair.client)), asked(), inbox, Deadlines())
        await journey.start()
        await until(lambda: bool(inbox.ends))
        assert (inbox.ends, len(inbox.tokens())) == ([None], len(EXPECTED))
        (request,) = given
        assert (request.token_ids, request.media) == (EXTRA + asked().token_ids, SPANS)
        assert pair.air.num_pulls == 1
        usage = inbox.items[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == len(request.token_ids)
        assert pair.decode.worker.metrics._outcomes["finished"] == 1
        await at_rest(pair.prefill, pair.decode)

    paired(body)


def test_a_prompt_that_is_as_it_was_sent_does_not_travel_back() -> None:
    async def body(pair: Pair) -> None:
        target = pair.target
        handoff = await PrefillCall(target, replace(asked(), prefill_only=True), pair.task_group).run(
            frozenset(), Deadlines()
        )
        assert (handoff.token_ids, handoff.media) == ((), ())
        expanding(pair)
        again = replace(asked("again"), prefill_only=True)
        handoff = await PrefillCall(target, again, pair.task_group).run(frozenset(), Deadlines())
        assert (handoff.token_ids, handoff.media) == (EXTRA + again.token_ids, SPANS)

    paired(body)


async def _never(request_id: RequestId) -> bool:
    await asyncio.Event().wait()
    return False
