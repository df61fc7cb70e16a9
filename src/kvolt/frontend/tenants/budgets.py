"""Requests that are charged to the budgets of their tenants, and what clients see of the limits."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from kvolt.core.errors import FieldValue
from kvolt.frontend.openai_api.errors import RateLimited
from kvolt.frontend.tenants.limits import LIMITS, Amounts, Limit, Refusal, Rules, new_amounts
from kvolt.frontend.tenants.records import Tenant
from kvolt.frontend.tenants.usage import TenantUsage

_NEVER_RETRY_S = 60.0
_BEGIN = Amounts(requests=1.0, concurrency=1.0)
_ONE_REQUEST = Amounts(requests=1.0)
_UNITS = {
    Limit.REQUESTS: "requests per second",
    Limit.INPUT_TOKENS: "input tokens per minute",
    Limit.OUTPUT_TOKENS: "output tokens per minute",
    Limit.CONCURRENCY: "concurrent requests",
}
_MILLISECONDS = tuple(f"{count}ms" for count in range(1001))


class Budget(Protocol):
    """Budget of one tenant in this process."""

    @property
    def rules(self) -> Rules: ...

    def take(self, amounts: Amounts) -> bool:
        """Take all amounts, or none if they are not in this process."""
        ...

    async def lease(self, amounts: Amounts) -> Refusal | None:
        """Take all amounts, also from other processes, or none and return the reason."""
        ...

    def charge(self, amounts: Amounts) -> None:
        """Take amounts that cannot be refused any more."""
        ...

    def put_back(self, amounts: Amounts) -> None: ...

    def levels(self) -> Amounts:
        """Available amounts, for response headers."""
        ...


class Budgets(Protocol):
    """Budgets of all tenants."""

    def of(self, tenant: Tenant) -> Budget: ...

    def retain(self, names: Collection[str]) -> None:
        """Forget all other tenants."""
        ...


class Account:
    """What the requests of one tenant are charged to in this process."""

    __slots__ = ("budget", "has_token_limit", "tenant", "usage")

    def __init__(self, tenant: Tenant, budget: Budget | None, usage: TenantUsage) -> None:
        """`budget`: None without limits."""
        self.tenant = tenant
        self.budget = budget
        self.usage = usage
        self.has_token_limit = tenant.has_token_limit

    def refused(self, refusal: Refusal, amounts: Amounts) -> RateLimited:
        """Count a refusal and return its error."""
        self.usage.count_refusal(refusal.limit.value)
        name, unit = self.tenant.name, _UNITS[refusal.limit]
        fields: dict[str, FieldValue] = {}
        if self.budget is not None:
            fields |= ratelimit_headers(self.budget.rules, self.budget.levels())
        if math.isinf(refusal.retry_after_s):
            amount = int(amounts[LIMITS.index(refusal.limit)])
            message = f"request too large for tenant {name!r}: {amount} exceed its limit of {unit}"
            fields |= {"x-should-retry": "false", "retry_after_s": _NEVER_RETRY_S}
        else:
            message = f"rate limit of tenant {name!r} reached: {unit}; try again later"
            fields["retry_after_s"] = max(refusal.retry_after_s, 1.0)
        return RateLimited(message, limit=refusal.limit.value, gpu_work="none", **fields)


class TenantRequest:
    """One request while it is charged to its tenant. `end` releases what it did not use."""

    __slots__ = ("_account", "_budget", "_input_tokens", "_reserved_output")

    def __init__(self, account: Account) -> None:
        self._account = account
        self._budget = account.budget
        """At the begin of the request: what was not taken is not put back."""
        self._input_tokens = 0
        self._reserved_output: float | None = None

    async def begin(self) -> None:
        """Take a request and a slot. Raises RateLimited."""
        budget, usage = self._budget, self._account.usage
        if budget is not None and not budget.take(_BEGIN):
            self._check(await budget.lease(_BEGIN), _BEGIN)
        usage.requests += 1
        usage.active += 1

    async def reserve_tokens(self, num_input: int, num_output: int, is_default: bool) -> None:
        """Take the tokens of the prompt, and those that the answer may have. Raises RateLimited.

        `is_default`: the client set no limit for its answer. Then at most a full bucket is reserved, and an answer
        that is longer leaves a debt.
        """
        budget = self._budget
        if budget is None or not self._account.has_token_limit:
            self._input_tokens = num_input
            return
        output: float = num_output
        if is_default:
            output = min(output, budget.rules.capacities.output_tokens)
        amounts = new_amounts((0.0, num_input, output, 0.0))
        if not budget.take(amounts):
            self._check(await budget.lease(amounts), amounts)
        self._input_tokens, self._reserved_output = num_input, output

    def end(self, num_output: int, is_server_error: bool) -> None:
        """Settle the tokens and release the slot. A request that the server failed before its first token costs no
        tokens."""
        is_free = is_server_error and not num_output
        budget = self._budget
        if budget is not None:
            unused, reserved = 0.0, self._reserved_output
            if reserved is not None:
                unused = reserved - num_output
                if unused < 0:
                    budget.charge(Amounts(output_tokens=-unused))
                    unused = 0.0
            budget.put_back(new_amounts((0.0, self._input_tokens if is_free else 0.0, unused, 1.0)))
        usage = self._account.usage
        usage.active -= 1
        usage.output_tokens += num_output
        if not is_free:
            usage.input_tokens += self._input_tokens

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` headers."""
        budget = self._budget
        return {} if budget is None else ratelimit_headers(budget.rules, budget.levels())

    def _check(self, refusal: Refusal | None, amounts: Amounts) -> None:
        if refusal is not None:
            raise self._account.refused(refusal, amounts)


async def take_request(account: Account) -> None:
    """Charge a request that needs no slot and generates nothing. Raises RateLimited."""
    budget = account.budget
    if budget is not None and not budget.take(_ONE_REQUEST):
        refusal = await budget.lease(_ONE_REQUEST)
        if refusal is not None:
            raise account.refused(refusal, _ONE_REQUEST)
    account.usage.requests += 1


def ratelimit_headers(rules: Rules, levels: Amounts) -> dict[str, str]:
    """OpenAI's headers. `tokens` is the limit of input or output with the smaller part left."""
    headers: dict[str, str] = {}
    requests, input_tokens, output_tokens, _ = rules.capacities
    request_level, input_level, output_level, _ = levels
    request_rate, input_rate, output_rate, _ = rules.rates
    if request_rate:
        headers["x-ratelimit-limit-requests"] = rules.texts[0]
        headers["x-ratelimit-remaining-requests"] = _count(request_level)
        headers["x-ratelimit-reset-requests"] = _duration((requests - request_level) / request_rate)
    text = rules.texts[1]
    if output_rate and (not input_rate or output_level * input_tokens < input_level * output_tokens):
        input_tokens, input_level, input_rate = output_tokens, output_level, output_rate
        text = rules.texts[2]
    if input_rate:
        headers["x-ratelimit-limit-tokens"] = text
        headers["x-ratelimit-remaining-tokens"] = _count(input_level)
        headers["x-ratelimit-reset-tokens"] = _duration((input_tokens - input_level) / input_rate)
    return headers


def _count(level: float) -> str:
    return str(int(level + 1e-6)) if level > 0 else "0"


def _duration(seconds: float) -> str:
    """OpenAI's format: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return _MILLISECONDS[math.ceil(seconds * 1000)]
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
