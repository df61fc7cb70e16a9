"""The journey's machine: every transition, every illegal one, and random walks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from kvolt.journey.machine import (
    Action,
    Delivered,
    End,
    Event,
    Failed,
    Finished,
    GpuWork,
    IllegalTransition,
    JourneyMachine,
    Open,
    Opened,
    Prefill,
    Prefilled,
    PrefillFailed,
    Route,
    Routed,
    Start,
    State,
    Stopped,
    TakenBack,
    Wait,
)
from kvolt.router.port import Decision
from kvolt.runtime.endpoint.address import EndpointAddress, Instance

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

WAY: dict[State, list[Event]] = {
    State.NEW: [],
    State.PREFILLING: [Start(is_remote=True)],
    State.ROUTING: [Start()],
    State.OPENING: [Start(), Routed(to("a"))],
    State.WAITING: [Start(), Routed(to("a")), Opened()],
    State.STREAMING: [Start(), Routed(to("a")), Opened(), Delivered()],
    State.REROUTING: [Start(), Routed(to("a")), Opened(), Delivered(), Failed(LOST)],
    State.REOPENING: [Start(), Routed(to("a")), Opened(), Delivered(), Failed(LOST), Routed(to("b"))],
    State.RESUMING: [
        *(Start(), Routed(to("a")), Opened(), Delivered()),
        *(Failed(LOST), Routed(to("b")), Opened()),
    ],
    State.DONE: [Stopped()],
}
EVENTS: list[Event] = [
    Start(),
    Routed(to("b")),
    Opened(),
    Delivered(),
    Failed(WorkerLost("lost")),
    Finished(),
    Stopped(),
    TakenBack(to("b")),
    Prefilled(),
    PrefillFailed(WorkerLost("lost"), InstanceId("p")),
]
LEGAL: dict[tuple[State, type], tuple[State, type]] = {
    (State.NEW, Start): (State.ROUTING, Route),
    (State.NEW, Stopped): (State.DONE, End),
    (State.PREFILLING, Prefilled): (State.ROUTING, Route),
    (State.PREFILLING, PrefillFailed): (State.PREFILLING, Prefill),
    (State.PREFILLING, Stopped): (State.DONE, End),
    (State.ROUTING, Routed): (State.OPENING, Open),
    (State.ROUTING, Failed): (State.DONE, End),
    (State.ROUTING, Stopped): (State.DONE, End),
    (State.OPENING, Opened): (State.WAITING, Wait),
    (State.OPENING, Failed): (State.ROUTING, Route),
    (State.OPENING, Stopped): (State.DONE, End),
    (State.WAITING, Delivered): (State.STREAMING, Wait),
    (State.WAITING, Failed): (State.ROUTING, Route),
    (State.WAITING, TakenBack): (State.OPENING, Open),
    (State.WAITING, Finished): (State.DONE, End),
    (State.WAITING, Stopped): (State.DONE, End),
    (State.STREAMING, Failed): (State.REROUTING, Route),
    (State.STREAMING, Finished): (State.DONE, End),
    (State.STREAMING, Stopped): (State.DONE, End),
    (State.REROUTING, Routed): (State.REOPENING, Open),
    (State.REROUTING, Failed): (State.DONE, End),
    (State.REROUTING, Stopped): (State.DONE, End),
    (State.REOPENING, Opened): (State.RESUMING, Wait),
    (State.REOPENING, Failed): (State.REROUTING, Route),
    (State.REOPENING, Stopped): (State.DONE, End),
    (State.RESUMING, Delivered): (State.STREAMING, Wait),
    (State.RESUMING, Failed): (State.REROUTING, Route),
    (State.RESUMING, Finished): (State.DONE, End),
    (State.RESUMING, Stopped): (State.DONE, End),
}


def at(state: State, max_attempts: int = 3, migration_limit: int = 3) -> JourneyMachine:
    machine = JourneyMachine(max_attempts, max_moves=2, migration_limit=migration_limit)
    for event in WAY[state]:
        machine.on(event)
    assert machine.state is state
    return machine


def inside(machine: JourneyMachine) -> dict[str, Any]:
    return {name: getattr(machine, name) for name in JourneyMachine.__slots__}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_the_whole_table(state: State, event: Event) -> None:
    machine = at(state)
    before = inside(machine)
    wanted = LEGAL.get((state, type(event)))
    if wanted is None:
        with pytest.raises(IllegalTransition, match=f"{type(event).__name__} in state {state}"):
            machine.on(event)
        assert inside(machine) == before
    else:
        action = machine.on(event)
        assert (machine.state, type(action)) == wanted


def routed(action: Action) -> Route:
    assert isinstance(action, Route)
    return action


@pytest.mark.parametrize("state", [State.WAITING, State.STREAMING])
def test_an_instance_that_was_out_of_reach_is_not_one_that_failed(state: State) -> None:
    silent = WorkerLost("silent", reason="heartbeat")
    machine = at(state)
    assert routed(machine.on(Failed(silent))).out_of_reach == {"a"}
    machine.on(Routed(to("b")))
    assert routed(machine.on(Failed(ConnectFailed("no hello")))).out_of_reach == {"a", "b"}
    machine.on(Routed(to("a")))
    machine.on(Opened())
    if state is State.STREAMING:
        again = routed(machine.on(Failed(WorkerLost("its process died", reason="closed"))))
        assert (again.excluded, again.out_of_reach) == ({"a", "b"}, {"b"}), "now it has failed"


@pytest.mark.parametrize("error", RETRYABLE, ids=repr)
@pytest.mark.parametrize("state", [State.OPENING, State.WAITING])
def test_before_the_first_answer_another_instance_is_tried(state: State, error: KvoltError) -> None:
    machine = at(state)
    assert routed(machine.on(Failed(error))).excluded == {"a"}
    assert machine.failure is error
    machine.on(Routed(to("b")))
    machine.on(Opened())
    assert routed(machine.on(Failed(error))).excluded == {"a", "b"}
    machine.on(Routed(to("c")))
    assert machine.num_attempts == 3
    last = WorkerLost("the third")
    assert machine.on(Failed(last)) == End(last)


def test_a_request_that_two_engines_died_of_kills_no_third() -> None:
    machine = at(State.WAITING)
    assert machine.on(Failed(EngineDied("first"))) == Route(frozenset({InstanceId("a")}))
    machine.on(Routed(to("b")))
    action = machine.on(Failed(EngineDied("second")))
    assert isinstance(action, End)
    assert type(action.error) is EngineFailed, "a client is not invited to try a third"
    assert action.error.message.endswith("second")


def test_a_second_worker_without_a_first_token_in_time_is_the_last() -> None:
    late = DeadlineExceeded("no first token", stage="first")
    machine = at(State.WAITING)
    assert machine.on(Failed(late)) == Route(frozenset({InstanceId("a")}))
    machine.on(Routed(to("b")))
    machine.on(Opened())
    assert machine.on(Failed(late)) == End(late)


def test_a_second_worker_that_goes_silent_amid_the_answer_is_the_last() -> None:
    late = DeadlineExceeded("no token for a while", stage="between")
    machine = at(State.STREAMING)
    assert machine.on(Failed(late)) == Route(frozenset({InstanceId("a")}))
    for event in (Routed(to("b")), Opened(), Delivered()):
        machine.on(event)
    assert machine.on(Failed(late)) == End(late)


@pytest.mark.parametrize("state", [State.REROUTING, State.REOPENING])
def test_a_silent_worker_without_a_replacement_ends_the_answer_at_its_deadline(state: State) -> None:
    """As a deadline, of its own stage: the text is kept."""
    late = DeadlineExceeded("no token for a while", stage="between")
    machine = at(State.STREAMING, migration_limit=1)
    machine.on(Failed(late))
    if state is State.REOPENING:
        machine.on(Routed(to("b")))
    action = machine.on(Failed(Unavailable("none left")))
    assert isinstance(action, End)
    assert isinstance(action.error, DeadlineExceeded)
    assert action.error.fields == late.fields


@pytest.mark.parametrize("error", FINAL, ids=repr)
@pytest.mark.parametrize("state", [State.OPENING, State.WAITING])
def test_what_no_other_instance_could_do_better_is_final(state: State, error: KvoltError) -> None:
    assert at(state).on(Failed(error)) == End(error)


@pytest.mark.parametrize("state", [State.WAITING, State.STREAMING])
def test_an_engine_may_die_once_whatever_else_happens(state: State) -> None:
    machine = at(state)
    machine.on(Failed(EngineDied("first")))
    for number, event in enumerate([Failed(LOST), Failed(EngineDied("second"))]):
        machine.on(Routed(to(f"w{number}")))
        machine.on(Opened())
        action = machine.on(event)
        assert isinstance(action, Route if number == 0 else End)


# --- amid an answer


@pytest.mark.parametrize("error", RETRYABLE + SILENT + FINAL, ids=repr)
def test_without_migrations_everything_is_final_after_the_first_answer(error: KvoltError) -> None:
    assert at(State.STREAMING, migration_limit=0).on(Failed(error)) == End(error)


@pytest.mark.parametrize("error", FINAL, ids=repr)
def test_amid_an_answer_what_no_other_could_do_better_is_final(error: KvoltError) -> None:
    assert at(State.STREAMING).on(Failed(error)) == End(error)


@pytest.mark.parametrize("error", [*RETRYABLE, *SILENT, EngineDied("e")], ids=repr)
def test_amid_an_answer_another_goes_on(error: KvoltError) -> None:
    machine = at(State.STREAMING)
    assert routed(machine.on(Failed(error))).excluded == {"a"}
    assert machine.failure is error
    assert machine.on(Routed(to("b"))) == Open(to("b"))
    assert (machine.num_attempts, machine.num_migrations) == (1, 1)
    machine.on(Opened())
    machine.on(Delivered())
    assert machine.state is State.STREAMING
    assert machine.on(Finished()) == End(None)


def test_who_failed_before_is_left_out_until_it_got_further() -> None:
    machine = at(State.REROUTING)
    refusal = Overloaded("b is full")
    machine.on(Routed(to("b")))
    assert machine.on(Failed(refusal)) == Route(frozenset({InstanceId("a"), InstanceId("b")}))
    machine.on(Routed(to("c")))
    machine.on(Opened())
    machine.on(Delivered())
    assert machine.on(Failed(LOST)) == Route(frozenset({InstanceId("c")}))


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_migrations_are_bounded_and_the_end_says_so(limit: int) -> None:
    machine = at(State.STREAMING, migration_limit=limit)
    for number in range(limit):
        machine.on(Failed(LOST))
        machine.on(Routed(to(f"w{number}")))
        machine.on(Opened())
        machine.on(Delivered())
    action = machine.on(Failed(LOST))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost)
    assert action.error.fields == LOST.fields
    assert action.error.message == (
        f"a was lost; the request was migrated {limit} times already, the most that migration_limit allows: "
        "send it again"
    )
    assert machine.num_migrations == limit


@pytest.mark.parametrize(
    ("state", "error"),
    [
        (State.REROUTING, Unavailable("nobody is there")),
        (State.REROUTING, Overloaded("nobody is there")),
        (State.REOPENING, Unsupported("nobody is there")),
        (State.RESUMING, InvalidRequest("nobody is there")),
    ],
    ids=repr,
)
def test_that_nobody_goes_on_is_the_fault_of_who_was_lost(state: State, error: KvoltError) -> None:
    machine = at(state)
    action = machine.on(Failed(error))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost)
    assert (
        action.error.message
        == "a was lost; the request could not be migrated to another worker: nobody is there"
    )
    assert action.error.fields == LOST.fields
    assert machine.gpu_work is GpuWork.SOME


def test_refusals_of_who_should_go_on_count_as_well() -> None:
    machine = at(State.REOPENING, migration_limit=2)
    assert isinstance(machine.on(Failed(ConnectFailed("c"))), Route)
    machine.on(Routed(to("c")))
    machine.on(Opened())
    action = machine.on(Failed(Overloaded("full")))
    assert isinstance(action, End)
    assert isinstance(action.error, WorkerLost), "that is why it has to go on elsewhere"
    assert "full" in action.error.message


@pytest.mark.parametrize("state", [State.REROUTING, State.REOPENING, State.RESUMING])
def test_a_deadline_amid_a_migration_is_a_deadline(state: State) -> None:
    late = DeadlineExceeded("too late")
    assert at(state).on(Failed(late)) == End(late)


def test_a_single_attempt() -> None:
    error = WorkerLost("w")
    assert at(State.WAITING, max_attempts=1).on(Failed(error)) == End(error)


def test_why_the_last_one_failed_says_more_than_that_nobody_is_left() -> None:
    nobody, full, lost = Unavailable("nobody"), Overloaded("the router is full"), WorkerLost("lost")
    assert at(State.ROUTING).on(Failed(nobody)) == End(nobody)
    machine = at(State.WAITING)
    machine.on(Failed(lost))
    assert machine.on(Failed(nobody)) == End(lost)
    machine = at(State.WAITING)
    machine.on(Failed(lost))
    assert machine.on(Failed(full)) == End(full)


def test_what_is_taken_back_goes_elsewhere_and_that_is_no_attempt() -> None:
    machine = at(State.WAITING)
    for name in ("b", "c"):
        assert machine.may_move
        assert machine.on(TakenBack(to(name))) == Open(to(name))
        assert not machine.may_move, "nobody has it yet"
        machine.on(Opened())
    assert (machine.num_attempts, machine.num_moves, machine.may_move) == (1, 2, False)
    before = inside(machine)
    with pytest.raises(IllegalTransition, match=r"TakenBack a 3\. time"):
        machine.on(TakenBack(to("d")))
    assert inside(machine) == before
    assert machine.on(Failed(WorkerLost("w"))) == Route(frozenset({InstanceId("c")})), "who had it last"
    assert not JourneyMachine(3).may_move


@pytest.mark.parametrize(
    ("state", "error", "spent"),
    [
        (State.ROUTING, Overloaded("full"), GpuWork.NONE),
        (State.OPENING, ConnectFailed("c"), GpuWork.NONE),
        (State.WAITING, Overloaded("full"), GpuWork.NONE),
        (State.WAITING, EngineFailed("e"), GpuWork.UNKNOWN),
        (State.WAITING, WorkerLost("w"), GpuWork.UNKNOWN),
        (State.STREAMING, WorkerLost("w"), GpuWork.SOME),
    ],
)
def test_whether_anything_was_computed_in_vain(state: State, error: KvoltError, spent: GpuWork) -> None:
    machine = at(state, max_attempts=1, migration_limit=0)
    assert machine.on(Failed(error)) == End(error)
    assert machine.gpu_work is spent


def test_stopping_is_cancelled_and_finishing_is_no_error() -> None:
    action = at(State.STREAMING).on(Stopped())
    assert isinstance(action, End)
    assert isinstance(action.error, Cancelled)
    assert at(State.WAITING).on(Finished()) == End(None)


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
            TakenBack(to(f"m{number}")),
        ][pick]
        try:
            action = machine.on(event)
        except IllegalTransition:
            continue
        delivered = delivered or isinstance(event, Delivered)
        actions.append(action)
        if isinstance(event, Delivered):
            tried = tried[-1:]
        if isinstance(action, Route):
            assert machine.state is (State.REROUTING if delivered else State.ROUTING)
            assert action.excluded == frozenset(tried)
        if isinstance(event, TakenBack):
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
    assert ends == ([len(actions) - 1] if machine.state is State.DONE else [])
