"""The supervisor's decisions, event by event: no loop, no process, no clock."""

from __future__ import annotations

import itertools

import pytest

from kvolt.core.errors import ConfigError
from kvolt.runtime.supervisor.plan import (
    TRANSITIONS,
    Action,
    BackoffElapsed,
    ChildState,
    Event,
    Exited,
    Finish,
    IllegalTransition,
    KillTimeout,
    Level,
    RestartRule,
    SendKill,
    SendTerm,
    Spawn,
    Spawned,
    SpawnFailed,
    StartTimer,
    StopRequested,
    SupervisorPlan,
    TerminalLine,
    describe_exit,
)

RULE = RestartRule(backoff_initial_s=1.0, backoff_max_s=5.0, stable_after_s=10.0)
STOP_S = 30.0
SAMPLES: dict[type[Event], Event] = {
    Spawned: Spawned("a"),
    SpawnFailed: SpawnFailed("a", "no memory", retryable=True),
    Exited: Exited("a", 1, 0.5),
    BackoffElapsed: BackoffElapsed("a"),
    KillTimeout: KillTimeout("a"),
}
WAY_TO: dict[ChildState, list[Event]] = {
    ChildState.PENDING: [],
    ChildState.RUNNING: [Spawned("a")],
    ChildState.BACKOFF: [Spawned("a"), Exited("a", 1, 0.5)],
    ChildState.STOPPING: [Spawned("a"), StopRequested("test")],
    ChildState.STOPPED: [Spawned("a"), StopRequested("test"), Exited("a", 0, 1.0)],
    ChildState.FAILED: [Spawned("a"), Exited("a", 2, 0.1)],
}


def make(**stages: int) -> SupervisorPlan:
    return SupervisorPlan(stages or {"a": 0}, RULE, STOP_S)


def play(plan: SupervisorPlan, *events: Event, now: float = 0.0) -> list[Action]:
    """All events at one time; the last one's actions without the reports."""
    actions: list[Action] = []
    for event in events:
        actions = plan.handle(event, now)
    return [action for action in actions if not isinstance(action, TerminalLine)]


def reports(actions: list[Action]) -> list[TerminalLine]:
    return [action for action in actions if isinstance(action, TerminalLine)]


def test_begins_with_all_children_in_order() -> None:
    plan = make(b=0, a=0)
    assert plan.start_actions() == [Spawn("b"), Spawn("a")]
    assert plan.state("a") is ChildState.PENDING


def test_runs_when_spawned() -> None:
    plan = make()
    assert play(plan, Spawned("a")) == []
    assert plan.state("a") is ChildState.RUNNING


def test_crash_is_reported_and_restarted_after_the_backoff() -> None:
    plan = make()
    play(plan, Spawned("a"))
    actions = plan.handle(Exited("a", 1, 3.2, "out of memory"), 3.2)
    assert actions == [
        TerminalLine(Level.WARNING, "a exited with code 1 after 3.2 s: out of memory; restarting in 1 s"),
        StartTimer(1.0, BackoffElapsed("a")),
    ]
    assert plan.state("a") is ChildState.BACKOFF
    assert plan.handle(BackoffElapsed("a"), 4.2) == [Spawn("a")]
    assert plan.restarts("a") == 1


def test_last_words_are_no_cause_of_a_death_by_signal() -> None:
    plan = make()
    play(plan, Spawned("a"))
    (report,) = reports(plan.handle(Exited("a", -9, 3.2, "cannot go on"), 3.2))
    assert report.text == "a was killed by SIGKILL after 3.2 s; restarting in 1 s"


def crash_delay(plan: SupervisorPlan, ran_s: float, at: float, was_serving: bool = True) -> float:
    play(plan, Spawned("a"), now=at)
    (timer,) = play(plan, Exited("a", 1, ran_s, was_serving=was_serving), now=at + ran_s)
    assert isinstance(timer, StartTimer)
    play(plan, timer.fires, now=at + ran_s + timer.delay_s)
    return timer.delay_s


def test_backoff_doubles_to_its_maximum_and_a_stable_run_resets_it() -> None:
    plan = make()
    assert [crash_delay(plan, 9.9, at) for at in (0, 100, 200, 300, 400)] == [1, 2, 4, 5, 5]
    assert crash_delay(plan, 10.0, 500) == 1
    assert crash_delay(plan, 0.1, 600) == 2


def test_a_long_run_that_never_served_does_not_reset_the_backoff() -> None:
    plan = make()
    assert [crash_delay(plan, 60.0, at, was_serving=False) for at in (0, 100, 200, 300, 400)] == [
        1,
        2,
        4,
        5,
        5,
    ]


def test_an_unrequested_clean_exit_is_restarted_too() -> None:
    assert play(make(), Spawned("a"), Exited("a", 0, 1.0)) == [StartTimer(1.0, BackoffElapsed("a"))]


def test_exit_code_2_fails_the_child_and_stops_the_rest() -> None:
    plan = make(a=0, b=0, c=0)
    play(plan, Spawned("a"), Spawned("b"), Spawned("c"), Exited("c", 1, 0.1))
    actions = plan.handle(Exited("a", 2, 0.1, "port 8000 is taken"), 0.1)
    (report,) = reports(actions)
    assert report.level is Level.ERROR
    assert "port 8000 is taken" in report.text
    assert actions[1:] == [SendTerm("b"), StartTimer(STOP_S, KillTimeout("b"))]
    assert [plan.state(name) for name in "abc"] == ["failed", "stopping", "stopped"]
    assert play(plan, Exited("b", 0, 1.0)) == [Finish(2)]


