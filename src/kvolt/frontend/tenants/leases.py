"""Leases of a tenant's budget: one limiter grants them, frontend processes spend them. Pure: times are arguments.

A grant leaves the limiter's bucket at once, so all processes together admit what one bucket admits, plus what is left
of leases that were granted before: at most one lease each. Slots (concurrency) are leased one by one and returned as
soon as they are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from kvolt.frontend.tenants.limits import Amounts, Limit, LimitState, Refusal, TenantBudget, rules_of
from kvolt.frontend.tenants.records import Tenant

LEASE_S = 0.2
"""A lease is worth this much time of the limit's rate."""
KEEP_S = 1.0
"""Unspent amounts are returned when no request has used them for this long."""
HOLDER_TIMEOUT_S = 5.0
"""Slots of a process that is silent for this long are free again."""
_DENIED_S = 1.0
_SLOT_DENIED_S = 0.02
_MAX_AMOUNT = 1e15

ByLimit = dict[Limit, float]


class LeaseRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """Message of a process to the limiter."""

    holder: str
    """Id of the process."""
    tenant: str = ""
    """Empty: only returns, or a sign of life."""
    need: ByLimit = {}
    """Amounts of the request that waits: all or nothing."""
    extra: ByLimit = {}
    """Amounts for later requests, granted as far as available."""
    returned: dict[str, ByLimit] = {}
    """Unspent amounts by tenant; negative: used without a lease."""
    held: dict[str, float] | None = None
    """Slots in use by tenant. Sent to a limiter that does not know this process."""
    levels: dict[str, ByLimit] = {}
    """Levels of the buckets, by tenant, if this process was the limiter before."""


class LeaseReply(msgspec.Struct, frozen=True, omit_defaults=True):
    is_known: bool = True
    """False: send the request again with `held`."""
    has_tenant: bool = True
    granted: ByLimit = {}
    refused: Limit | None = None
    retry_after_s: float = 0.0
    levels: ByLimit = {}
    """Levels of the tenant's buckets after the grant."""


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
            budget.charge({Limit.CONCURRENCY: held}, now)
            self._budgets[tenant.name] = budget
        elif budget.tenant is not tenant:
            budget.update(tenant, 1.0, now)
        return budget

    def levels(self, now: float) -> dict[str, ByLimit]:
        """Levels of all rates, for the next limiter."""
        return {
            name: {
                limit: budget.available(limit, now)
                for limit in budget.states(now)
                if limit is not Limit.CONCURRENCY
            }
            for name, budget in self._budgets.items()
        }

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
        need = {limit: _valid(amount) for limit, amount in request.need.items()}
        refusal = budget.take(need, now)
        granted: ByLimit = {}
        if refusal is None:
            granted = need
            slots = need.get(Limit.CONCURRENCY)
            if slots is not None:
                held = self._held.setdefault(holder, {})
                held[budget.tenant.name] = held.get(budget.tenant.name, 0.0) + slots
            part = 1.0 / (1 + len(self._seen_at))  # leave some for the other processes
            for limit, amount in request.extra.items():
                extra = min(_valid(amount), max(budget.available(limit, now), 0.0) * part)
                if extra >= 1 and limit is not Limit.CONCURRENCY:
                    budget.charge({limit: extra}, now)
                    granted[limit] = granted.get(limit, 0.0) + extra
        return LeaseReply(
            granted=granted,
            refused=None if refusal is None else refusal.limit,
            retry_after_s=0.0 if refusal is None else refusal.retry_after_s,
            levels={limit: budget.available(limit, now) for limit in budget.states(now)},
        )

    def _put_back(self, holder: str, name: str, amounts: ByLimit, now: float) -> None:
        valid = {limit: amount for limit, amount in amounts.items() if abs(amount) <= _MAX_AMOUNT}
        held = self._held.get(holder, {})
        if Limit.CONCURRENCY in valid:
            valid[Limit.CONCURRENCY] = min(_valid(valid[Limit.CONCURRENCY]), held.get(name, 0.0))
            held[name] = held.get(name, 0.0) - valid[Limit.CONCURRENCY]
        if name in self._budgets:
            self._budgets[name].put_back(valid, now)

    def set_held(self, holder: str, slots: Mapping[str, float], now: float) -> None:
        """Replace the slots that a process holds."""
        slots = {name: _valid(amount) for name, amount in slots.items()}
        before = self._held.get(holder, {})
        for name in before.keys() | slots.keys():
            change = slots.get(name, 0.0) - before.get(name, 0.0)
            if name in self._budgets:
                self._budgets[name].charge({Limit.CONCURRENCY: change}, now)
        self._held[holder] = slots

    def _set_levels(self, levels: Mapping[str, ByLimit], tenants: Mapping[str, Tenant], now: float) -> None:
        """Take over the levels of the previous limiter."""
        for name, by_limit in levels.items():
            tenant = tenants.get(name)
            if tenant is not None and self._is_successor and name not in self._budgets:
                valid = {limit: level for limit, level in by_limit.items() if abs(level) <= _MAX_AMOUNT}
                self.budget(tenant, now).put_back(valid, now)

    def _drop_silent(self, now: float) -> None:
        if now - self._checked_at < 1.0:
            return
        self._checked_at = now
        for holder in [each for each, seen_at in self._seen_at.items() if now - seen_at > HOLDER_TIMEOUT_S]:
            self.remove_holder(holder, now)


