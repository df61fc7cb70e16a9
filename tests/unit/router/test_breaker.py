"""Circuit breakers: opening, probing, closing, and the cost of retries."""

from __future__ import annotations

import numpy as np
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
    Overloaded,
    ProtocolError,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from kvolt.core.ids import InstanceId
from kvolt.router.breaker import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    Attempt,
    Breakers,
    BreakerState,
    BreakerView,
    Outcome,
    outcome_of,
)
from kvolt.router.policy.policy import add_retry_cost

A, B, C = map(InstanceId, "abc")
ALL = (A, B, C)


class Scene:
    def __init__(self) -> None:
        self.time_s = 0.0
        self.breakers = Breakers(lambda: self.time_s)
        self.changes: list[tuple[InstanceId, BreakerState]] = []
        self.breakers.on_change = self._on_change

    def _on_change(self, instance_id: InstanceId, view: BreakerView) -> None:
        self.changes.append((instance_id, view.state))

    def run(self, outcome: Outcome, instance_id: InstanceId = A) -> None:
        self.breakers.end_attempt(instance_id, self.breakers.start_attempt(instance_id), outcome)

    def fail(self, times: int = 1, instance_id: InstanceId = A) -> None:
        for _ in range(times):
            self.run(Outcome.FAILED, instance_id)

    def answer(self, times: int = 1, instance_id: InstanceId = A) -> None:
        for _ in range(times):
            self.run(Outcome.ANSWERED, instance_id)

    def end_after_token(self, outcome: Outcome) -> None:
        """A request that has its first token and ends so."""
        attempt = self.breakers.start_attempt(A)
        self.breakers.mark_first_token(A, attempt)
        self.breakers.end_attempt(A, attempt, outcome)

    @property
    def blocked(self) -> frozenset[InstanceId]:
        return self.breakers.blocked(ALL)

    def opened(self) -> Scene:
        self.fail(3)
        assert self.blocked == {A}
        return self

    def probing(self) -> Attempt:
        self.opened()
        return self.probing_again()

    def probing_again(self) -> Attempt:
        self.time_s += self.breakers.views()[A].retry_in_s
        assert not self.blocked
        attempt = self.breakers.start_attempt(A)
        assert attempt is not None
        return attempt


def test_an_instance_that_never_failed_has_no_breaker() -> None:
    scene = Scene()
    scene.answer(10)
    assert scene.breakers.start_attempt(A) is None
    assert not scene.breakers
    assert scene.breakers.failure_rates(ALL) is None
    assert not scene.blocked


def test_three_failures_in_a_row_open_it_and_fewer_do_not() -> None:
    scene = Scene()
    scene.fail(2)
    assert not scene.blocked
    scene.fail()
    assert scene.blocked == {A}
    assert scene.changes == [(A, BreakerState.OPEN)]


def test_occasional_failures_do_not_open_it_and_are_forgotten() -> None:
    scene = Scene()
    for _ in range(20):
        scene.fail()
        scene.answer(4)
    assert not scene.changes
    scene.answer(20)
    assert not scene.breakers


def test_an_unknown_end_counts_as_nothing() -> None:
    scene = Scene()
    scene.run(Outcome.UNKNOWN)
    assert not scene.breakers
    scene.fail(2)
    for _ in range(10):
        scene.run(Outcome.UNKNOWN)
    scene.fail()
    assert scene.blocked == {A}


def test_where_all_are_open_none_is_passed_over() -> None:
    scene = Scene()
    for instance_id in (A, B):
        scene.fail(3, instance_id)
    assert scene.blocked == {A, B}
    scene.fail(3, C)
    assert scene.blocked == frozenset()
    assert scene.breakers.blocked((A,)) == frozenset(), "a pinned request has no other candidate"


def test_it_is_probed_by_one_request_at_a_time_until_its_first_token() -> None:
    scene = Scene()
    probe = scene.probing()
    assert scene.blocked == {A}
    scene.breakers.mark_first_token(A, probe)
    assert not scene.blocked
    scene.breakers.start_attempt(A)
    assert scene.blocked == {A}