def test_exit_code_2_of_the_only_child_finishes_at_once() -> None:
    assert play(make(), Spawned("a"), Exited("a", 2, 0.1)) == [Finish(2)]


def test_a_missing_program_is_not_tried_again() -> None:
    plan = make()
    actions = plan.handle(SpawnFailed("a", "there is no program x", retryable=False), 0)
    assert "there is no program x" in reports(actions)[0].text
    assert actions[-1] == Finish(2)


def test_a_spawn_that_failed_for_a_while_is_tried_again() -> None:
    plan = make()
    assert play(plan, SpawnFailed("a", "no memory", retryable=True)) == [StartTimer(1.0, BackoffElapsed("a"))]


def test_stop_goes_to_all_in_reverse_order_and_finishes_with_the_last() -> None:
    plan = make(a=0, b=0)
    play(plan, Spawned("a"), Spawned("b"))
    assert play(plan, StopRequested("SIGTERM")) == [
        SendTerm("b"),
        StartTimer(STOP_S, KillTimeout("b")),
        SendTerm("a"),
        StartTimer(STOP_S, KillTimeout("a")),
    ]
    assert play(plan, StopRequested("again")) == []
    assert play(plan, Exited("a", -15, 1.0)) == []
    assert play(plan, Exited("b", 1, 1.0)) == [Finish(0)]
    assert play(plan, KillTimeout("a")) == []


def test_a_lower_stage_is_stopped_when_the_higher_is_gone() -> None:
    plan = make(worker=0, frontend=1)
    play(plan, Spawned("worker"), Spawned("frontend"))
    assert play(plan, StopRequested("x"))[0] == SendTerm("frontend")
    assert plan.state("worker") is ChildState.RUNNING
    assert play(plan, Exited("frontend", 0, 1.0))[0] == SendTerm("worker")
    assert play(plan, Exited("worker", 0, 1.0)) == [Finish(0)]


def test_a_crash_while_waiting_for_its_stage_is_not_restarted() -> None:
    plan = make(worker=0, frontend=1)
    play(plan, Spawned("worker"), Spawned("frontend"), StopRequested("x"))
    assert play(plan, Exited("worker", 1, 1.0)) == []
    assert plan.state("worker") is ChildState.STOPPED
    assert play(plan, Exited("frontend", 0, 1.0)) == [Finish(0)]


def test_a_child_in_backoff_stops_at_once_even_below_the_present_stage() -> None:
    plan = make(worker=0, frontend=1)
    play(plan, Spawned("worker"), Spawned("frontend"), Exited("worker", 1, 1.0), StopRequested("x"))
    assert plan.state("worker") is ChildState.STOPPED
    assert play(plan, BackoffElapsed("worker")) == []


def test_a_stop_that_overtakes_a_spawn_ends_the_process_when_it_is_there() -> None:
    plan = make()
    assert play(plan, StopRequested("x")) == []
    assert play(plan, Spawned("a")) == [SendTerm("a"), StartTimer(STOP_S, KillTimeout("a"))]
    assert play(plan, Exited("a", 0, 1.0)) == [Finish(0)]


def test_a_stop_that_overtakes_a_failing_spawn_finishes() -> None:
    assert play(make(), StopRequested("x"), SpawnFailed("a", "no memory", retryable=True)) == [Finish(0)]


def test_deaf_child_is_killed_and_an_unkillable_one_is_left() -> None:
    plan = make()
    play(plan, Spawned("a"), StopRequested("x"))
    assert play(plan, KillTimeout("a")) == [SendKill("a"), StartTimer(STOP_S, KillTimeout("a"))]
    assert play(plan, KillTimeout("a")) == [Finish(1)]
    assert play(plan, Exited("a", -9, 99.0)) == []
    assert plan.state("a") is ChildState.FAILED


def test_the_first_failure_sets_the_exit_code() -> None:
    plan = make(a=0, b=0)
    play(plan, Spawned("a"), Spawned("b"), Exited("a", 2, 0.1), KillTimeout("b"))
    assert play(plan, KillTimeout("b")) == [Finish(2)]


@pytest.mark.parametrize(("state", "kind"), list(itertools.product(ChildState, SAMPLES)))
def test_the_table_says_what_is_legal(state: ChildState, kind: type[Event]) -> None:
    plan = make()
    play(plan, *WAY_TO[state])
    assert plan.state("a") is state
    if (state, kind) in TRANSITIONS:
        plan.handle(SAMPLES[kind], 1.0)
        assert plan.state("a") in TRANSITIONS[state, kind]
        return
    before = (plan.state("a"), plan.restarts("a"), plan.stopping)
    with pytest.raises(IllegalTransition) as raised:
        plan.handle(SAMPLES[kind], 1.0)
    assert raised.value.fields == {"child": "a", "state": state.value, "event": kind.__name__}
    assert (plan.state("a"), plan.restarts("a"), plan.stopping) == before


def test_unknown_child_and_no_child_are_refused() -> None:
    with pytest.raises(IllegalTransition):
        make().handle(Spawned("nobody"), 0)
    with pytest.raises(ConfigError):
        SupervisorPlan({}, RULE, STOP_S)


def test_exit_codes_in_words() -> None:
    assert describe_exit(3) == "exited with code 3"
    assert describe_exit(-15) == "was killed by SIGTERM"
    assert describe_exit(-200) == "was killed by signal 200"
