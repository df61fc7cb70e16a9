"""IndexHealth: a single error is tolerated, many flag a worker, agreement clears it."""

from __future__ import annotations

import random

from kvolt.core.ids import InstanceId
from kvolt.router.index.health import HealthChange, IndexHealth, IndexHealthOptions, PredictedBlocks

A, B = InstanceId("a"), InstanceId("b")


def reports(
    index_health: IndexHealth,
    number: int,
    held: int,
    cached: int,
    now: float = 0.0,
    expected: int | None = None,
) -> list[HealthChange]:
    predicted = PredictedBlocks(held, held if expected is None else expected)
    changes = [index_health.record_report(A, predicted, cached, now) for _ in range(number)]
    return [each for each in changes if each is not None]


def test_a_worker_that_matches_stays_healthy() -> None:
    index_health = IndexHealth()
    assert reports(index_health, 100, held=20, cached=20) == []
    assert reports(index_health, 100, held=20, cached=19) == [], "a block more or less is none"
    assert (index_health.is_healthy(A), index_health.num_wrong) == (True, 0)


def test_one_that_has_nothing_of_it_is_flagged_once_after_enough_reports() -> None:
    index_health = IndexHealth(IndexHealthOptions(min_reports=16))
    assert reports(index_health, 15, held=20, cached=0) == []
    assert reports(index_health, 1, held=20, cached=0) == [HealthChange.FLAGGED]
    assert reports(index_health, 50, held=20, cached=0) == []
    assert not index_health.is_healthy(A)
    assert index_health.is_healthy(B)
    assert (index_health.flagged, index_health.num_flaggings, index_health.num_wrong) == ([A], 1, 66)


def test_more_cached_blocks_than_predicted_are_flagged() -> None:
    index_health = IndexHealth()
    assert reports(index_health, 20, held=0, cached=20) == [HealthChange.FLAGGED]


def test_uncached_prompts_are_ignored() -> None:
    index_health = IndexHealth()
    reports(index_health, 15, held=20, cached=0)
    assert reports(index_health, 1000, held=0, cached=0) == []
    assert index_health.num_reports == 15
    assert reports(index_health, 1, held=20, cached=0) == [HealthChange.FLAGGED], (
        "they have not washed it out"
    )


def test_pending_blocks_may_be_cached_or_not() -> None:
    index_health = IndexHealth()
    for cached in (4, 10, 20):
        assert reports(index_health, 100, held=4, expected=20, cached=cached) == []
        assert index_health.num_wrong == 0
    assert reports(index_health, 100, held=0, expected=4, cached=20) == [HealthChange.FLAGGED]


def test_evictions_now_and_then_are_no_reason() -> None:
    index_health, rng = IndexHealth(), random.Random(3)
    for _ in range(5000):
        cached = 0 if rng.random() < 0.2 else 20
        assert index_health.record_report(A, PredictedBlocks(20, 20), cached, 0.0) is None


def test_a_flagged_worker_is_cleared_after_agreeing() -> None:
    index_health = IndexHealth(IndexHealthOptions(min_agreeing=32, min_flagged_s=10.0))
    reports(index_health, 20, held=20, cached=0)
    assert reports(index_health, 40, held=20, cached=20, now=9.0) == [], "not so soon"
    assert reports(index_health, 1, held=20, cached=20, now=11.0) == [HealthChange.CLEARED]
    assert index_health.is_healthy(A)
    assert reports(index_health, 15, held=20, cached=0, now=12.0) == [], (
        "and it needs as much evidence as before"
    )
    assert reports(index_health, 1, held=20, cached=0, now=12.0) == [HealthChange.FLAGGED]
    assert reports(index_health, 31, held=20, cached=20, now=99.0) == []
    assert reports(index_health, 1, held=20, cached=20, now=99.0) == [HealthChange.CLEARED]


def test_half_agreement_does_not_heal() -> None:
    index_health = IndexHealth()
    reports(index_health, 20, held=20, cached=0)
    for _ in range(500):
        assert index_health.record_report(A, PredictedBlocks(20, 20), 20, 99.0) is None
        assert index_health.record_report(A, PredictedBlocks(20, 20), 0, 99.0) is None


def test_a_dropped_worker_is_forgotten() -> None:
    index_health = IndexHealth()
    reports(index_health, 20, held=20, cached=0)
    index_health.drop_worker(A)
    index_health.drop_worker(A)
    assert (index_health.is_healthy(A), index_health.flagged) == (True, [])