class Pool:
    """Leased amounts of one tenant in one process."""

    __slots__ = ("_denied", "_leased", "_levels", "_returned", "_used_at", "held", "rules", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        self.rules = rules_of(tenant)
        self.held = 0.0
        """Slots in use."""
        self._leased: ByLimit = {}
        self._returned: ByLimit = {}
        self._levels: ByLimit = {}
        """Levels at the limiter after the latest reply."""
        self._denied: dict[Limit, tuple[float, float, float]] = {}
        """Refused amount, end of the local refusal, and time of the next try."""
        self._used_at = -math.inf

    def take(self, amounts: Amounts, now: float) -> bool:
        """Take all amounts from the lease, or nothing. Slots come only from the limiter."""
        limited = {limit: amount for limit, amount in amounts.items() if limit in self.rules and amount}
        if any(self._leased.get(limit, 0.0) < amount for limit, amount in limited.items()):
            return False
        for limit, amount in limited.items():
            self._leased[limit] -= amount
        self.held += limited.get(Limit.CONCURRENCY, 0.0)
        self._used_at = now
        return True

    def denied(self, amounts: Amounts, now: float) -> Refusal | None:
        """Recent refusal of the limiter that applies to these amounts too, so that it is not asked again."""
        for limit, (amount, until, retry_at) in self._denied.items():
            if now < until and amounts.get(limit, 0.0) >= amount:
                return Refusal(limit, max(retry_at - now, 0.0))
        return None

    def missing(self, amounts: Amounts) -> ByLimit:
        """Limited amounts that the lease does not cover."""
        return {
            limit: missing
            for limit, amount in amounts.items()
            if limit in self.rules and (missing := amount - self._leased.get(limit, 0.0)) > 0
        }

    def request(self, holder: str, amounts: Amounts) -> LeaseRequest:
        """Message for a lease that covers the amounts. Unsent returns travel with it."""
        need, name, returned = self.missing(amounts), self.tenant.name, self.unsent()
        extra = {limit: size for limit in need if (size := self.lease_size(limit))}
        return LeaseRequest(holder, name, need, extra, {name: returned} if returned else {})

    def lease_size(self, limit: Limit) -> float:
        """Amount that is kept for later requests."""
        return self.rules[limit].rate * LEASE_S

    def add(self, amounts: Amounts) -> None:
        """Add granted amounts."""
        for limit, amount in amounts.items():
            self._leased[limit] = self._leased.get(limit, 0.0) + amount

    def apply(self, amounts: Amounts, reply: LeaseReply, now: float) -> Refusal | None:
        """Add the lease of a reply to a request for these amounts; return the refusal in it."""
        self.add(reply.granted)
        self._levels = reply.levels
        limit = reply.refused
        if limit is None:
            return None
        kept_s = _SLOT_DENIED_S if limit is Limit.CONCURRENCY else _DENIED_S
        self._denied[limit] = (
            amounts.get(limit, 0.0),
            now + min(reply.retry_after_s, kept_s),
            now + reply.retry_after_s,
        )
        return Refusal(limit, reply.retry_after_s)

    def charge(self, amounts: Amounts) -> None:
        """Take amounts that cannot be refused: the limiter gets the debt."""
        for limit, amount in amounts.items():
            if limit in self.rules:
                self._returned[limit] = self._returned.get(limit, 0.0) - amount

    def put_back(self, amounts: Amounts) -> bool:
        """Put amounts back; whether some are to be returned to the limiter at once: slots, and more than a lease."""
        for limit, amount in amounts.items():
            if limit is Limit.CONCURRENCY:
                excess = min(amount, self.held)  # 0 if the limit is newer than the request
                self.held -= excess
            elif limit in self.rules:
                leased = self._leased.get(limit, 0.0) + amount
                self._leased[limit] = min(leased, self.lease_size(limit))
                excess = leased - self._leased[limit]
            else:
                continue
            if excess:
                self._returned[limit] = self._returned.get(limit, 0.0) + excess
        return bool(self._returned)

    def unsent(self) -> ByLimit:
        """Amounts to return now; the caller sends them."""
        returned, self._returned = self._returned, {}
        return returned

    def release_idle(self, now: float) -> None:
        """Mark unspent amounts of rates for return if no request needs them."""
        if now - self._used_at < KEEP_S:
            return
        for limit, amount in self._leased.items():
            if limit is not Limit.CONCURRENCY and amount > 0:
                self._returned[limit] = self._returned.get(limit, 0.0) + amount
                self._leased[limit] = 0.0

    def update(self, tenant: Tenant) -> None:
        self.tenant, self.rules = tenant, rules_of(tenant)

    def forget_limiter(self) -> None:
        """The next limiter gets the slots in use as a whole."""
        self._returned.pop(Limit.CONCURRENCY, None)
        self._denied.clear()

    def states(self) -> dict[Limit, LimitState]:
        """States as of the latest reply."""
        states: dict[Limit, LimitState] = {}
        for limit, rule in self.rules.items():
            level = self._levels.get(limit, rule.capacity) + self._leased.get(limit, 0.0)
            level = min(max(level, 0.0), rule.capacity)
            states[limit] = LimitState(
                rule.capacity, level, (rule.capacity - level) / rule.rate if rule.rate else 0.0
            )
        return states


def _valid(amount: float) -> float:
    """Amount of a message, within sane bounds."""
    return amount if 0 <= amount <= _MAX_AMOUNT else 0.0
