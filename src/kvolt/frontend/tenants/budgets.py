"""Requests that are charged to the budgets of their tenants, and what clients see of the limits."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Protocol

from kvolt.core.errors import FieldValue
from kvolt.frontend.openai_api.errors import RateLimited
from kvolt.frontend.tenants.limits import Amounts, Limit, LimitState, Refusal
from kvolt.frontend.tenants.records import Caller, Tenant
from kvolt.frontend.tenants.usage import UsageMeter

_NEVER_RETRY_S = 60.0
_BEGIN: Amounts = {Limit.REQUESTS: 1, Limit.CONCURRENCY: 1}
_ONE_REQUEST: Amounts = {Limit.REQUESTS: 1}
_UNITS = {
    Limit.REQUESTS: "requests per second",
    Limit.INPUT_TOKENS: "input tokens per minute",
    Limit.OUTPUT_TOKENS: "output tokens per minute",
    Limit.CONCURRENCY: "concurrent requests",
}


class Budgets(Protocol):
    """Remaining budget of each tenant."""

    async def take(self, tenant: Tenant, amounts: Amounts) -> Refusal | None:
        """Take all amounts, or none and return the reason."""
        ...

    def charge(self, tenant: Tenant, amounts: Amounts) -> None:
        """Take amounts that cannot be refused any more."""
        ...

    def put_back(self, tenant: Tenant, amounts: Amounts) -> None: ...

    def states(self, tenant: Tenant) -> dict[Limit, LimitState]: ...

    def capacity(self, tenant: Tenant, limit: Limit) -> float: ...

    def retain(self, names: Collection[str]) -> None:
        """Forget all other tenants."""
        ...


class TenantRequest:
    """One request while it is charged to its tenant. `end` releases what it did not use."""

    __slots__ = ("_budgets", "_input_tokens", "_is_limited", "_reserved_output", "_usage", "caller")

    def __init__(self, caller: Caller, budgets: Budgets, usage: UsageMeter) -> None:
        self.caller = caller
        self._budgets = budgets
        self._usage = usage
        self._is_limited = caller.tenant.is_limited
        """At the begin of the request: what was not taken is not put back."""
        self._input_tokens = 0
        self._reserved_output = 0.0

    async def begin(self) -> None:
        """Take a request and a slot. Raises RateLimited."""
        tenant = self.caller.tenant
        if self._is_limited:
            self._check(await self._budgets.take(tenant, _BEGIN), _BEGIN)
        usage = self._usage.of(tenant.name)
        usage.requests += 1
        usage.active += 1

    async def reserve_tokens(self, num_input: int, num_output: int, is_default: bool) -> None:
        """Take the tokens of the prompt, and those that the answer may have. Raises RateLimited.

        `is_default`: the client set no limit for its answer. Then at most a full bucket is reserved, and an answer
        that is longer leaves a debt.
        """
        tenant = self.caller.tenant
        if tenant.input_tokens_per_minute is tenant.output_tokens_per_minute is None:
            self._input_tokens = num_input
            return
        output: float = num_output
        if is_default:
            output = min(output, self._budgets.capacity(tenant, Limit.OUTPUT_TOKENS))
        amounts = {Limit.INPUT_TOKENS: float(num_input), Limit.OUTPUT_TOKENS: output}
        self._check(await self._budgets.take(tenant, amounts), amounts)
        self._input_tokens, self._reserved_output = num_input, output

    def end(self, num_output: int, is_server_error: bool) -> None:
        """Settle the tokens and release the slot. A request that the server failed before its first token costs no
        tokens."""
        is_free = is_server_error and not num_output
        if self._is_limited:
            self._settle(num_output, is_free)
        if is_free:
            self._input_tokens = 0
        usage = self._usage.of(self.caller.tenant.name)
        usage.active -= 1
        usage.input_tokens += self._input_tokens
        usage.output_tokens += num_output

    def _settle(self, num_output: int, is_free: bool) -> None:
        tenant, unused = self.caller.tenant, self._reserved_output - num_output
        returned: dict[Limit, float] = {}
        if tenant.concurrency is not None:
            returned[Limit.CONCURRENCY] = 1.0
        if is_free and tenant.input_tokens_per_minute is not None:
            returned[Limit.INPUT_TOKENS] = self._input_tokens
        if tenant.output_tokens_per_minute is not None:
            if unused > 0:
                returned[Limit.OUTPUT_TOKENS] = unused
            elif unused < 0:
                self._budgets.charge(tenant, {Limit.OUTPUT_TOKENS: -unused})
        if returned:
            self._budgets.put_back(tenant, returned)

    def headers(self) -> dict[str, str]:
        """`x-ratelimit-*` headers."""
        if not self._is_limited:
            return {}
        return ratelimit_headers(self._budgets.states(self.caller.tenant))

    def _check(self, refusal: Refusal | None, amounts: Amounts) -> None:
        if refusal is not None:
            raise refused(refusal, amounts, self.caller.tenant, self._budgets, self._usage)


async def take_request(caller: Caller, budgets: Budgets, usage: UsageMeter) -> None:
    """Charge a request that needs no slot and generates nothing. Raises RateLimited."""
    refusal = await budgets.take(caller.tenant, _ONE_REQUEST)
    if refusal is not None:
        raise refused(refusal, _ONE_REQUEST, caller.tenant, budgets, usage)
    usage.of(caller.tenant.name).requests += 1


def refused(
    refusal: Refusal, amounts: Amounts, tenant: Tenant, budgets: Budgets, usage: UsageMeter
) -> RateLimited:
    """Count a refusal and return its error."""
    usage.count_refusal(tenant.name, refusal.limit.value)
    unit = _UNITS[refusal.limit]
    fields: dict[str, FieldValue] = dict(ratelimit_headers(budgets.states(tenant)))
    if math.isinf(refusal.retry_after_s):
        amount = int(amounts[refusal.limit])
        message = f"request too large for tenant {tenant.name!r}: {amount} exceed its limit of {unit}"
        fields |= {"x-should-retry": "false", "retry_after_s": _NEVER_RETRY_S}
    else:
        message = f"rate limit of tenant {tenant.name!r} reached: {unit}; try again later"
        fields["retry_after_s"] = max(refusal.retry_after_s, 1.0)
    return RateLimited(message, limit=refusal.limit.value, gpu_work="none", **fields)


def ratelimit_headers(states: dict[Limit, LimitState]) -> dict[str, str]:
    """OpenAI's headers. `tokens` is the limit of input or output with the smaller part left."""
    headers: dict[str, str] = {}
    requests, tokens = states.get(Limit.REQUESTS), states.get(Limit.INPUT_TOKENS)
    output = states.get(Limit.OUTPUT_TOKENS)
    if tokens is None or (
        output is not None and output.remaining / output.capacity < tokens.remaining / tokens.capacity
    ):
        tokens = output
    if requests is not None:
        _add_headers(headers, "requests", requests)
    if tokens is not None:
        _add_headers(headers, "tokens", tokens)
    return headers


def _add_headers(headers: dict[str, str], name: str, state: LimitState) -> None:
    headers[f"x-ratelimit-limit-{name}"] = str(int(state.capacity))
    headers[f"x-ratelimit-remaining-{name}"] = str(int(state.remaining + 1e-6))
    headers[f"x-ratelimit-reset-{name}"] = _duration(state.reset_s)


def _duration(seconds: float) -> str:
    """OpenAI's format: 120ms, 7.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"
