"""The limiter as a state machine: messages in, replies out; wrong ones too."""

from __future__ import annotations

import math

import pytest

from kvolt.frontend.tenants.lease_pool import LeasePool
from kvolt.frontend.tenants.leases import HOLDER_TIMEOUT_S, LeaseReply, LeaseRequest, Limiter
from kvolt.frontend.tenants.limits import Amounts
from kvolt.frontend.tenants.records import Tenant

ACME = Tenant(name="acme", requests_per_second=10, concurrency=2)
TENANTS = {"acme": ACME}
BEGIN = Amounts(requests=1, concurrency=1)


def known(limiter: Limiter, *holders: str) -> Limiter:
    for holder in holders:
        assert limiter.handle(LeaseRequest(holder, held={}), TENANTS, 0.0).is_known
    return limiter


def need(holder: str, now: float, limiter: Limiter, amounts: Amounts = BEGIN) -> bool:
    reply = limiter.handle(LeaseRequest(holder, "acme", amounts), TENANTS, now)
    assert reply.is_known
    assert (reply.refused is None) == (reply.granted == amounts)
    return reply.refused is None


def test_an_unknown_process_must_introduce_itself() -> None:
    limiter = Limiter(0.0)
    assert not limiter.handle(LeaseRequest("a", "acme", BEGIN), TENANTS, 0.0).is_known
    assert limiter.handle(LeaseRequest("a", held={"acme": 2}), TENANTS, 0.0).is_known
    assert not need("a", 0.0, limiter)  # both slots are in use
    assert limiter.handle(LeaseRequest("a", held={"acme": 1}), TENANTS, 0.0).is_known
    assert need("a", 0.0, limiter)


def test_an_unknown_tenant_is_reported() -> None:
    reply = known(Limiter(0.0), "a").handle(LeaseRequest("a", "other", BEGIN), TENANTS, 0.0)
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
    amounts = Amounts(requests=amount, concurrency=amount)
    for request in (
        LeaseRequest("a", "acme", amounts, amounts),
        LeaseRequest("a", returned={"acme": amounts, "none": amounts}),
        LeaseRequest("a", held={"acme": amount}, levels={"acme": amounts, "none": amounts}),
    ):
        limiter.handle(request, TENANTS, 0.0)
    admitted = sum(need("a", 0.0, limiter, Amounts(requests=1)) for _ in range(100))
    assert admitted <= 10
    assert sum(need("a", 0.0, limiter, Amounts(concurrency=1)) for _ in range(100)) <= 2


def test_more_slots_than_are_held_cannot_be_returned() -> None:
    limiter = known(Limiter(0.0), "a", "b")
    assert need("a", 0.0, limiter)
    assert need("a", 0.0, limiter)
    limiter.handle(LeaseRequest("b", returned={"acme": Amounts(concurrency=2)}), TENANTS, 0.0)
    assert not need("b", 0.0, limiter)


def test_a_debt_is_paid_in_full_after_a_time_without_requests() -> None:
    tenant = Tenant(name="acme", output_tokens_per_minute=60)
    limiter, tenants, tokens = known(Limiter(0.0), "a"), {"acme": tenant}, Amounts(output_tokens=60)
    for now in (1.0, 2.0, 3.0):
        limiter.handle(LeaseRequest("a"), tenants, now)
    limiter.handle(LeaseRequest("a", "acme", tokens), tenants, 3.0)
    limiter.handle(LeaseRequest("a", held={}), tenants, 200.0)
    limiter.handle(LeaseRequest("a", returned={"acme": Amounts(output_tokens=-90)}), tenants, 200.0)
    assert limiter.budget(tenant, 200.0).levels(200.0).output_tokens == pytest.approx(-30)


def test_a_successor_starts_empty_or_with_the_levels_of_its_predecessor() -> None:
    before = known(Limiter(0.0), "a")
    assert need("a", 0.0, before, Amounts(requests=4))
    for levels, admitted in ((before.levels(0.0), 6), ({}, 0)):
        after = Limiter(0.0, is_successor=True)
        after.handle(LeaseRequest("a", held={}, levels=levels), TENANTS, 0.0)
        assert sum(need("a", 0.0, after, Amounts(requests=1)) for _ in range(10)) == admitted
        assert need("a", 1.0, after, Amounts(requests=10))


def test_a_pool_keeps_no_more_than_a_lease() -> None:
    pool = LeasePool(ACME)
    pool.add(Amounts(requests=50))
    assert pool.take(Amounts(requests=1))
    assert pool.put_back(Amounts(requests=1))
    assert pool.unsent() == Amounts(requests=48)  # all but 0.2 s of 10 requests per second
    assert not pool.take(Amounts(requests=3))
    assert pool.take(Amounts(requests=2))


def test_slots_are_kept_while_most_are_free_and_until_the_next_release() -> None:
    limiter = known(Limiter(0.0), "a")
    tenant = Tenant(name="acme", concurrency=64)
    pool, one = LeasePool(tenant), Amounts(concurrency=1)

    def lease() -> LeaseReply:
        reply = limiter.handle(pool.request("a", one), {"acme": tenant}, 0.0)
        assert pool.apply(one, reply, 0.0) is None
        assert pool.take(one)
        return reply

    assert lease().kept_slots == 4  # an eighth of 64, for this process and the limiter's own
    assert not pool.put_back(one)
    assert pool.take(one)  # without a call
    assert not pool.put_back(one)
    pool.release_unused()
    assert pool.unsent() == one
    assert not pool.take(one)
    assert [lease().kept_slots for _ in range(40)][-1] == 0  # fewer than half are free
    assert pool.put_back(one)
    assert pool.unsent() == one
