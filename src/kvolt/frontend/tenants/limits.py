"""Limits of one tenant: token buckets and slots. Pure: times are arguments.

A bucket of `rate` per second holds at most `capacity`, so any window of T seconds admits at most capacity + rate * T.
Tokens of an answer are reserved before it starts and what it did not use is put back, so tokens never exceed the
limit either, unless a request may generate more than a full bucket holds (see `TenantBudget.charge`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import msgspec

from kvolt.frontend.tenants.records import Tenant

_MINUTE_S = 60.0
_ROUNDING = 1e-6
"""Fraction of one unit that sums of floats may be off."""
SLOT_RETRY_S = 1.0
"""Delay before a retry when all slots are in use: their release times are unknown."""


class Limit(StrEnum):
    """A limited quantity; the value is the `reason` label of refusals."""

    REQUESTS = "requests"
    INPUT_TOKENS = "input_tokens"
    OUTPUT_TOKENS = "output_tokens"
    CONCURRENCY = "concurrency"

    __hash__ = str.__hash__  # Enum's is a Python function, and each request has dozens of lookups


Amounts = Mapping[Limit, float]


class Rule(msgspec.Struct, frozen=True):
    """Parameters of one limit. `rate` 0: slots, which are occupied until they are put back."""

    capacity: float
    rate: float

    def scaled(self, share: float) -> Rule:
        """The rule for one of several processes. At least one unit, or no request would ever be admitted."""
        return Rule(max(self.capacity * share, 1.0), self.rate * share)


def rules_of(tenant: Tenant) -> dict[Limit, Rule]:
    """Rules of the limits that a tenant has. Requests may come in bursts of a second's worth, tokens of a minute's."""
    rules: dict[Limit, Rule] = {}
    if tenant.requests_per_second is not None:
        rules[Limit.REQUESTS] = Rule(max(tenant.requests_per_second, 1.0), tenant.requests_per_second)
    for limit, per_minute in (
        (Limit.INPUT_TOKENS, tenant.input_tokens_per_minute),
        (Limit.OUTPUT_TOKENS, tenant.output_tokens_per_minute),
    ):
        if per_minute is not None:
            rules[limit] = Rule(float(per_minute), per_minute / _MINUTE_S)
    if tenant.concurrency is not None:
        rules[Limit.CONCURRENCY] = Rule(float(tenant.concurrency), 0.0)
    return rules


class Refusal(msgspec.Struct, frozen=True):
    """Limit that has no room, and the time until it may have. Infinite: the amount exceeds the whole limit."""

    limit: Limit
    retry_after_s: float


class LimitState(msgspec.Struct, frozen=True):
    """State of a limit, for response headers."""

    capacity: float
    remaining: float
    reset_s: float
    """Time until the limit is unused again."""


class Bucket:
    """Available amount of one limit."""

    __slots__ = ("_level", "_updated_at", "rule")

    def __init__(self, rule: Rule, now: float, level: float | None = None) -> None:
        self.rule = rule
        self._level = rule.capacity if level is None else level
        self._updated_at = now

    def level(self, now: float) -> float:
        """Available amount; negative after a debt."""
        if now > self._updated_at:
            self._level = min(self._level + (now - self._updated_at) * self.rule.rate, self.rule.capacity)
            self._updated_at = now
        return self._level

    def wait_s(self, amount: float, now: float) -> float:
        """Time until the amount is available, 0 if it is."""
        missing = amount - self.level(now)
        if missing <= _ROUNDING:
            return 0.0
        if amount > self.rule.capacity:
            return math.inf
        return missing / self.rule.rate if self.rule.rate else SLOT_RETRY_S

    def take(self, amount: float, now: float) -> None:
        self._level = self.level(now) - amount

    def put_back(self, amount: float, now: float) -> None:
        self._level = min(self.level(now) + amount, self.rule.capacity)

    def change_rule(self, rule: Rule, now: float) -> None:
        """Apply another rule. What is in use stays in use."""
        used = self.rule.capacity - self.level(now)
        self.rule = rule
        self._level = rule.capacity - used if rule.rate == 0 else min(self._level, rule.capacity)

    def state(self, now: float) -> LimitState:
        level = self.level(now)
        missing = self.rule.capacity - level
        reset_s = missing / self.rule.rate if self.rule.rate else SLOT_RETRY_S * (missing > 0)
        return LimitState(self.rule.capacity, max(level, 0.0), reset_s)


class TenantBudget:
    """Buckets of one tenant. Quantities without a limit are ignored."""

    def __init__(self, tenant: Tenant, now: float, share: float = 1.0, *, is_empty: bool = False) -> None:
        """`share`: fraction of the limits. `is_empty`: rates start without the allowance for a burst."""
        self.tenant = tenant
        self.share = share
        self._buckets = {
            limit: Bucket(rule, now, 0.0 if is_empty and rule.rate else None)
            for limit, rule in self._rules(tenant).items()
        }

    def __bool__(self) -> bool:
        """Whether there is any limit."""
        return bool(self._buckets)

    def take(self, amounts: Amounts, now: float) -> Refusal | None:
        """Take all amounts, or none of them: then return the limit with the longest wait."""
        refusal: Refusal | None = None
        for limit, amount in amounts.items():
            bucket = self._buckets.get(limit)
            wait_s = 0.0 if bucket is None else bucket.wait_s(amount, now)
            if wait_s and (refusal is None or wait_s > refusal.retry_after_s):
                refusal = Refusal(limit, wait_s)
        if refusal is None:
            self.charge(amounts, now)
        return refusal

    def charge(self, amounts: Amounts, now: float) -> None:
        """Take amounts that cannot be refused, such as tokens generated beyond the reservation. A debt delays
        later requests."""
        for limit, amount in amounts.items():
            bucket = self._buckets.get(limit)
            if bucket is not None:
                bucket.take(amount, now)

    def put_back(self, amounts: Amounts, now: float) -> None:
        for limit, amount in amounts.items():
            bucket = self._buckets.get(limit)
            if bucket is not None:
                bucket.put_back(amount, now)

    def available(self, limit: Limit, now: float) -> float:
        bucket = self._buckets.get(limit)
        return math.inf if bucket is None else bucket.level(now)

    def capacity(self, limit: Limit) -> float:
        bucket = self._buckets.get(limit)
        return math.inf if bucket is None else bucket.rule.capacity

    def states(self, now: float) -> dict[Limit, LimitState]:
        return {limit: bucket.state(now) for limit, bucket in self._buckets.items()}

    def update(self, tenant: Tenant, share: float, now: float) -> None:
        """Apply changed limits, or another share of them."""
        self.tenant, self.share = tenant, share
        rules = self._rules(tenant)
        for limit in self._buckets.keys() - rules.keys():
            del self._buckets[limit]
        for limit, rule in rules.items():
            bucket = self._buckets.get(limit)
            if bucket is None:
                self._buckets[limit] = Bucket(rule, now)
            elif bucket.rule != rule:
                bucket.change_rule(rule, now)

    def _rules(self, tenant: Tenant) -> dict[Limit, Rule]:
        rules = rules_of(tenant)
        return rules if self.share == 1.0 else {key: rule.scaled(self.share) for key, rule in rules.items()}
