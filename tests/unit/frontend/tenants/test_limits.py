"""Limits of a tenant: exact over time, all or nothing."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.frontend.tenants.budgets import ratelimit_headers
from kvolt.frontend.tenants.limits import Amounts, Limit, TenantBudget
from kvolt.frontend.tenants.records import Tenant

REQUEST = Amounts(requests=1, concurrency=1)


def budget(now: float = 0.0, share: float = 1.0, **limits: float) -> TenantBudget:
    return TenantBudget(Tenant(name="acme", **limits), now, share)


def test_without_limits_all_is_admitted() -> None:
    free = budget()
    assert all(free.take(REQUEST, 0.0) is None for _ in range(1000))
    assert ratelimit_headers(free.rules, free.levels(0.0)) == {}


def test_requests_per_second_are_exact() -> None:
    each = budget(requests_per_second=5)
    admitted = [step for step in range(1000) if each.take(REQUEST, step * 0.01) is None]
    assert len(admitted) == 5 + math.floor(9.99 * 5)
    refusal = each.take(Amounts(requests=1), 9.99)
    assert refusal is not None
    assert refusal.limit is Limit.REQUESTS
    assert each.take(REQUEST, 9.99 + refusal.retry_after_s - 0.001) is not None
    assert each.take(REQUEST, 9.99 + refusal.retry_after_s) is None


def test_a_rate_below_one_admits_its_first_request() -> None:
    each = budget(requests_per_second=0.1)
    assert each.take(REQUEST, 0.0) is None
    assert each.take(REQUEST, 9.9) is not None
    assert each.take(REQUEST, 10.0) is None


def test_slots_are_free_again_when_they_are_put_back() -> None:
    each = budget(concurrency=2)
    assert [each.take(REQUEST, 0.0) for _ in range(2)] == [None, None]
    refusal = each.take(REQUEST, 1000.0)
    assert refusal is not None
    assert refusal.limit is Limit.CONCURRENCY
    each.put_back(Amounts(concurrency=1))
    assert each.take(REQUEST, 1000.0) is None


def test_a_refused_request_takes_nothing() -> None:
    each = budget(requests_per_second=2, concurrency=1)
    assert each.take(REQUEST, 0.0) is None
    assert each.take(REQUEST, 0.0) is not None  # no slot
    assert each.levels(0.0).requests == 1


def test_unused_tokens_are_put_back_and_a_debt_is_paid_first() -> None:
    each = budget(output_tokens_per_minute=60)
    assert each.take(Amounts(output_tokens=60), 0.0) is None
    each.put_back(Amounts(output_tokens=50))
    assert each.levels(0.0).output_tokens == 50
    each.charge(Amounts(output_tokens=80), 0.0)
    refusal = each.take(Amounts(output_tokens=1), 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == pytest.approx(31)
    assert ratelimit_headers(each.rules, each.levels(0.0))["x-ratelimit-remaining-tokens"] == "0"


def test_more_than_the_whole_limit_is_never_admitted() -> None:
    refusal = budget(input_tokens_per_minute=100).take(Amounts(input_tokens=101), 0.0)
    assert refusal is not None
    assert refusal.retry_after_s == math.inf


def test_a_changed_limit_applies_to_what_is_in_use() -> None:
    each = budget(concurrency=5, requests_per_second=10)
    for _ in range(4):
        each.take(REQUEST, 0.0)
    each.update(Tenant(name="acme", concurrency=3, requests_per_second=2), 1.0, 0.0)
    assert each.levels(0.0).concurrency == -1
    assert each.levels(0.0).requests == 2
    each.put_back(Amounts(concurrency=4))
    assert each.levels(0.0).concurrency == 3
    each.update(Tenant(name="acme"), 1.0, 0.0)
    assert all(each.take(REQUEST, 0.0) is None for _ in range(100))


def test_a_share_is_a_part_of_the_limit_but_at_least_one_request() -> None:
    each = budget(share=0.25, requests_per_second=8, concurrency=2)
    assert each.rules.capacities.requests == 2
    assert each.rules.capacities.concurrency == 1
    assert each.take(REQUEST, 0.0) is None


@given(
    st.floats(0.1, 100),
    st.lists(st.tuples(st.floats(0, 5), st.integers(1, 20)), max_size=60),
)
def test_no_window_admits_more_than_a_burst_and_the_rate(rate: float, steps: list[tuple[float, int]]) -> None:
    each = budget(requests_per_second=rate)
    now, admitted = 0.0, []
    for pause, count in steps:
        now += pause
        admitted += [now for _ in range(count) if each.take(Amounts(requests=1), now) is None]
    burst = max(rate, 1.0)
    for first, start in enumerate(admitted):
        for last in range(first, len(admitted)):
            assert last - first + 1 <= burst + rate * (admitted[last] - start) + 1e-3
