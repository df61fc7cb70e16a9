"""SessionAffinity: decay and bound."""

from __future__ import annotations

import pytest

from kvolt.core.ids import InstanceId
from kvolt.core.request import RoutingHints
from kvolt.router.policy.affinity import SessionAffinity
from kvolt.router.worker_rank import WorkerDpRank

A, B = WorkerDpRank(InstanceId("a"), 0), WorkerDpRank(InstanceId("a"), 1)


def session(name: str, tenant: str | None = None) -> RoutingHints:
    return RoutingHints(session=name, tenant=tenant)


def test_it_decays_from_the_last_request_on() -> None:
    affinity = SessionAffinity(half_life_s=10.0, max_sessions=9)
    assert affinity.last_served(session("s"), 0.0) is None
    affinity.record(session("s"), A, 100.0)
    assert affinity.last_served(session("s"), 100.0) == (A, 1.0)
    assert affinity.last_served(session("s"), 120.0) == (A, pytest.approx(0.25))
    affinity.record(session("s"), B, 120.0)
    assert affinity.last_served(session("s"), 119.0) == (B, 1.0), "never more than at once"
    assert affinity.num_sessions == 1


def test_sessions_of_others_are_others() -> None:
    affinity = SessionAffinity(10.0, 9)
    affinity.record(session("s", "one"), A, 0.0)
    affinity.record(RoutingHints(tenant="one"), A, 0.0)
    assert affinity.last_served(session("s", "two"), 0.0) is None
    assert affinity.last_served(session("s"), 0.0) is None
    assert affinity.last_served(RoutingHints(), 0.0) is None
    assert affinity.num_sessions == 1


def test_beyond_the_bound_the_least_recent_session_is_evicted() -> None:
    affinity = SessionAffinity(10.0, 3)
    for number in range(3):
        affinity.record(session(str(number)), A, float(number))
    affinity.record(session("0"), A, 5.0)
    affinity.record(session("new"), A, 6.0)
    assert affinity.num_sessions == 3
    assert affinity.last_served(session("1"), 6.0) is None
    assert affinity.last_served(session("0"), 6.0) is not None
