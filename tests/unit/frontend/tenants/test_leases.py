"""The limiter as a state machine: messages in, replies out; wrong ones too."""

from __future__ import annotations

import math

import pytest

from kvolt.frontend.tenants.leases import HOLDER_TIMEOUT_S, LeaseRequest, Limiter, Pool
from kvolt.frontend.tenants.limits import Amounts, Limit
from kvolt.frontend.tenants.records import Tenant

ACME = Tenant(name="acme", requests_per_second=10, concurrency=2)
TENANTS = {"acme": ACME}
BEGIN: Amounts = {Limit.REQUESTS: 1, Limit.CONCURRENCY: 1}


def known(limiter: Limiter, *holders: str) -> Limiter:
    for holder in holders:
        assert limiter.handle(LeaseRequest(holder, held={}), TENANTS, 0.0).is_known
    return limiter


def need(holder: str, now: float, limiter: Limiter, amounts: Amounts = BEGIN) -> bool:
    reply = limiter.handle(LeaseRequest(holder, "acme", dict(amounts)), TENANTS, now)
    assert reply.is_known
    assert (reply.refused is None) == (reply.granted == amounts)
    return reply.refused is None


def test_an_unknown_process_must_introduce_itself() -> None:
    limiter = Limiter(0.0)
    assert not limiter.handle(LeaseRequest("a", "acme", dict(BEGIN)), TENANTS, 0.0).is_known
    assert limiter.handle(LeaseRequest("a", held={"acme": 2}), TENANTS, 0.0).is_known
    assert not need("a", 0.0, limiter)  # both slots are in use
    assert limiter.handle(LeaseRequest("a", held={"acme": 1}), TENANTS, 0.0).is_known
    assert need("a", 0.0, limiter)


def test_an_unknown_tenant_is_reported() -> None:
    reply = known(Limiter(0.0), "a").handle(LeaseRequest("a", "other", dict(BEGIN)), TENANTS, 0.0)
    assert not reply.has_tenant


def test_silent_processes_lose_their_slots_only() -> None:
    limiter = known(Limiter(0.0), "a", "b")
    assert need("a", 0.0, limiter)
    assert need("b", 0.0, limiter)
    limiter.handle(LeaseRequest("b"), TENANTS, 4.0)
    assert not need("b", 4.0, limiter)
    assert need("b", HOLDER_TIMEOUT_S + 1, limiter)
    assert not limiter.handle(LeaseRequest("a"), TENANTS, HOLDER_TIMEOUT_S + 1).is_known


@pytest.mark.parametrize("amount", [math.nan, math.inf, -math.inf, -5.0, 1e300])
def test_absurd_amounts_create_no_budget(amount: float) -> None:
    limiter = known(Limiter(0.0), "a")
    amounts = {Limit.REQUESTS: amount, Limit.CONCURRENCY: amount}
    for request in (
        LeaseRequest("a", "acme", amounts, amounts),
        LeaseRequest("a", returned={"acme": amounts, "none": amounts}),
        LeaseRequest("a", held={"acme": amount}, levels={"acme": amounts, "none": amounts}),
    ):
        limiter.handle(request, TENANTS, 0.0)
    admitted = sum(need("a", 0.0, limiter, {Limit.REQUESTS: 1}) for _ in range(100))
    assert admitted <= 10
    assert sum(need("a", 0.0, limiter, {Limit.CONCURRENCY: 1}) for _ in range(100)) <= 2


def test_more_slots_than_are_held_cannot_be_returned() -> None:
    limiter = known(Limiter(0.0), "a", "b")
    assert need("a", 0.0, limiter)
    assert need("a", 0.0, limiter)
    limiter.handle(LeaseRequest("b", returned={"acme": {Limit.CONCURRENCY: 2}}), TENANTS, 0.0)
    assert not need("b", 0.0, limiter)


def test_a_successor_starts_empty_or_with_the_levels_of_its_predecessor() -> None:
    before = known(Limiter(0.0), "a")
    assert need("a", 0.0, before, {Limit.REQUESTS: 4})
    for levels, admitted in ((before.levels(0.0), 6), ({}, 0)):
        after = Limiter(0.0, is_successor=True)
        after.handle(LeaseRequest("a", held={}, levels=levels), TENANTS, 0.0)
        assert sum(need("a", 0.0, after, {Limit.REQUESTS: 1}) for _ in range(10)) == admitted
        assert need("a", 1.0, after, {Limit.REQUESTS: 10})


def test_a_pool_keeps_no_more_than_a_lease() -> None:
    pool = Pool(ACME)
    pool.add({Limit.REQUESTS: 50})
    assert pool.take({Limit.REQUESTS: 1}, 0.0)
    assert pool.put_back({Limit.REQUESTS: 1})
    assert pool.unsent() == {Limit.REQUESTS: 48}  # all but 0.2 s of 10 requests per second
    assert not pool.take({Limit.REQUESTS: 3}, 0.0)
    assert pool.take({Limit.REQUESTS: 2}, 0.0)
