"""Leases of a tenant's budget: one limiter grants them, frontend processes spend them (`lease_pool`). Pure: times are
arguments.

A grant leaves the limiter's bucket at once, so all processes together admit what one bucket admits, plus what is left
of leases that were granted before: at most one lease each. Slots (concurrency) are leased one by one. A process returns
them as soon as they are free, or keeps some for its next requests while most slots of the tenant are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvolt.frontend.tenants.limits import NOTHING, Amounts, Limit, TenantBudget
from kvolt.frontend.tenants.records import Tenant

HOLDER_TIMEOUT_S = 5.0
"""Slots of a process that is silent for this long are free again."""
KEPT_SHARE = 0.125
"""Part of a tenant's slots that all processes together may keep, while at least half of the slots are free."""
_MAX_AMOUNT = 1e15


class LeaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message of a process to the limiter."""

    holder: str
    """Id of the process."""
    tenant: str = ""
    """Empty: only returns, or a sign of life."""
    need: Amounts = NOTHING
    """Amounts of the request that waits: all or nothing."""
    extra: Amounts = NOTHING
    """Amounts for later requests, granted as far as available."""
    returned: dict[str, Amounts] = {}
    """Unspent amounts by tenant; negative: used without a lease."""
    held: dict[str, float] | None = None
    """Slots in use by tenant. Sent to a limiter that does not know this process."""
    levels: dict[str, Amounts] = {}
    """Levels of the buckets, by tenant, if this process was the limiter before."""


class LeaseReply(msgspec.Struct, frozen=True, omit_defaults=True):
    is_known: bool = True
    """False: send the request again with `held`."""
    has_tenant: bool = True
    granted: Amounts = NOTHING
    refused: Limit | None = None
    retry_after_s: float = 0.0
    levels: Amounts = NOTHING
    """Levels of the tenant's buckets after the grant."""
    kept_slots: int = 0
    """Free slots that the process may keep until it sends its next returns."""


class Limiter:
    """Budgets of all tenants, and the slots that each process holds."""

    def __init__(self, now: float, *, is_successor: bool = False) -> None:
        """`is_successor`: another limiter was there before. Its levels are unknown, so buckets start empty."""
        self._is_successor = is_successor
        self._budgets: dict[str, TenantBudget] = {}
        self._held: dict[str, dict[str, float]] = {}
        """Slots by process and tenant."""
        self._seen_at: dict[str, float] = {}
        self._checked_at = now

    def budget(self, tenant: Tenant, now: float) -> TenantBudget:
        budget = self._budgets.get(tenant.name)
        if budget is None:
            budget = TenantBudget(tenant, now, is_empty=self._is_successor)
            held = sum(slots.get(tenant.name, 0.0) for slots in self._held.values())
            budget.charge(Amounts(concurrency=held), now)
            self._budgets[tenant.name] = budget
        elif budget.tenant is not tenant:
            budget.update(tenant, 1.0, now)
        return budget

    def levels(self, now: float) -> dict[str, Amounts]:
        """Levels of all rates, for the next limiter."""
        return {name: budget.levels(now)._replace(concurrency=0.0) for name, budget in self._budgets.items()}

    def handle(self, request: LeaseRequest, tenants: Mapping[str, Tenant], now: float) -> LeaseReply:
        self._drop_silent(now)
        holder = request.holder
        if request.held is not None:
            self.set_held(holder, request.held, now)
            self._set_levels(request.levels, tenants, now)
        elif holder not in self._seen_at:
            return LeaseReply(is_known=False)
        self._seen_at[holder] = now
        for name, amounts in request.returned.items():
            self._put_back(holder, name, amounts, now)
        if not request.tenant:
            return LeaseReply()
        tenant = tenants.get(request.tenant)
        if tenant is None:
            return LeaseReply(has_tenant=False)
        return self._grant(holder, self.budget(tenant, now), request, now)

    def remove_holder(self, holder: str, now: float) -> None:
        """Free the slots of a process."""
        self.set_held(holder, {}, now)
        self._held.pop(holder, None)
        self._seen_at.pop(holder, None)

    def retain(self, names: frozenset[str]) -> None:
        self._budgets = {name: each for name, each in self._budgets.items() if name in names}

    # ---

    def _grant(self, holder: str, budget: TenantBudget, request: LeaseRequest, now: float) -> LeaseReply:
        need = _valid(request.need)
        refusal = budget.take(need, now)
        if refusal is not None:
            levels = budget.levels(now)
            return LeaseReply(refused=refusal.limit, retry_after_s=refusal.retry_after_s, levels=levels)
        if need.concurrency:
            held = self._held.setdefault(holder, {})
            held[budget.tenant.name] = held.get(budget.tenant.name, 0.0) + need.concurrency
        part = 1.0 / (1 + len(self._seen_at))  # leave some for the other processes
        extra = Amounts._make(
            most if (most := min(wanted, level * part)) >= 1 else 0.0
            for wanted, level in zip(_valid(request.extra), budget.levels(now), strict=True)
        )._replace(concurrency=0.0)
        budget.charge(extra, now)
        slots, free = budget.rules.capacities.concurrency, budget.levels(now).concurrency
        return LeaseReply(
            granted=need.plus(extra),
            levels=budget.levels(now),
            kept_slots=int(slots * KEPT_SHARE * part) if slots / 2 <= free < math.inf else 0,
        )

    def _put_back(self, holder: str, name: str, amounts: Amounts, now: float) -> None:
        held = self._held.get(holder, {})
        slots = min(_valid(amounts).concurrency, held.get(name, 0.0))
        if slots:
            held[name] -= slots
        budget, amounts = self._budgets.get(name), _bounded(amounts)._replace(concurrency=slots)
        if budget is not None:
            budget.put_back(amounts.at_least(NOTHING))
            debts = amounts.at_most(NOTHING)
            if any(debts):
                budget.charge(NOTHING.minus(debts), now)

    def set_held(self, holder: str, slots: Mapping[str, float], now: float) -> None:
        """Replace the slots that a process holds."""
        slots = {name: _valid(Amounts(concurrency=amount)).concurrency for name, amount in slots.items()}
        before = self._held.get(holder, {})
        for name in before.keys() | slots.keys():
            change = slots.get(name, 0.0) - before.get(name, 0.0)
            if name in self._budgets:
                self._budgets[name].charge(Amounts(concurrency=change), now)
        self._held[holder] = slots

    def _set_levels(self, levels: Mapping[str, Amounts], tenants: Mapping[str, Tenant], now: float) -> None:
        """Take over the levels of the previous limiter."""
        for name, amounts in levels.items():
            tenant = tenants.get(name)
            if tenant is not None and self._is_successor and name not in self._budgets:
                self.budget(tenant, now).put_back(_bounded(amounts)._replace(concurrency=0.0))

    def _drop_silent(self, now: float) -> None:
        if now - self._checked_at < 1.0:
            return
        self._checked_at = now
        for holder in [each for each, seen_at in self._seen_at.items() if now - seen_at > HOLDER_TIMEOUT_S]:
            self.remove_holder(holder, now)


def _valid(amounts: Amounts) -> Amounts:
    """Amounts of a message, within sane bounds."""
    return Amounts._make(amount if 0 <= amount <= _MAX_AMOUNT else 0.0 for amount in amounts)


def _bounded(amounts: Amounts) -> Amounts:
    """The same for amounts that may be negative."""
    return Amounts._make(amount if abs(amount) <= _MAX_AMOUNT else 0.0 for amount in amounts)
