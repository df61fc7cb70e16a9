"""Minutes of the router's soak (`benchmarks.router.soak` runs hours): faults must cost next to no hits."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from benchmarks.router.soak import GOAL_POINTS, growth, plans, solve

from kvolt.twin.faults import Faults


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("kvolt")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_lost_events_churn_and_restarts_cost_no_hits_and_no_answers() -> None:
    faults = Faults(event_loss=0.01, churn_s=60.0, router_restart_s=70.0)
    calm, troubled = (solve(plan) for plan in plans(5.0, 10.0, 16, faults))
    assert not calm.errors
    assert not troubled.errors
    assert sum(minute.num_whole for minute in troubled.minutes) == 3000
    assert troubled.num_workers >= 16 + 5
    assert 100 * calm.hit_rate > 50.0
    assert 100 * abs(calm.hit_rate - troubled.hit_rate) <= GOAL_POINTS
    assert growth([look.index_bytes for look in calm.looks]) < 1.5
