"""The journey's machine: every transition, every illegal one, and random walks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unavailable,
    Unsupported,
    WorkerLost,
)
from kvolt.core.ids import InstanceId
from kvolt.journey.events import (
    Action,
    Delivered,
    End,
    Event,
    Failed,
    Finished,
    GpuWork,
    JourneyState,
    Open,
    Opened,
    Prefill,
    Prefilled,
    PrefillFailed,
    Route,
    Routed,
    Start,
    Stopped,
    Wait,
    WithdrawalConfirmed,
)
from kvolt.journey.machine import IllegalTransition, JourneyMachine
from kvolt.router.port import Decision

RETRYABLE = [
    WorkerLost("w"),
    ConnectFailed("c"),
    Overloaded("o"),
    Unavailable("u"),
    EngineFailed("e"),
    ProtocolError("p"),
    KvoltError("k"),
]
SILENT = [
    DeadlineExceeded("no first token", stage="first"),
    DeadlineExceeded("no token for a while", stage="between"),
]
FINAL = [
    InvalidRequest("i"),
    NotFound("n"),
    Unsupported("u"),
    DeadlineExceeded("d"),
    DeadlineExceeded("all its time", stage="total"),
    DeadlineExceeded("no worker", stage="route"),
    Cancelled("c"),
]


def to(name: str) -> Decision:
    return Decision(Instance(id=InstanceId(name), endpoint=EndpointAddress("n", "c", "e"), address="host:1"))


LOST = WorkerLost("a was lost", address="a:1")

WAY: dict[JourneyState, list[Event]] = {
    JourneyState.NEW: [],
    JourneyState.PREFILLING: [Start(is_remote_prefill=True)],
    JourneyState.ROUTING: [Start()],
    JourneyState.OPENING: [Start(), Routed(to("a"))],
    JourneyState.WAITING: [Start(), Routed(to("a")), Opened()],
    JourneyState.STREAMING: [Start(), Routed(to("a")), Opened(), Delivered()],
    JourneyState.REROUTING: [Start(), Routed(to("a")), Opened(), Delivered(), Failed(LOST)],
    JourneyState.REOPENING: [Start(), Routed(to("a")), Opened(), Delivered(), Failed(LOST), Routed(to("b"))],
    JourneyState.MIGRATING: [
        *(Start(), Routed(to("a")), Opened(), Delivered()),
        *(Failed(LOST), Routed(to("b")), Opened()),
    ],
    JourneyState.DONE: [Stopped()],
}
EVENTS: list[Event] = [
    Start(),
    Routed(to("b")),
    Opened(),
    Delivered(),
    Failed(WorkerLost("lost")),
    Finished(),
    Stopped(),
    WithdrawalConfirmed(to("b")),
    Prefilled(),
    PrefillFailed(WorkerLost("lost"), InstanceId("p")),
]
LEGAL: dict[tuple[JourneyState, type], tuple[JourneyState, type]] = {
    (JourneyState.NEW, Start): (JourneyState.ROUTING, Route),
    (JourneyState.NEW, Stopped): (JourneyState.DONE, End),
    (JourneyState.PREFILLING, Prefilled): (JourneyState.ROUTING, Route),
    (JourneyState.PREFILLING, PrefillFailed): (JourneyState.PREFILLING, Prefill),
    (JourneyState.PREFILLING, Stopped): (JourneyState.DONE, End),
    (JourneyState.ROUTING, Routed): (JourneyState.OPENING, Open),
    (JourneyState.ROUTING, Failed): (JourneyState.DONE, End),
    (JourneyState.ROUTING, Stopped): (JourneyState.DONE, End),
    (JourneyState.OPENING, Opened): (JourneyState.WAITING, Wait),
    (JourneyState.OPENING, Failed): (JourneyState.ROUTING, Route),
    (JourneyState.OPENING, Stopped): (JourneyState.DONE, End),
    (JourneyState.WAITING, Delivered): (JourneyState.STREAMING, Wait),
    (JourneyState.WAITING, Failed): (JourneyState.ROUTING, Route),
    (JourneyState.WAITING, WithdrawalConfirmed): (JourneyState.OPENING, Open),
    (JourneyState.WAITING, Finished): (JourneyState.DONE, End),
    (JourneyState.WAITING, Stopped): (JourneyState.DONE, End),
    (JourneyState.STREAMING, Failed): (JourneyState.REROUTING, Route),
    (JourneyState.STREAMING, Finished): (JourneyState.DONE, End),
    (JourneyState.STREAMING, Stopped): (JourneyState.DONE, End),
    (JourneyState.REROUTING, Routed): (JourneyState.REOPENING, Open),
    (JourneyState.REROUTING, Failed): (JourneyState.DONE, End),
    (JourneyState.REROUTING, Stopped): (JourneyState.DONE, End),
    (JourneyState.REOPENING, Opened): (JourneyState.MIGRATING, Wait),
    (JourneyState.REOPENING, Failed): (JourneyState.REROUTING, Route),
    (JourneyState.REOPENING, Stopped): (JourneyState.DONE, End),
    (JourneyState.MIGRATING, Delivered): (JourneyState.STREAMING, Wait),
    (JourneyState.MIGRATING, Failed): (JourneyState.REROUTING, Route),
    (JourneyState.MIGRATING, Finished): (JourneyState.DONE, End),
    (JourneyState.MIGRATING, Stopped): (JourneyState.DONE, End),
}


def at(state: JourneyState, max_attempts: int = 3, migration_limit: int = 3) -> JourneyMachine:
    machine = JourneyMachine(max_attempts, max_moves=2, migration_limit=migration_limit)
    for event in WAY[state]:
        machine.handle(event)
    assert machine.state is state
    return machine


def inside(machine: JourneyMachine) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in JourneyMachine.__slots__}


@pytest.mark.parametrize("state", JourneyState)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_whole_table(state: JourneyState, event: Event) -> None:
    machine = at(state)
    before = inside(machine)
    wanted = LEGAL.get((state, type(event)))
    if wanted is None:
        with pytest.raises(IllegalTransition, match=f"{type(event).__name__} in state {state}"):
            machine.handle(event)
        assert inside(machine) == before
    else:
        action = machine.handle(event)
        assert (machine.state, type(action)) == wanted


def routed(action: Action) -> Route:
    assert isinstance(action, Route)
    return action


@pytest.mark.parametrize("state", [JourneyState.WAITING, JourneyState.STREAMING])
def test_an_instance_that_was_out_of_reach_is_not_one_that_failed(state: JourneyState) -> None:
    silent = WorkerLost("silent", reason="heartbeat")
    machine = at(state)
    assert routed(machine.handle(Failed(silent))).unreachable == {"a"}
    machine.handle(Routed(to("b")))
    assert routed(machine.handle(Failed(ConnectFailed("no hello")))).unreachable == {"a", "b"}
    machine.handle(Routed(to("a")))
    machine.handle(Opened())
    if state is JourneyState.STREAMING:
        again = routed(machine.handle(Failed(WorkerLost("its process died", reason="closed"))))
        assert (again.excluded, again.unreachable) == ({"a", "b"}, {"b"}), "now it has failed"


@pytest.mark.parametrize("error", RETRYABLE, ids=repr)
@pytest.mark.parametrize("state", [JourneyState.OPENING, JourneyState.WAITING])
def test_before_the_first_answer_another_instance_is_tried(state: JourneyState, error: KvoltError) -> None:
    machine = at(state)
    assert routed(machine.handle(Failed(error))).excluded == {"a"}
    assert machine.failure is error
    machine.handle(Routed(to("b")))
    machine.handle(Opened())
    assert routed(machine.handle(Failed(error))).excluded == {"a", "b"}
    machine.handle(Routed(to("c")))
    assert machine.num_attempts == 3
    last = WorkerLost("the third")
    assert machine.handle(Failed(last)) == End(last)


def test_a_request_that_two_engines_died_of_kills_no_third() -> None:
    machine = at(JourneyState.WAITING)
    assert machine.handle(Failed(EngineDied("first"))) == Route(frozenset({InstanceId("a")}))
    machine.handle(Routed(to("b")))
    action = machine.handle(Failed(EngineDied("second")))
    assert isinstance(action, End)
    assert type(action.error) is EngineFailed, "a client is not invited to try a third"
    assert action.error.message.endswith("second")


def test_a_second_worker_without_a_first_token_in_time_is_the_last() -> None:
    late = DeadlineExceeded("no first token", stage="first")
    machine = at(JourneyState.WAITING)
    assert machine.handle(Failed(late)) == Route(frozenset({InstanceId("a")}))
    machine.handle(Routed(to("b")))
    machine.handle(Opened())
    assert machine.handle(Failed(late)) == End(late)


def test_a_second_worker_that_goes_silent_amid_the_answer_is_the_last() -> None:
    late = DeadlineExceeded("no token for a while", stage="between")
    machine = at(JourneyState.STREAMING)
    assert machine.handle(Failed(late)) == Route(frozenset({InstanceId("a")}))
    for event in (Routed(to("b")), Opened(), Delivered()):
        machine.handle(event)
    assert machine.handle(Failed(late)) == End(late)


@pytest.mark.parametrize("state", [JourneyState.REROUTING, JourneyState.REOPENING])
def test_a_silent_worker_without_a_replacement_ends_the_answer_at_its_deadline(state: JourneyState) -> None:
    """As a deadline, of its own stage: the text is kept."""
    late = DeadlineExceeded("no token for a while", stage="between")
    machine = at(JourneyState.STREAMING, migration_limit=1)
    machine.handle(Failed(late))
    if state is JourneyState.REOPENING:
        machine.handle(Routed(to("b")))
    action = machine.handle(Failed(Unavailable("none left")))
    assert isinstance(action, End)
    assert isinstance(action.error, DeadlineExceeded)
    assert action.error.fields == late.fields


@pytest.mark.parametrize("error", FINAL, ids=repr)
@pytest.mark.parametrize("state", [JourneyState.OPENING, JourneyState.WAITING])
def test_what_no_other_instance_could_do_better_is_final(state: JourneyState, error: KvoltError) -> None:
    assert at(state).handle(Failed(error)) == End(error)


@pytest.mark.parametrize("state", [JourneyState.WAITING, JourneyState.STREAMING])
def test_an_engine_may_die_once_whatever_else_happens(state: JourneyState) -> None:
    machine = at(state)
    machine.handle(Failed(EngineDied("first")))
    for number, event in enumerate([Failed(LOST), Failed(EngineDied("second"))]):
        machine.handle(Routed(to(f"w{number}")))
        machine.handle(Opened())
        action = machine.handle(event)
        assert isinstance(action, Route if number == 0 else End)


# --- amid an answer


@pytest.mark.parametrize("error", RETRYABLE + SILENT + FINAL, ids=repr)
def test_without_migrations_everything_is_final_after_the_first_answer(error: KvoltError) -> None:
    assert at(JourneyState.STREAMING, migration_limit=0).handle(Failed(error)) == End(error)


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_amid_an_answer_what_no_other_could_do_better_is_final(error: KvoltError) -> None:
    assert at(JourneyState.STREAMING).handle(Failed(error)) == End(error)


@pytest.mark.parametrize("error", [*RETRYABLE, *SILENT, EngineDied("e")], ids=repr)
def test_another_worker_continues_mid_answer(error: KvoltError) -> None:
    machine = at(JourneyState.STREAMING)
    assert routed(machine.handle(Failed(error))).excluded == {"a"}
    assert machine.failure is error
    assert machine.handle(Routed(to("b"))) == Open(to("b"))
    assert (machine.num_attempts, machine.num_migrations) == (1, 1)
    machine.handle(Opened())
    machine.handle(Delivered())
    assert machine.state is JourneyState.STREAMING
    assert machine.handle(Finished()) == End(None)


def test_who_failed_before_is_left_out_until_it_got_further() -> None:
    machine = at(JourneyState.REROUTING)
    refusal = Overloaded("b is full")
    machine.handle(Routed(to("b")))
    assert machine.handle(Failed(refusal)) == Route(frozenset({InstanceId("a"), InstanceId("b")}))
    machine.handle(Routed(to("c")))
    machine.handle(Opened())
    machine.handle(Delivered())
    assert machine.handle(Failed(LOST)) == Route(frozenset({InstanceId("c")}))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_migrations_are_bounded_and_the_end_says_so(limit: int) -> None:
    machine = at(JourneyState.STREAMING, migration_limit=limit)
    for number in range(limit):
        machine.handle(Failed(LOST))
        machine.handle(Routed(to(f"w{number}")))
        machine.handle(Opened())
        machine.handle(Delivered())
    action = machine.handle(Failed(LOST))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost)
    assert action.error.fields == LOST.fields
    assert action.error.message == (
        f"a was lost; the request was migrated {limit} times, the maximum set by migration_limit: send it again"
    )
    assert machine.num_migrations == limit


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (JourneyState.REROUTING, Unavailable("nobody is there")),
        (JourneyState.REROUTING, Overloaded("nobody is there")),
        (JourneyState.REOPENING, Unsupported("nobody is there")),
        (JourneyState.MIGRATING, InvalidRequest("nobody is there")),
    ],
    ids=repr,
)
def test_failed_migration_reports_the_lost_worker(state: JourneyState, error: KvoltError) -> None:
    machine = at(state)
    action = machine.handle(Failed(error))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost)
    assert (
        action.error.message
        == "a was lost; the request could not be migrated to another worker: nobody is there"
    )
    assert action.error.fields == LOST.fields
    assert machine.gpu_work is GpuWork.SOME


def test_refused_migrations_count_as_well() -> None:
    machine = at(JourneyState.REOPENING, migration_limit=2)
    assert isinstance(machine.handle(Failed(ConnectFailed("c"))), Route)
    machine.handle(Routed(to("c")))
    machine.handle(Opened())
    action = machine.handle(Failed(Overloaded("full")))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost), "that is why it has to go on elsewhere"
    assert "full" in action.error.message


@pytest.mark.parametrize("state", [JourneyState.REROUTING, JourneyState.REOPENING, JourneyState.MIGRATING])
def test_a_deadline_amid_a_migration_is_a_deadline(state: JourneyState) -> None:
    late = DeadlineExceeded("too late")
    assert at(state).handle(Failed(late)) == End(late)


def test_a_single_attempt() -> None:
    error = WorkerLost("w")
    assert at(JourneyState.WAITING, max_attempts=1).handle(Failed(error)) == End(error)


def test_last_error_is_preferred_over_no_worker_left() -> None:
    nobody, full, lost = Unavailable("nobody"), Overloaded("the router is full"), WorkerLost("lost")
    assert at(JourneyState.ROUTING).handle(Failed(nobody)) == End(nobody)
    machine = at(JourneyState.WAITING)
    machine.handle(Failed(lost))
    assert machine.handle(Failed(nobody)) == End(lost)
    machine = at(JourneyState.WAITING)
    machine.handle(Failed(lost))
    assert machine.handle(Failed(full)) == End(full)


def test_withdrawn_request_moves_without_a_new_attempt() -> None:
    machine = at(JourneyState.WAITING)
    for name in ("b", "c"):
        assert machine.can_move
        assert machine.handle(WithdrawalConfirmed(to(name))) == Open(to(name))
        assert not machine.can_move, "nobody has it yet"
        machine.handle(Opened())
    assert (machine.num_attempts, machine.num_moves, machine.can_move) == (1, 2, False)
    before = inside(machine)
    with pytest.raises(IllegalTransition, match=r"WithdrawalConfirmed after 2 moves"):
        machine.handle(WithdrawalConfirmed(to("d")))
    assert inside(machine) == before
    assert machine.handle(Failed(WorkerLost("w"))) == Route(frozenset({InstanceId("c")})), "who had it last"
    assert not JourneyMachine(3).can_move


@pytest.mark.parametrize(
    ("state", "error", "spent"),
    [
        (JourneyState.ROUTING, Overloaded("full"), GpuWork.NONE),
        (JourneyState.OPENING, ConnectFailed("c"), GpuWork.NONE),
        (JourneyState.WAITING, Overloaded("full"), GpuWork.NONE),
        (JourneyState.WAITING, Unsupported("u"), GpuWork.NONE),  # engines reject before they compute
        (JourneyState.WAITING, EngineFailed("e"), GpuWork.UNKNOWN),
        (JourneyState.WAITING, WorkerLost("w"), GpuWork.UNKNOWN),
        (JourneyState.STREAMING, WorkerLost("w"), GpuWork.SOME),
    ],
)
def test_whether_anything_was_computed_in_vain(
    state: JourneyState, error: KvoltError, spent: GpuWork
) -> None:
    machine = at(state, max_attempts=1, migration_limit=0)
    assert machine.handle(Failed(error)) == End(error)
    assert machine.gpu_work is spent


@pytest.mark.parametrize(
    ("error", "spent"),
    [
        (Overloaded("full"), GpuWork.NONE),
        (Unsupported("u"), GpuWork.NONE),
        (WorkerLost("w"), GpuWork.UNKNOWN),
    ],
)
def test_whether_a_failed_remote_prefill_computed_anything(error: KvoltError, spent: GpuWork) -> None:
    machine = at(JourneyState.PREFILLING)
    machine.handle(PrefillFailed(error, InstanceId("p")))
    assert machine.gpu_work is spent


def test_stopping_is_cancelled_and_finishing_is_no_error() -> None:
    action = at(JourneyState.STREAMING).handle(Stopped())
    assert isinstance(action, End)
    assert isinstance(action.error, Cancelled)
    assert at(JourneyState.WAITING).handle(Finished()) == End(None)


@given(st.integers(1, 4), st.integers(0, 3), st.lists(st.sampled_from(range(10)), max_size=60))
def test_random_walks(max_attempts: int, migration_limit: int, picks: list[int]) -> None:
    """However the world behaves: few attempts, none from the beginning after something was delivered, one end."""
    machine = JourneyMachine(max_attempts, max_moves=2, migration_limit=migration_limit)
    actions: list[Action] = []
    delivered = False
    tried: list[InstanceId] = []
    for number, pick in enumerate(picks):
        event: Event = [
            Start(),
            Routed(to(f"w{number}")),
            Opened(),
            Delivered(),
            Failed(WorkerLost("w")),
            Failed(Unavailable("u")),
            Failed(EngineFailed("e")),
            Finished(),
            Stopped(),
            WithdrawalConfirmed(to(f"m{number}")),
        ][pick]
        try:
            action = machine.handle(event)
        except IllegalTransition:
            continue
        delivered = delivered or isinstance(event, Delivered)
        actions.append(action)
        if isinstance(event, Delivered):
            tried = tried[-1:]
        if isinstance(action, Route):
            assert machine.state is (JourneyState.REROUTING if delivered else JourneyState.ROUTING)
            assert action.excluded == frozenset(tried)
        if isinstance(event, WithdrawalConfirmed):
            assert not delivered
            tried.pop()
        if isinstance(action, Open):
            tried.append(action.decision.instance.id)
    num_opened = sum(isinstance(action, Open) for action in actions)
    assert num_opened == machine.num_attempts + machine.num_moves + machine.num_migrations
    assert machine.num_attempts <= max_attempts
    assert machine.num_migrations <= migration_limit
    assert machine.num_moves <= 2
    ends = [number for number, action in enumerate(actions) if isinstance(action, End)]
    assert ends == ([len(actions) - 1] if machine.state is JourneyState.DONE else [])
