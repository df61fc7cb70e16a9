"""How long KV takes between two workers: learned for each pair, forgotten with time, given to who chooses."""

from __future__ import annotations

import math

import pytest
from tests.unit.engines.lab import make_request

from kvolt.core.delta import StageTimes
from kvolt.core.ids import InstanceId
from kvolt.journey import links
from kvolt.journey.links import KvLinkSpeeds, with_link_costs

REQUEST = make_request(prompt=400)
P0, P1 = InstanceId("p0"), InstanceId("p1")
D0, D1 = InstanceId("d0"), InstanceId("d1")
FAST, SLOW = 10.0, 1000.0
"""Milliseconds for the 4 MB of a prompt."""


class Clock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def __call__(self) -> float:
        return self.time_s


def took(took_ms: float, num_bytes: int = 4_000_000) -> StageTimes:
    return StageTimes(transfer_bytes=num_bytes, transfer_ms=took_ms)


def learned(*handoffs: tuple[InstanceId, InstanceId, float], times: int = 20) -> tuple[KvLinkSpeeds, Clock]:
    clock = Clock()
    speeds = KvLinkSpeeds(clock)
    for source, target, took_ms in handoffs * times:
        speeds.observe(REQUEST, took(took_ms), source, target)
    return speeds, clock


def test_a_guess_stands_until_something_has_moved() -> None:
    speeds = KvLinkSpeeds(Clock())
    guess = speeds.costs_from(P0)
    assert guess.token_s > 0
    for nothing in (
        StageTimes(),
        took(9.0, 0),
        took(0.0, 9),
        took(-1.0),
        took(1.0, -1),
        took(math.inf),
        took(math.nan),
    ):
        speeds.observe(REQUEST, nothing, P0, D0)
    assert speeds.costs_from(P0) == speeds.costs_to(D0) == guess
    speeds.observe(REQUEST, took(40.0), P0, D0)
    assert speeds.costs_from(P1).token_s == pytest.approx(0.04 / 400)


def test_each_link_is_as_fast_as_its_own_handoffs() -> None:
    speeds, _ = learned((P0, D0, FAST), (P0, D1, SLOW), (P1, D1, FAST))
    out = speeds.costs_from(P0)
    assert out.by_peer[D1] > 20 * out.by_peer[D0]
    assert out.by_peer[D0] < out.token_s < out.by_peer[D1]
    into = speeds.costs_to(D1)
    assert into.by_peer == {P0: out.by_peer[D1], P1: into.by_peer[P1]}
    assert into.by_peer[P1] == pytest.approx(out.by_peer[D0])
    assert not speeds.costs_from(D0).by_peer, "nothing has come from there"


def test_one_slow_handoff_is_not_taken_for_the_link() -> None:
    speeds, _ = learned((P0, D0, FAST), (P0, D1, FAST), times=100)
    before = speeds.costs_from(P0)
    speeds.observe(REQUEST, took(SLOW), P0, D1)
    after = speeds.costs_from(P0)
    assert before.by_peer[D1] < after.by_peer[D1] < 0.2 * SLOW / 1e3 / 400


def test_a_link_that_was_slow_is_tried_again() -> None:
    speeds, clock = learned((P0, D0, FAST), (P0, D1, SLOW))
    for _ in range(100):
        speeds.observe(REQUEST, took(FAST), P0, D0)
    slow = speeds.costs_from(P0)
    assert slow.by_peer[D1] > 20 * slow.token_s
    clock.time_s = 600.0
    later = speeds.costs_from(P0)
    assert later.by_peer[D1] == pytest.approx(later.token_s, rel=0.01)


def test_a_link_that_has_become_slower_is_soon_known() -> None:
    speeds, _ = learned((P0, D0, FAST), times=50)
    for _ in range(20):
        speeds.observe(REQUEST, took(10 * FAST), P0, D0)
    assert 6 * FAST < 400e3 * speeds.costs_from(P0).by_peer[D0] < 10 * FAST


def test_a_prompt_that_was_there_in_part_does_not_make_tokens_smaller() -> None:
    speeds, _ = learned((P0, D0, 40.0), times=1)
    speeds.observe(REQUEST, took(10.0, 1_000_000), P0, D0)
    assert speeds.costs_from(P0).token_s == pytest.approx(0.04 / 400, rel=0.02)


def test_links_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_MAX_LINKS", 2)
    speeds, _ = learned((P0, D0, FAST), (P0, D1, FAST), times=1)
    speeds.observe(REQUEST, took(FAST), P0, D0)  # used again
    speeds.observe(REQUEST, took(FAST), P1, D1)
    assert set(speeds.costs_from(P0).by_peer) == {D0}
    assert set(speeds.costs_to(D1).by_peer) == {P1}
    speeds.observe(REQUEST, took(FAST), P1, D0)
    assert not speeds.costs_from(P0).by_peer


def test_a_router_gets_them_with_the_request() -> None:
    speeds, _ = learned((P0, D0, FAST))
    assert with_link_costs(REQUEST, None) is REQUEST
    costs = speeds.costs_from(P0)
    asked = with_link_costs(REQUEST, costs)
    assert asked.routing.link_costs == costs
    assert asked.token_ids is REQUEST.token_ids


def test_a_stalled_transfer_does_not_end_handoffs() -> None:
    speeds, clock = learned((P0, D0, FAST))
    before = speeds.costs_from(P0).token_s
    speeds.observe(REQUEST, took(60_000.0), P0, D1)
    assert speeds.costs_from(P0).token_s < 3 * before
    for _ in range(100):
        speeds.observe(REQUEST, took(60_000.0), P0, D1)
    assert speeds.costs_from(P0).token_s > 1000 * before, "it is what happens now"
    clock.time_s += 24 * 3600.0
    assert speeds.costs_from(P0).token_s < before


@pytest.mark.parametrize("stages", [took(1e300), took(599_999.0, 1), took(1e-300), took(1.0, 1 << 80)])
def test_a_peer_that_lies_is_corrected(stages: StageTimes) -> None:
    speeds, _ = learned((P0, D0, FAST))
    before = speeds.costs_from(P0).by_peer[D0]
    for _ in range(20):
        speeds.observe(REQUEST, stages, P0, D0)
    worst = speeds.costs_from(P0)
    assert math.isfinite(worst.token_s * 0)
    assert math.isfinite(worst.by_peer[D0])
    for _ in range(1000):
        speeds.observe(REQUEST, took(FAST), P0, D0)
    assert speeds.costs_from(P0).by_peer[D0] == pytest.approx(before, rel=0.1)
