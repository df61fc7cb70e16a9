"""Who served a session last: a favour that decays, of as many sessions as there is room for."""

from __future__ import annotations

import pytest

from kvolt.core.ids import InstanceId
from kvolt.core.request import RoutingHints
from kvolt.router.place import Place
from kvolt.router.policy.affinity import Affinity

A, B = Place(InstanceId("a"), 0), Place(InstanceId("a"), 1)


def session(name: str, tenant: str | None = None) -> RoutingHints:
    return RoutingHints(session=name, tenant=tenant)


def test_it_decays_from_the_last_request_on() -> None:
    affinity = Affinity(half_life_s=10.0, max_sessions=9)
    assert affinity.of(session("s"), 0.0) is None
    affinity.served(session("s"), A, 100.0)
    assert affinity.of(session("s"), 100.0) == (A, 1.0)
    assert affinity.of(session("s"), 120.0) == (A, pytest.approx(0.25))
    affinity.served(session("s"), B, 120.0)
    assert affinity.of(session("s"), 119.0) == (B, 1.0), "never more than at once"
    assert affinity.num_sessions == 1


def test_sessions_of_others_are_others() -> None:
    affinity = Affinity(10.0, 9)
    affinity.served(session("s", "one"), A, 0.0)
    affinity.served(RoutingHints(tenant="one"), A, 0.0)
    assert affinity.of(session("s", "two"), 0.0) is None
    assert affinity.of(session("s"), 0.0) is None
    assert affinity.of(RoutingHints(), 0.0) is None
    assert affinity.num_sessions == 1


def test_beyond_the_bound_the_one_that_was_silent_for_longest_goes() -> None:
    affinity = Affinity(10.0, 3)
    for number in range(3):
        affinity.served(session(str(number)), A, float(number))
    affinity.served(session("0"), A, 5.0)
    affinity.served(session("new"), A, 6.0)
    assert affinity.num_sessions == 3
    assert affinity.of(session("1"), 6.0) is None
    assert affinity.of(session("0"), 6.0) is not None
