"""LeasePool: what one process has leased of a tenant's limits (`leases`), and spends without a call. Pure."""

from __future__ import annotations

import math
from operator import add, sub

from kvolt.frontend.tenants.leases import LeaseReply, LeaseRequest
from kvolt.frontend.tenants.limits import LIMITS, NOTHING, Amounts, Limit, Refusal, Rules
from kvolt.frontend.tenants.records import Tenant

LEASE_S = 0.2
"""A lease is worth this much time of the limit's rate."""
KEEP_S = 1.0
"""Unspent amounts are returned when no request has used them for this long; kept slots always."""
_DENIED_S = 1.0
_SLOT_DENIED_S = 0.02
_ROUNDING = 1e-6


class LeasePool:
    """Leased amounts of one tenant in one process; infinite where the tenant has no limit."""

    __slots__ = ("_denied", "_is_used", "_leased", "_levels", "_returned", "_sizes", "rules", "tenant")

    def __init__(self, tenant: Tenant) -> None:
        self._leased = list(NOTHING)
        self._returned = NOTHING
        """To be sent to the limiter; negative: used without a lease."""
        self._denied: dict[Limit, tuple[float, float, float]] = {}
        """Refused amount, end of the local refusal, and time of the next try."""
        self._is_used = False
        self.update(tenant)

    def update(self, tenant: Tenant) -> None:
        """Apply changed limits."""
        self.tenant, self.rules = tenant, Rules.of(tenant)
        rules = self.rules
        self._levels = rules.capacities
        """At the limiter, after the latest reply."""
        self._sizes = [
            rate * LEASE_S if math.isfinite(capacity) else math.inf
            for rate, capacity in zip(rules.rates, rules.capacities, strict=True)
        ]
        """Largest amounts that are kept for later requests; no slots until the limiter allows it."""
        self._leased = [
            math.inf if math.isinf(capacity) else amount if math.isfinite(amount) else 0.0
            for amount, capacity in zip(self._leased, rules.capacities, strict=True)
        ]

    def take(self, amounts: Amounts) -> bool:
        """Take all amounts from the lease, or nothing."""
        requests, input_tokens, output_tokens, slots = amounts
        leased = self._leased
        if (
            requests > leased[0] + _ROUNDING
            or input_tokens > leased[1] + _ROUNDING
            or output_tokens > leased[2] + _ROUNDING
            or slots > leased[3]
        ):
            return False
        leased[0] -= requests
        leased[1] -= input_tokens
        leased[2] -= output_tokens
        leased[3] -= slots
        self._is_used = True
        return True

    def put_back(self, amounts: Amounts) -> bool:
        """Put amounts back; whether some are to be returned to the limiter at once: slots, and more than a lease."""
        requests, input_tokens, output_tokens, slots = amounts
        leased, sizes = self._leased, self._sizes
        leased[0] += requests
        leased[1] += input_tokens
        leased[2] += output_tokens
        leased[3] += slots
        if (
            leased[0] <= sizes[0]
            and leased[1] <= sizes[1]
            and leased[2] <= sizes[2]
            and leased[3] <= sizes[3]
        ):
            return False
        self._leased = kept = list(map(min, leased, sizes))
        excess = [0.0 if amount == rest else amount - rest for amount, rest in zip(leased, kept, strict=True)]
        self._returned = self._returned.plus(excess)
        return True

    def charge(self, amounts: Amounts) -> None:
        """Take amounts that cannot be refused: the limiter gets the debt."""
        self._returned = self._returned.minus(self.rules.limited(amounts))

    def levels(self) -> Amounts:
        """Amounts that were available after the latest reply, or are leased."""
        return Amounts._make(map(min, map(add, self._levels, self._leased), self.rules.capacities))

    # --- messages

    def missing(self, amounts: Amounts) -> Amounts:
        """Limited amounts that the lease does not cover."""
        return amounts.minus(self._leased).at_least(NOTHING)

    def denied(self, amounts: Amounts, now: float) -> Refusal | None:
        """Recent refusal of the limiter that applies to these amounts too, so that it is not asked again."""
        for limit, (amount, until, retry_at) in self._denied.items():
            if now < until and amounts[LIMITS.index(limit)] >= amount:
                return Refusal(limit, max(retry_at - now, 0.0))
        return None

    def request(self, holder: str, amounts: Amounts) -> LeaseRequest:
        """Message for a lease that covers the amounts. Unsent returns travel with it."""
        need, name, returned = self.missing(amounts), self.tenant.name, self.unsent()
        extra = Amounts._make(
            size if missing else 0.0 for size, missing in zip(self._sizes, need, strict=True)
        )._replace(concurrency=0.0)
        return LeaseRequest(holder, name, need, extra, {name: returned} if returned else {})

    def add(self, amounts: Amounts) -> None:
        """Add granted amounts."""
        self._leased = list(map(add, self._leased, amounts))

    def apply(self, amounts: Amounts, reply: LeaseReply, now: float) -> Refusal | None:
        """Add the lease of a reply to a request for these amounts; return the refusal in it."""
        self.add(reply.granted)
        self._levels = reply.levels
        self._keep_slots(reply.kept_slots)
        limit = reply.refused
        if limit is None:
            return None
        kept_s = _SLOT_DENIED_S if limit is Limit.CONCURRENCY else _DENIED_S
        self._denied[limit] = (
            amounts[LIMITS.index(limit)],
            now + min(reply.retry_after_s, kept_s),
            now + reply.retry_after_s,
        )
        return Refusal(limit, reply.retry_after_s)

    def unsent(self) -> Amounts | None:
        """Amounts to return now; the caller sends them."""
        returned, self._returned = self._returned, NOTHING
        return returned if any(returned) else None

    def release_unused(self) -> None:
        """Mark kept slots for return, so that the limiter decides again, and all else if no request has used it
        since the previous call."""
        self.release_slots()
        if not self._is_used:
            unused = self.rules.limited(Amounts._make(self._leased)).at_least(NOTHING)
            self._returned = self._returned.plus(unused)
            self._leased = list(map(sub, self._leased, unused))
        self._is_used = False

    def release_slots(self) -> None:
        """Mark kept slots for return, and keep no more."""
        self._keep_slots(0)
        slots = Amounts(concurrency=max(self._leased[-1], 0.0))
        if math.isfinite(slots.concurrency):
            self._returned = self._returned.plus(slots)
            self._leased = list(map(sub, self._leased, slots))

    def forget_limiter(self) -> None:
        """Drop kept slots: the next limiter gets the slots in use as a whole."""
        self.release_slots()
        self._returned = self._returned._replace(concurrency=0.0)
        self._denied.clear()

    def _keep_slots(self, count: int) -> None:
        if math.isfinite(self.rules.capacities.concurrency):
            self._sizes[-1] = float(count)
