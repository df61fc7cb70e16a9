"""Limits over several frontends, under virtual time: leases, and a limiter that is lost."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.unit.engines.lab import NAMESPACE, Lab, until

from kvolt.frontend.tenants.lease_pool import LEASE_S
from kvolt.frontend.tenants.leases import HOLDER_TIMEOUT_S, LeaseReply, LeaseRequest, Limiter
from kvolt.frontend.tenants.limits import Amounts, Limit, Refusal
from kvolt.frontend.tenants.records import Tenant
from kvolt.frontend.tenants.shared_budgets import SharedBudgets
from kvolt.testing import run_virtual

BEGIN = Amounts(requests=1, concurrency=1)
SLOT = Amounts(concurrency=1)


class Group:
    """Frontends with the same tenants."""

    def __init__(self, lab: Lab, *tenants: Tenant) -> None:
        self._lab = lab
        self.tenants = {tenant.name: tenant for tenant in tenants}
        self.members: list[SharedBudgets] = []

    async def start(self, count: int) -> None:
        for _ in range(count):
            runtime = await self._lab.runtime(f"f{len(self.members)}")
            budgets = SharedBudgets(runtime, NAMESPACE, lambda: self.tenants)
            await budgets.start()
            self._lab._closing.append(budgets.close)
            self.members.append(budgets)
            await asyncio.sleep(0.01)
        await until(lambda: sum(each.is_limiter for each in self.members) == 1)
        await asyncio.sleep(1.5)

    async def take(self, number: int, name: str, amounts: Amounts) -> Refusal | None:
        budget = self.members[number].of(self.tenants[name])
        return None if budget.take(amounts) else await budget.lease(amounts)

    def put_back(self, number: int, name: str, amounts: Amounts) -> None:
        self.members[number].of(self.tenants[name]).put_back(amounts)


def grouped(count: int, body: Callable[[Lab, Group], Awaitable[None]], *tenants: Tenant) -> None:
    async def scenario() -> None:
        async with Lab() as lab:
            group = Group(lab, *tenants)
            await group.start(count)
            await body(lab, group)

    run_virtual(scenario)


def test_the_oldest_frontend_is_the_limiter_and_keeps_it() -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert [each.is_limiter for each in group.members] == [True, False, False]
        await group.start(2)
        assert [each.is_limiter for each in group.members] == [True, False, False, False, False]

    grouped(3, body, Tenant(name="a"))


async def load(group: Group, duration_s: float, rng: random.Random, numbers: list[int]) -> Counter[str]:
    """Send more requests than the limits admit, from all frontends; the admitted ones by tenant."""
    admitted: Counter[str] = Counter()
    end = asyncio.get_running_loop().time() + duration_s

    async def one(number: int, name: str) -> None:
        if await group.take(number, name, BEGIN) is None:
            admitted[name] += 1
            await asyncio.sleep(rng.random() * 0.02)
            group.put_back(number, name, SLOT)

    async with asyncio.TaskGroup() as tasks:
        while asyncio.get_running_loop().time() < end:
            for number in numbers:
                for name in group.tenants:
                    tasks.create_task(one(number, name))
            await asyncio.sleep(rng.random() * 0.03)
    return admitted


LIMITED = (
    Tenant(name="slow", requests_per_second=3),
    Tenant(name="fast", requests_per_second=200),
    Tenant(name="narrow", requests_per_second=50, concurrency=2),
)


@pytest.mark.parametrize("seed", [1, 2])
def test_eight_frontends_admit_what_one_would(seed: int) -> None:
    async def body(lab: Lab, group: Group) -> None:
        duration_s = 5.0
        admitted = await load(group, duration_s, random.Random(seed), list(range(8)))
        for tenant in LIMITED:
            rate = tenant.requests_per_second or 0
            most = max(rate, 1) + rate * (duration_s + 0.1)
            assert admitted[tenant.name] <= most
            if tenant.concurrency is None:
                assert admitted[tenant.name] >= 0.7 * most

    grouped(8, body, *LIMITED)


@pytest.mark.parametrize("silent", [False, True])
def test_overshoot_is_bounded_when_the_limiter_is_lost(silent: bool) -> None:
    async def body(lab: Lab, group: Group) -> None:
        others = list(range(1, 8))

        async def kill() -> None:
            await asyncio.sleep(2)
            lab.network.crash("f0", silent=silent)

        killer = asyncio.ensure_future(kill())
        duration_s = 12.0
        admitted = await load(group, duration_s, random.Random(3), others)
        await killer
        assert sum(each.is_limiter for each in group.members[1:]) == 1
        for tenant in LIMITED[:2]:
            rate = tenant.requests_per_second or 0
            most = max(rate, 1) + rate * duration_s
            # A share of one request each, and a second in which a new limiter and shares are used at once.
            assert admitted[tenant.name] <= most + len(others) * (1 + LEASE_S * rate / 8) + rate
            assert admitted[tenant.name] >= 0.5 * rate * duration_s

    grouped(8, body, *LIMITED[:2])


def test_slots_are_counted_over_all_frontends() -> None:
    async def body(lab: Lab, group: Group) -> None:
        results = await asyncio.gather(
            *(group.take(number, "a", BEGIN) for number in range(4) for _ in range(3))
        )
        taken = [index // 3 for index, refusal in enumerate(results) if refusal is None]
        assert len(taken) == 5
        assert {refusal.limit for refusal in results if refusal is not None} == {Limit.CONCURRENCY}
        for number in taken:
            group.put_back(number, "a", SLOT)
        results = await asyncio.gather(*(group.take(3, "a", BEGIN) for _ in range(6)))
        assert sum(refusal is None for refusal in results) == 5

    grouped(4, body, Tenant(name="a", concurrency=5))


def test_a_client_that_waits_for_its_answers_gets_one_slot_anywhere() -> None:
    async def body(lab: Lab, group: Group) -> None:
        for turn in range(40):
            assert await group.take(turn % 4, "a", BEGIN) is None
            await asyncio.sleep(0.001)
            group.put_back(turn % 4, "a", SLOT)

    grouped(4, body, Tenant(name="a", concurrency=1))


def test_slots_of_a_lost_frontend_are_free_again() -> None:
    async def body(lab: Lab, group: Group) -> None:
        for _ in range(2):
            assert await group.take(2, "a", BEGIN) is None
        assert await group.take(1, "a", BEGIN) is not None
        lab.network.crash("f2", silent=True)
        await asyncio.sleep(HOLDER_TIMEOUT_S + 3)
        assert await group.take(1, "a", BEGIN) is None

    grouped(3, body, Tenant(name="a", concurrency=2))


def test_a_new_limiter_learns_the_slots_in_use() -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert await group.take(1, "a", BEGIN) is None
        assert await group.take(2, "a", BEGIN) is None
        lab.network.crash("f0", silent=False)
        await until(lambda: group.members[1].is_limiter)
        await asyncio.sleep(2)
        assert await group.take(1, "a", BEGIN) is None
        assert await group.take(1, "a", BEGIN) is not None
        group.put_back(2, "a", SLOT)
        await asyncio.sleep(0.1)
        assert await group.take(1, "a", BEGIN) is None

    grouped(3, body, Tenant(name="a", concurrency=3))


def test_a_slot_is_free_again_whose_client_left_while_it_was_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Limiter.handle
    waiting: list[asyncio.Future[Refusal | None]] = []

    def cancelling(limiter: Limiter, request: LeaseRequest, *args: Any) -> LeaseReply:
        reply = handle(limiter, request, *args)
        if request.tenant:
            waiting[0].cancel()  # the reply is on its way
        return reply

    async def body(lab: Lab, group: Group) -> None:
        monkeypatch.setattr(Limiter, "handle", cancelling)
        waiting.append(asyncio.ensure_future(group.take(1, "a", SLOT)))
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        budget = group.members[0].of(group.tenants["a"])
        assert budget.levels().concurrency == 1
        await until(lambda: budget.levels().concurrency == 2)

    grouped(2, body, Tenant(name="a", concurrency=2))


@pytest.mark.parametrize("number", [1, 2], ids=["new-limiter", "other"])
def test_slots_of_a_tenant_that_was_removed_are_free_when_it_is_back(number: int) -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert await group.take(number, "a", SLOT) is None
        lab.network.crash("f0", silent=False)
        await until(lambda: group.members[1].is_limiter)
        await asyncio.sleep(2)
        limiter = group.members[1]
        assert limiter.of(group.tenants["a"]).levels().concurrency == 1
        group.put_back(number, "a", SLOT)
        assert await group.take(2, "a", SLOT) is None
        for each in group.members:
            each.retain(())
        await asyncio.sleep(2)
        assert limiter.of(group.tenants["a"]).levels().concurrency == 2

    grouped(3, body, Tenant(name="a", concurrency=2))


def test_without_a_limiter_each_has_its_share() -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert await group.take(1, "a", BEGIN) is None
        lab.network.pause("f0")
        start = asyncio.get_running_loop().time()
        admitted = 0
        while asyncio.get_running_loop().time() < start + 2.5:
            admitted += await group.take(1, "a", Amounts(requests=1)) is None
            await asyncio.sleep(0.01)
        assert not group.members[1].is_limiter
        assert admitted <= LEASE_S * 40 + 20 * 2.5 + 1
        assert admitted >= 20
        lab.network.resume("f0")
        await asyncio.sleep(2)
        assert await group.take(1, "a", BEGIN) is None

    grouped(2, body, Tenant(name="a", requests_per_second=40, concurrency=10))


def test_unspent_tokens_return_to_the_other_frontends() -> None:
    async def body(lab: Lab, group: Group) -> None:
        tokens = Amounts(output_tokens=600)
        assert await group.take(1, "a", tokens) is None
        assert await group.take(2, "a", tokens) is not None
        group.put_back(1, "a", Amounts(output_tokens=590))
        await asyncio.sleep(1.1)
        assert await group.take(2, "a", Amounts(output_tokens=580)) is None
        group.members[2].of(group.tenants["a"]).charge(Amounts(output_tokens=300))
        await asyncio.sleep(1.5)
        refusal = await group.take(1, "a", Amounts(output_tokens=10))
        assert refusal is not None
        assert 20 < refusal.retry_after_s < 32  # the debt is paid first

    grouped(3, body, Tenant(name="a", output_tokens_per_minute=600))


def test_refusals_are_remembered_instead_of_repeated_calls() -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert await group.take(1, "a", BEGIN) is None
        assert await group.take(1, "a", BEGIN) is not None
        member, calls = group.members[1], 0
        send = member._send

        async def counted(request: object) -> object:
            nonlocal calls
            calls += 1
            return await send(request)  # type: ignore[arg-type]

        member._send = counted  # type: ignore[assignment, method-assign]
        for _ in range(1000):
            assert await group.take(1, "a", BEGIN) is not None
        assert calls <= 1

    grouped(2, body, Tenant(name="a", requests_per_second=0.1))


def test_changed_limits_apply_everywhere() -> None:
    async def body(lab: Lab, group: Group) -> None:
        assert await group.take(1, "a", BEGIN) is None
        group.tenants["a"] = Tenant(name="a", concurrency=2)
        assert await group.take(2, "a", BEGIN) is None
        assert await group.take(1, "a", BEGIN) is not None
        group.tenants["a"] = Tenant(name="a")
        assert await group.take(1, "a", BEGIN) is None
        for number in (1, 1, 2):
            group.put_back(number, "a", SLOT)
        for member in group.members:
            member.retain(set())
            assert member._locals == {}

    grouped(3, body, Tenant(name="a", concurrency=1))
