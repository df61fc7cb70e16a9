"""Limits of one tenant: token buckets and slots. Pure: times are arguments.

A bucket of `rate` per second holds at most `capacity`, so any window of T seconds admits at most capacity + rate * T.
Tokens of an answer are reserved before it starts and what it did not use is put back, so tokens never exceed the
limit either, unless a request may generate more than a full bucket holds (see `TenantBudget.charge`).

A tenant's four limits are vectors in the order of `Limit`, infinite where there is none. A request that is admitted
costs a few additions, whichever limits its tenant has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import StrEnum
from functools import partial
from operator import add, sub
from typing import NamedTuple

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


LIMITS = tuple(Limit)


class Amounts(NamedTuple):
    """An amount of each quantity, in the order of `Limit`."""

    requests: float = 0.0
    input_tokens: float = 0.0
    output_tokens: float = 0.0
    concurrency: float = 0.0

    def plus(self, other: Iterable[float]) -> Amounts:
        return Amounts._make(map(add, self, other))

    def minus(self, other: Iterable[float]) -> Amounts:
        return Amounts._make(map(sub, self, other))

    def at_most(self, bounds: Iterable[float]) -> Amounts:
        return Amounts._make(map(min, self, bounds))

    def at_least(self, bounds: Iterable[float]) -> Amounts:
        return Amounts._make(map(max, self, bounds))


NOTHING = Amounts()
new_amounts = partial(tuple.__new__, Amounts)
"""Amounts of a tuple of all four, in half the time of the constructor."""


class Rules(msgspec.Struct, frozen=True):
    """Parameters of a tenant's limits. A capacity is infinite without a limit. A rate is per second, and 0 for slots,
    which are occupied until they are put back."""

    capacities: Amounts
    rates: Amounts
    texts: tuple[str, ...] = ()
    """Capacities of rates in response headers."""

    @classmethod
    def of(cls, tenant: Tenant) -> Rules:
        """Requests may come in bursts of a second's worth, tokens of a minute's."""
        requests = _or_infinite(tenant.requests_per_second)
        input_tokens = _or_infinite(tenant.input_tokens_per_minute)
        output_tokens = _or_infinite(tenant.output_tokens_per_minute)
        capacities = Amounts(
            max(requests, 1.0), input_tokens, output_tokens, _or_infinite(tenant.concurrency)
        )
        rates = (requests, input_tokens / _MINUTE_S, output_tokens / _MINUTE_S, 0.0)
        texts = tuple("" if math.isinf(capacity) else str(int(capacity)) for capacity in capacities[:-1])
        return cls(capacities, Amounts._make(0.0 if math.isinf(rate) else rate for rate in rates), texts)

    def scaled(self, share: float) -> Rules:
        """Rules of one of several processes. At least one unit, or no request would ever be admitted."""
        capacities = Amounts._make(max(capacity * share, 1.0) for capacity in self.capacities)
        return Rules(capacities, Amounts._make(rate * share for rate in self.rates), self.texts)

    def limited(self, amounts: Amounts) -> Amounts:
        """The amounts of limited quantities; 0 for others."""
        return Amounts._make(
            0.0 if math.isinf(capacity) else amount
            for amount, capacity in zip(amounts, self.capacities, strict=True)
        )


class Refusal(msgspec.Struct, frozen=True):
    """Limit that has no room, and the time until it may have. Infinite: the amount exceeds the whole limit."""

    limit: Limit
    retry_after_s: float


class TenantBudget:
    """Buckets of one tenant.

    A bucket is stored as the time at which it is full again: `capacity - (full_at - now) * rate` is available now. To
    take an amount postpones that time, and nothing needs to be refilled."""

    __slots__ = (
        "_bursts",
        "_costs",
        "_free_slots",
        "_input_full_at",
        "_output_full_at",
        "_requests_full_at",
        "rules",
        "tenant",
    )

    def __init__(self, tenant: Tenant, now: float, share: float = 1.0, *, is_empty: bool = False) -> None:
        """`share`: fraction of the limits. `is_empty`: rates start without the allowance for a burst."""
        self._requests_full_at = self._input_full_at = self._output_full_at = now
        self._free_slots = 0.0
        self._set_rules(tenant, share)
        capacities = self.rules.capacities
        self._set_levels(
            NOTHING._replace(concurrency=capacities.concurrency) if is_empty else capacities, now
        )

    def take(self, amounts: Amounts, now: float) -> Refusal | None:
        """Take all amounts, or none of them: then return the limit with the longest wait."""
        requests, input_tokens, output_tokens, slots = amounts
        requests_at, input_at, output_at = self._requests_full_at, self._input_full_at, self._output_full_at
        request_cost, input_cost, output_cost = self._costs
        request_burst, input_burst, output_burst = self._bursts
        if requests:
            requests_at = (requests_at if requests_at > now else now) + requests * request_cost
        if input_tokens:
            input_at = (input_at if input_at > now else now) + input_tokens * input_cost
        if output_tokens:
            output_at = (output_at if output_at > now else now) + output_tokens * output_cost
        if (
            (requests and requests_at - now > request_burst)
            or (input_tokens and input_at - now > input_burst)
            or (output_tokens and output_at - now > output_burst)
            or (slots and slots > self._free_slots)
        ):
            return self._refusal(amounts, now)
        self._requests_full_at, self._input_full_at, self._output_full_at = requests_at, input_at, output_at
        self._free_slots -= slots
        return None

    def charge(self, amounts: Amounts, now: float) -> None:
        """Take amounts that cannot be refused, such as tokens generated beyond the reservation. A debt delays
        later requests."""
        self._set_levels(self.levels(now).minus(amounts), now)

    def put_back(self, amounts: Amounts) -> None:
        requests, input_tokens, output_tokens, slots = amounts
        request_cost, input_cost, output_cost = self._costs
        self._requests_full_at -= requests * request_cost
        self._input_full_at -= input_tokens * input_cost
        self._output_full_at -= output_tokens * output_cost
        free, most = self._free_slots + slots, self.rules.capacities.concurrency
        self._free_slots = free if free < most else most

    def levels(self, now: float) -> Amounts:
        """Available amounts; negative after a debt."""
        requests, input_tokens, output_tokens, _ = self.rules.capacities
        request_rate, input_rate, output_rate, _ = self.rules.rates
        if (after := self._requests_full_at - now) > 0:
            requests -= after * request_rate
        if (after := self._input_full_at - now) > 0:
            input_tokens -= after * input_rate
        if (after := self._output_full_at - now) > 0:
            output_tokens -= after * output_rate
        return new_amounts((requests, input_tokens, output_tokens, self._free_slots))

    def update(self, tenant: Tenant, share: float, now: float) -> None:
        """Apply changed limits, or another share of them. Slots in use stay in use."""
        levels, before = self.levels(now), self.rules.capacities
        self._set_rules(tenant, share)
        capacities = self.rules.capacities
        in_use = 0.0 if math.isinf(before.concurrency) else before.concurrency - levels.concurrency
        levels = levels.at_most(capacities)._replace(concurrency=capacities.concurrency - in_use)
        self._set_levels(levels, now)

    def _set_rules(self, tenant: Tenant, share: float) -> None:
        rules = Rules.of(tenant)
        self.tenant = tenant
        self.rules = rules = rules if share == 1.0 else rules.scaled(share)
        self._costs = tuple(1.0 / rate if rate else 0.0 for rate in rules.rates[:-1])
        """Seconds by which one unit postpones the time at which the bucket is full; 0 without a limit."""
        self._bursts = tuple(
            (capacity + _ROUNDING) * cost if cost else math.inf
            for capacity, cost in zip(rules.capacities[:-1], self._costs, strict=True)
        )

    def _set_levels(self, levels: Amounts, now: float) -> None:
        self._requests_full_at, self._input_full_at, self._output_full_at = (
            now + (capacity - level) * cost if cost else now
            for level, capacity, cost in zip(
                levels[:-1], self.rules.capacities[:-1], self._costs, strict=True
            )
        )
        self._free_slots = levels.concurrency

    def _refusal(self, amounts: Amounts, now: float) -> Refusal | None:
        refusal: Refusal | None = None
        for limit, amount, level, capacity, rate in zip(
            LIMITS, amounts, self.levels(now), self.rules.capacities, self.rules.rates, strict=True
        ):
            missing = amount - level
            if not amount or missing <= 0:
                continue
            wait_s = math.inf if amount > capacity else missing / rate if rate else SLOT_RETRY_S
            if refusal is None or wait_s > refusal.retry_after_s:
                refusal = Refusal(limit, wait_s)
        return refusal


def _or_infinite(limit: float | None) -> float:
    return math.inf if limit is None else float(limit)
