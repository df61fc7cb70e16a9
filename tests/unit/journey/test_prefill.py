"""Prompts that are computed elsewhere: who is asked, in which order, and what is left when nobody can."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from kvolt.core.delta import Delta
from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    ProtocolError,
    Unavailable,
    WorkerLost,
)
from kvolt.core.ids import InstanceId, RequestId
from kvolt.core.kv_events import Tier
from kvolt.core.request import Handoff, KvSource, Rendezvous, Request, RoutingHints, StopConditions
from kvolt.journey import prefill as prefill_module
from kvolt.journey.events import (
    Action,
    End,
    GpuWork,
    JourneyState,
    Prefill,
    Prefilled,
    PrefillFailed,
    Route,
    Start,
    Stopped,
)
from kvolt.journey.machine import JourneyMachine
from kvolt.journey.prefill import PrefillCall, RoleTarget, with_decision
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.tasks import TaskGroup

P0, P1 = InstanceId("p0"), InstanceId("p1")
NOBODY: frozenset[InstanceId] = frozenset()
REQUEST = Request(request_id=RequestId("r"), model="m", token_ids=(1,), stop=StopConditions(max_tokens=4))
HANDOFF = Handoff(ticket=b"", prefill_instance=P0, cached_tokens=16)


def started() -> JourneyMachine:
    machine = JourneyMachine(max_attempts=3)
    assert machine.handle(Start(is_remote_prefill=True)) == Prefill(NOBODY)
    assert machine.state is JourneyState.PREFILLING
    return machine


def test_the_answer_is_routed_once_the_prompt_is_computed() -> None:
    machine = started()
    assert machine.handle(Prefilled()) == Route(NOBODY)
    assert (machine.state, machine.gpu_work) == (JourneyState.ROUTING, GpuWork.SOME)


def test_without_prefill_workers_it_is_routed_at_once() -> None:
    assert JourneyMachine(max_attempts=3).handle(Start()) == Route(NOBODY)


def test_second_prefill_worker_then_the_decode_worker() -> None:
    machine = started()
    assert machine.handle(PrefillFailed(WorkerLost("gone"), P0)) == Prefill(frozenset({P0}))
    assert machine.gpu_work is GpuWork.UNKNOWN
    assert machine.handle(PrefillFailed(WorkerLost("gone"), P1)) == Route(NOBODY)


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (Unavailable("none"), None),
        (Overloaded("full"), None),
        (InvalidRequest("too long for its memory"), P0),
    ],
)
def test_request_errors_of_prefill_fall_back_to_decode(error: KvoltError, asked: InstanceId | None) -> None:
    assert started().handle(PrefillFailed(error, asked)) == Route(NOBODY)


@pytest.mark.parametrize(
    "error", [ProtocolError("no handoff"), KvoltError("internal error (KeyError)"), EngineFailed("no")]
)
def test_another_prefill_worker_then_the_decode_worker(error: KvoltError) -> None:
    machine = started()
    assert machine.handle(PrefillFailed(error, P0)) == Prefill(frozenset({P0}))
    assert machine.handle(PrefillFailed(error, P1)) == Route(NOBODY)


@pytest.mark.parametrize("stage", ["total", "route"])
def test_a_request_whose_time_is_over_ends(stage: str) -> None:
    error = DeadlineExceeded("late", stage=stage)
    assert started().handle(PrefillFailed(error, P0)) == End(error)


def test_a_slow_prefill_worker_is_as_good_as_none() -> None:
    machine = started()
    slow = DeadlineExceeded("nothing for 60 s", stage="first")
    assert machine.handle(PrefillFailed(slow, P0)) == Prefill(frozenset({P0}))
    assert machine.handle(PrefillFailed(slow, P1)) == Route(NOBODY)


def test_engines_that_die_of_a_prompt_are_counted() -> None:
    machine = started()
    assert machine.handle(PrefillFailed(EngineDied("died"), P0)) == Prefill(frozenset({P0}))
    action = machine.handle(PrefillFailed(EngineDied("died"), P1))
    assert isinstance(action, End)
    assert type(action.error) is EngineFailed


def test_caller_may_be_cancelled() -> None:
    action: Action = started().handle(Stopped())
    assert isinstance(action, End)
    assert isinstance(action.error, Cancelled)


# --- the call


class Desk:
    """Router and client of a target: it tells what it was asked, and answers as it was told."""

    def __init__(
        self, *items: Delta, error: KvoltError | None = None, refuses: KvoltError | None = None
    ) -> None:
        endpoint = EndpointAddress("ns", "c", "generate")
        self.decision = Decision(Instance(id=P0, endpoint=endpoint, address="127.0.0.1:1"))
        self.items, self.error, self.refuses = items, error, refuses
        self.begun_with: list[int | None] = []
        self.num_freed = 0
        self.num_cancelled = 0
        self.answers = True
        self.asked: list[Request] = []
        self.deadlines = Deadlines()
        self.plane = self
        self.released: list[RequestId] = []

    async def route(self, request: Request, excluded: frozenset[InstanceId] = NOBODY) -> Decision:
        self.asked.append(request)
        await asyncio.sleep(0)
        return self.decision

    def mark_first_token(self, decision: Decision, cached_tokens: int | None) -> None:
        self.begun_with.append(cached_tokens)

    def release(self, decision: Decision, usage: object, outcome: object = None) -> None:
        self.num_freed += 1

    async def close(self) -> None: ...

    async def call(self, request: Request, sink: Any, *, deadlines: Deadlines, **more: Any) -> Desk:
        self.asked.append(request)
        self.deadlines = deadlines
        if self.refuses is not None:
            raise self.refuses
        if self.answers:
            for item in self.items:
                sink.on_item(item)
            sink.on_end(self.error)
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1


@pytest.fixture(autouse=True)
def no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(task_group: TaskGroup, desk: Desk, instance: Instance, request_id: RequestId) -> None:
        assert instance is desk.decision.instance
        desk.released.append(request_id)

    monkeypatch.setattr(prefill_module, "release_prompt", release)


def asked(desk: Desk, request: Request = REQUEST) -> PrefillCall:
    return PrefillCall(RoleTarget(desk, desk), request, TaskGroup("test"))  # type: ignore[arg-type]


async def test_a_prompt_is_computed() -> None:
    desk = Desk(Delta(handoff=HANDOFF, cached_tokens=16))
    call = asked(desk)
    assert await call.run(NOBODY, Deadlines()) == HANDOFF
    assert call.decision is desk.decision
    assert (desk.begun_with, desk.num_freed, desk.released) == ([16], 1, [])


@pytest.mark.parametrize(("predicted_ms", "first_s"), [(None, 60.0), (1e3, 60.0), (90e3, 270.0)])
async def test_a_prompt_predicted_to_take_long_has_the_time(
    predicted_ms: float | None, first_s: float
) -> None:
    desk = Desk(Delta(handoff=HANDOFF))
    desk.decision = replace(desk.decision, predicted_ms=predicted_ms)
    await asked(desk).run(NOBODY, Deadlines())
    assert desk.deadlines == Deadlines(first_s=first_s)


async def test_whatever_else_it_says_it_has_begun_once() -> None:
    desk = Desk(
        Delta((7,)), Delta(handoff=HANDOFF, cached_tokens=16), Delta(handoff=HANDOFF, cached_tokens=3)
    )
    assert await asked(desk).run(NOBODY, Deadlines()) == HANDOFF
    assert desk.begun_with == [16]


async def test_the_worker_gets_all_that_was_decided() -> None:
    desk = Desk(Delta(handoff=HANDOFF))
    sources = (KvSource(P1, Tier.DEVICE, 3),)
    desk.decision = replace(desk.decision, dp_rank=2, kv_sources=sources)
    pinned = replace(REQUEST, routing=RoutingHints(pinned_dp_rank=7, tenant="a"))
    await asked(desk, pinned).run(NOBODY, Deadlines())
    routed, sent = desk.asked
    assert routed.routing == RoutingHints(tenant="a"), "the rank is one of the worker that answers"
    assert sent == replace(REQUEST, routing=RoutingHints(pinned_dp_rank=2, tenant="a"), kv_sources=sources)


@pytest.mark.parametrize(
    ("desk", "error"),
    [
        (Desk(error=WorkerLost("gone")), WorkerLost),
        (Desk(refuses=Overloaded("full")), Overloaded),
        (Desk(), ProtocolError),
    ],
    ids=["lost", "refused", "nothing said"],
)
async def test_a_prompt_is_not_computed(desk: Desk, error: type[KvoltError]) -> None:
    with pytest.raises(error):
        await asked(desk).run(NOBODY, Deadlines())
    assert (desk.num_freed, desk.released) == (1, [])


async def test_a_prompt_that_comes_too_late_is_released() -> None:
    desk = Desk(error=DeadlineExceeded("nothing for 60 s", stage="first"))
    with pytest.raises(DeadlineExceeded):
        await asked(desk).run(NOBODY, Deadlines())
    assert (desk.num_freed, desk.released) == (1, [REQUEST.request_id])


async def test_a_prompt_that_comes_as_its_caller_goes_is_released() -> None:
    desk = Desk()
    desk.answers = False
    call = asked(desk)
    running = asyncio.ensure_future(call.run(NOBODY, Deadlines()))
    await asyncio.sleep(0.01)
    call.on_item(Delta(handoff=HANDOFF))
    call.on_end(None)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert desk.released == [REQUEST.request_id]


async def test_a_call_is_cancelled() -> None:
    desk = Desk()
    desk.answers = False
    call = asked(desk)
    running = asyncio.ensure_future(call.run(NOBODY, Deadlines()))
    await asyncio.sleep(0.01)
    call.cancel()
    with pytest.raises(Cancelled):
        await running
    assert (desk.num_cancelled, desk.num_freed, desk.released) == (1, 1, [REQUEST.request_id])


async def test_a_call_is_cancelled_before_it_was_sent() -> None:
    desk = Desk()
    call = asked(desk)
    running = asyncio.ensure_future(call.run(NOBODY, Deadlines()))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(Cancelled):
        await running
    assert (desk.num_cancelled, desk.num_freed, desk.released) == (0, 1, [])


async def test_waiter_may_be_cancelled() -> None:
    desk = Desk()
    desk.answers = False
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asked(desk).run(NOBODY, Deadlines()), 0.01)
    assert (desk.num_cancelled, desk.num_freed) == (1, 1)


def test_each_decode_worker_gets_a_handoff_and_a_rendezvous_for_itself() -> None:
    handoff = replace(HANDOFF, reader_key=b"k" * 16)
    request = replace(REQUEST, handoff=handoff, rendezvous=Rendezvous(1, "a"))
    address = EndpointAddress.parse("default.decode.generate")
    for name in ("kvolt://worker/d0", "kvolt://worker/d1"):
        instance = Instance(id=InstanceId("d"), endpoint=address, address="d:1", identity=name)
        sent = with_decision(request, Decision(instance))
        assert sent.handoff == handoff.for_reader(name)
        assert sent.rendezvous == Rendezvous(1, "a", reader=name)