def test_a_probe_that_is_answered_closes_it() -> None:
    scene = Scene()
    scene.breakers.end_attempt(A, scene.probing(), Outcome.ANSWERED)
    assert not scene.blocked
    assert not scene.breakers.is_any_open
    assert scene.changes[-1] == (A, BreakerState.CLOSED)


@pytest.mark.parametrize("has_token", [False, True])
def test_a_probe_that_fails_opens_it_for_longer(has_token: bool) -> None:
    scene = Scene()
    probe = scene.probing()
    if has_token:  # it fails amid the answer
        scene.breakers.mark_first_token(A, probe)
    scene.breakers.end_attempt(A, probe, Outcome.FAILED)
    scene.time_s += 1.5 * FIRST_BACKOFF_S
    assert scene.blocked == {A}
    scene.time_s += FIRST_BACKOFF_S
    assert not scene.blocked


def test_a_probe_without_outcome_allows_another() -> None:
    scene = Scene()
    scene.breakers.end_attempt(A, scene.probing(), Outcome.UNKNOWN)
    assert not scene.blocked
    assert scene.breakers.views()[A].state is BreakerState.HALF_OPEN


def test_back_off_doubles_up_to_its_bound() -> None:
    scene = Scene().opened()
    waits = []
    for _ in range(8):
        waits.append(scene.breakers.views()[A].retry_in_s)
        scene.time_s += waits[-1]
        scene.fail()
    assert waits == [min(FIRST_BACKOFF_S * 2**number, MAX_BACKOFF_S) for number in range(8)]


def test_what_was_sent_before_it_opened_changes_nothing() -> None:
    scene = Scene()
    scene.fail()
    early = [scene.breakers.start_attempt(A) for _ in range(4)]
    scene.fail(2)
    before = scene.breakers.views()[A]
    scene.breakers.end_attempt(A, early[0], Outcome.FAILED)
    scene.breakers.end_attempt(A, early[1], Outcome.ANSWERED)
    scene.breakers.end_attempt(A, None, Outcome.ANSWERED)  # from before its first failure
    assert scene.breakers.views()[A] == before
    probe = scene.probing_again()
    scene.breakers.mark_first_token(A, early[2])
    scene.breakers.end_attempt(A, early[2], Outcome.ANSWERED)
    assert scene.blocked == {A}, "the probe is still under way"
    scene.breakers.end_attempt(A, probe, Outcome.ANSWERED)
    scene.breakers.end_attempt(A, early[3], Outcome.FAILED)
    assert not scene.breakers.is_any_open


def test_it_opens_again_sooner_after_it_closed() -> None:
    scene = Scene()
    scene.breakers.end_attempt(A, scene.probing(), Outcome.ANSWERED)
    scene.fail(2)
    assert scene.blocked == {A}
    assert scene.breakers.views()[A].retry_in_s == 2 * FIRST_BACKOFF_S


