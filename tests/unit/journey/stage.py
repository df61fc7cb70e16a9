"""Workers, a client of theirs and a road to them on virtual time; routers and receivers that remember."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tests.unit.engines.lab import Lab, RunningWorker, ScriptedEngine, until

from kvolt.core.delta import Delta, StepOutput, Usage
from kvolt.core.errors import ErrorInfo, KvoltError
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.request import Request
from kvolt.journey.journey import JourneyContext
from kvolt.journey.migration import ChoiceTokens, ReceivedTokens
from kvolt.router.balancing import RoundRobinRouter
from kvolt.router.breaker import Outcome
from kvolt.router.port import Decision, Router
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.streams import StepSink
from kvolt.runtime.tasks import TaskGroup
from kvolt.testing import run_virtual


class Fixed:
    """A router that says the same each time, or what it is told next; knows what was asked of it."""

    def __init__(self, *decisions: Decision | KvoltError) -> None:
        self._decisions = list(decisions)
        self.excluded: list[frozenset[InstanceId]] = []
        self.gate: asyncio.Event | None = None

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        self.excluded.append(excluded)
        if self.gate is not None:
            await self.gate.wait()
        decision = self._decisions.pop(0) if len(self._decisions) > 1 else self._decisions[0]
        if isinstance(decision, KvoltError):
            raise decision
        return decision

    async def close(self) -> None: ...

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None: ...

    def release(self, decision: Decision, usage: Usage | None, outcome: object = None) -> None: ...


class Booking:
    """A router that asks another and knows which of its decisions are not over."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.num_booked = 0
        self.outcomes: list[Outcome] = []
        self.open: list[Decision] = []
        self.begun_once: list[Decision] = []
        self.cached: list[int | None] = []
        self.usages: list[Usage | None] = []
        self.asked: list[Request] = []
        self.excluded: list[frozenset[InstanceId]] = []

    async def route(self, request: Request, excluded: frozenset[InstanceId] = frozenset()) -> Decision:
        self.asked.append(request)
        self.excluded.append(excluded)
        decision = await self._router.route(request, excluded)
        self.num_booked += 1
        self.open.append(decision)
        return decision

    async def close(self) -> None:
        await self._router.close()

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        assert any(each is decision for each in self.open), "it is over, or never was"
        assert not any(each is decision for each in self.begun_once)
        self.begun_once.append(decision)
        self.cached.append(cached_tokens)
        self._router.mark_first_token(decision, cached_tokens)

    def release(self, decision: Decision, usage: Usage | None, outcome: Outcome = Outcome.UNKNOWN) -> None:
        self.open.remove(decision)  # a second time raises
        self.usages.append(usage)
        self.outcomes.append(outcome)
        self._router.release(decision, usage, outcome)


class Inbox:
    """A receiver that remembers."""

    steps: StepSink | None = None

    def __init__(self, num_choices: int = 1) -> None:
        self._hearing = ReceivedTokens(num_choices)
        self.items: list[Delta] = []
        self.ends: list[KvoltError | None] = []
        self.has_started = False
        self.watch: Callable[[], None] = lambda: None
        """Called with each delta."""

    def received_tokens(self) -> ChoiceTokens:
        return self._hearing.received_tokens()

    def on_item(self, delta: Delta) -> None:
        assert not self.ends
        self.has_started = True
        self._hearing.add_delta(delta)
        self.items.append(delta)
        self.watch()

    def on_end(self, error: KvoltError | None) -> None:
        self.ends.append(error)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.items)

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.items if delta.index == index for token in delta.token_ids]


def info(error: KvoltError) -> ErrorInfo:
    return ErrorInfo(error.code, error.message)


class Refusing(ScriptedEngine):
    """Takes a request and gives up on it, before or after its first token."""

    def __init__(self, error: KvoltError, num_tokens: int = 0) -> None:
        super().__init__()
        self._error = error
        self._num_tokens = num_tokens

    def submit(self, request: Request) -> None:
        super().submit(request)
        request_id = RequestId(request.request_id)
        for _ in range(self._num_tokens):
            self.put(StepOutput(((request_id, Delta((300,))),)))
        self.put(StepOutput(failed=((request_id, info(self._error)),)))


class Stage:
    """Workers, a client of theirs, and a road."""

    def __init__(
        self, lab: Lab, workers: list[RunningWorker], client: EndpointClient, task_group: TaskGroup
    ) -> None:
        self.lab = lab
        self.workers = workers
        self.client = client
        self.task_group = task_group
        self.bookings: list[Booking] = []

    def journey_context(
        self, router: Router | None = None, max_attempts: int = 3, migration_limit: int = 3
    ) -> JourneyContext:
        booking = Booking(router or RoundRobinRouter(self.client))
        self.bookings.append(booking)
        return JourneyContext(
            booking, self.client, self.task_group, max_attempts, migration_limit=migration_limit
        )

    def decision(self, number: int) -> Decision:
        return Decision(self.client.get_instance(InstanceId(self.workers[number].worker._instance)))

    def nothing_left(self) -> None:
        assert len(self.task_group) == 0
        for running in self.workers:
            assert len(running.worker._open) == 0


def staged(body: Callable[[Stage], Coroutine[Any, Any, None]], engines: Callable[[], Sequence[Any]]) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            workers = [await lab.worker(f"w{number}", engine) for number, engine in enumerate(engines())]
            client = await lab.client(workers[0])
            await until(lambda: len(client.candidates()) == len(workers))
            task_group = TaskGroup("retries", on_error=lab.errors.append)
            try:
                stage = Stage(lab, workers, client, task_group)
                await body(stage)
                # Whatever became of its requests: what was booked for them was freed, once each.
                assert [booking.open for booking in stage.bookings] == [[]] * len(stage.bookings)
            finally:
                await task_group.close()
            assert lab.errors == []

    run_virtual(scenario)