def test_a_deregistered_instance_is_forgotten() -> None:
    scene = Scene()
    probe = scene.probing()
    scene.breakers.retain((B, C))
    assert not scene.breakers
    assert not scene.breakers.is_any_open
    scene.breakers.mark_first_token(A, probe)
    scene.breakers.end_attempt(A, probe, Outcome.ANSWERED)
    assert not scene.breakers


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, Outcome.ANSWERED),
        (EngineFailed("e"), Outcome.FAILED),
        (EngineDied("e"), Outcome.FAILED),
        (TransferFailed("t"), Outcome.FAILED),
        (KvoltError("internal error (KeyError)"), Outcome.FAILED),
        (ProtocolError("p"), Outcome.FAILED),
        (ConnectFailed("the attached server is gone"), Outcome.FAILED),
        (DeadlineExceeded("d", stage="first"), Outcome.FAILED),
        (DeadlineExceeded("d", stage="between"), Outcome.FAILED),
        (DeadlineExceeded("d", stage="total"), Outcome.UNKNOWN),
        (DeadlineExceeded("d", stage="route"), Outcome.UNKNOWN),
        (Overloaded("full"), Outcome.UNKNOWN),
        (Unavailable("draining"), Outcome.UNKNOWN),
        (WorkerLost("w"), Outcome.UNKNOWN),
        (InvalidRequest("i"), Outcome.UNKNOWN),
        (Cancelled("c"), Outcome.UNKNOWN),
    ],
    ids=repr,
)
def test_outcome_of_each_error(error: KvoltError | None, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("send"), st.sampled_from(ALL)),
            st.tuples(st.just("token"), st.integers(0, 30)),
            st.tuples(st.sampled_from(list(Outcome)), st.integers(0, 30)),
            st.tuples(st.just("wait"), st.floats(0.0, 5.0)),
        ),
        max_size=120,
    )
)
def test_a_breaker_always_recovers(events: list[tuple[str, object]]) -> None:
    """At most one waits at a half-open instance that others could replace, and an answered request heals each."""
    scene = Scene()
    under_way: list[tuple[InstanceId, Attempt | None]] = []
    for what, value in events:
        if what == "send" and value not in scene.blocked:
            assert isinstance(value, str)
            under_way.append((InstanceId(value), scene.breakers.start_attempt(InstanceId(value))))
        elif what == "wait":
            assert isinstance(value, float)
            scene.time_s += value
        elif under_way and isinstance(value, int):
            number = value % len(under_way)
            if what == "token":
                scene.breakers.mark_first_token(*under_way[number])
            elif what != "send":
                scene.breakers.end_attempt(*under_way.pop(number), Outcome(what))
        assert len(scene.blocked) < len(ALL)
    for ended in under_way:
        scene.breakers.end_attempt(*ended, Outcome.UNKNOWN)
    scene.time_s += MAX_BACKOFF_S
    assert not scene.blocked
    for instance_id in ALL:
        scene.answer(30, instance_id)
    assert not scene.breakers
    assert not scene.breakers.is_any_open


# --- what a cost makes of it


def test_a_worker_that_always_fails_costs_like_the_best_other() -> None:
    costs = add_retry_cost(np.array([0.1, 1.0, 2.0]), np.array([1.0, 0.0, 0.0]))
    assert costs.tolist() == [1.0, 1.0, 2.0]


def test_half_of_the_failures_are_paid_for_by_half() -> None:
    costs = add_retry_cost(np.array([0.0, 1.0, 2.0]), np.array([0.5, 0.0, 1.0]))
    assert costs.tolist() == [0.5, 1.0, 2.0], "a dear place becomes no cheaper by failing"


def test_a_single_candidate_has_no_retry_cost() -> None:
    assert add_retry_cost(np.array([3.0]), np.array([1.0])).tolist() == [3.0]


def test_a_client_that_leaves_after_the_first_token_shows_that_answers_begin() -> None:
    scene = Scene()
    attempt = scene.probing()
    scene.breakers.mark_first_token(A, attempt)
    scene.breakers.end_attempt(A, attempt, Outcome.LEFT)
    assert scene.breakers.views()[A].state is BreakerState.CLOSED


def test_a_connection_lost_after_the_first_token_does_not_close_a_breaker() -> None:
    scene = Scene()
    attempt = scene.probing()
    scene.breakers.mark_first_token(A, attempt)
    scene.breakers.end_attempt(A, attempt, outcome_of(WorkerLost("w")))
    assert scene.breakers.views()[A].state is BreakerState.HALF_OPEN


def test_a_client_that_leaves_after_the_first_token_does_not_show_that_answers_are_completed() -> None:
    scene = Scene()
    scene.fail()
    while not scene.blocked:
        scene.end_after_token(Outcome.FAILED)
        scene.end_after_token(Outcome.LEFT)
    scene.time_s += FIRST_BACKOFF_S
    for _ in range(10):
        scene.end_after_token(Outcome.LEFT)
    assert scene.breakers.views()[A].state is BreakerState.HALF_OPEN
    scene.end_after_token(Outcome.ANSWERED)
    assert scene.breakers.views()[A].state is BreakerState.CLOSED
    scene.fail()
    rate = scene.breakers.views()[A].failure_rate
    scene.end_after_token(Outcome.LEFT)
    assert scene.breakers.views()[A].failure_rate < rate, (
        "it has completed an answer since it failed amid one"
    )
