"""LocalBudget: one tenant's limits as one process sees them.

A request takes its amounts at once: from the limiter's buckets if this process is the limiter, else from its lease. It
waits only if the lease does not cover it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvolt.frontend.tenants.lease_pool import LeasePool
from kvolt.frontend.tenants.leases import LeaseReply, LeaseRequest
from kvolt.frontend.tenants.limits import Amounts, Limit, Refusal, TenantBudget
from kvolt.frontend.tenants.records import Tenant

_SLOT_RETRY_S = 0.05
"""A slot that another process has just released may be on its way to the limiter."""


class LimiterLink(Protocol):
    """This process's way to the limiter."""

    @property
    def id(self) -> str:
        """Id of this process."""
        ...

    @property
    def num_frontends(self) -> int: ...

    @property
    def is_lost(self) -> bool: ...

    async def call(self, build: Callable[[], LeaseRequest]) -> LeaseReply | None:
        """Reply to a message, which is built when the limiter knows this process; None if the limiter is lost."""
        ...

    def send_returns(self) -> None:
        """Return unspent amounts now."""
        ...


class LocalBudget:
    """See the module."""

    __slots__ = ("_link", "_lock", "_now", "_share", "budget", "held", "pool", "rules", "tenant")

    def __init__(self, tenant: Tenant, link: LimiterLink, now: Callable[[], float]) -> None:
        self.tenant = tenant
        self.pool = LeasePool(tenant)
        self.rules = self.pool.rules
        self.budget: TenantBudget | None = None
        """Set while this process is the limiter."""
        self.held = 0.0
        """Slots in use."""
        self._link = link
        self._now = now
        self._lock = asyncio.Lock()
        """One call to the limiter at a time: the requests that wait may be covered by its lease."""
        self._share: TenantBudget | None = None
        """Part of the limits that this process may use while the limiter is lost."""

    def update(self, tenant: Tenant) -> None:
        """Apply changed limits."""
        self.tenant = tenant
        self.pool.update(tenant)
        self.rules = self.pool.rules

    def take(self, amounts: Amounts) -> bool:
        """Take all amounts, or none if they are not in this process."""
        budget = self.budget
        if not (self.pool.take(amounts) if budget is None else budget.take(amounts, self._now()) is None):
            return False
        self.held += amounts.concurrency
        return True

    async def lease(self, amounts: Amounts) -> Refusal | None:
        """Take all amounts, with a lease from the limiter if needed, or none and return the reason."""
        refusal = await self._lease(amounts)
        if refusal is not None and refusal.limit is Limit.CONCURRENCY and self._link.num_frontends > 1:
            await asyncio.sleep(_SLOT_RETRY_S)
            refusal = await self._lease(amounts)
        if refusal is None:
            self.held += amounts.concurrency
        return refusal

    def charge(self, amounts: Amounts) -> None:
        """Take amounts that cannot be refused any more."""
        if self.budget is None:
            self.pool.charge(amounts)
        else:
            self.budget.charge(amounts, self._now())

    def put_back(self, amounts: Amounts) -> None:
        self.held -= amounts.concurrency
        if self.budget is not None:
            self.budget.put_back(amounts)
            return
        if self._share is not None:
            self._share.put_back(Amounts(concurrency=amounts.concurrency))
        if self.pool.put_back(amounts):
            self._link.send_returns()

    def levels(self) -> Amounts:
        """Available amounts; without the limiter's buckets those after its latest reply."""
        return self.pool.levels() if self.budget is None else self.budget.levels(self._now())

    def end_share(self) -> None:
        self._share = None

    # ---

    async def _lease(self, amounts: Amounts) -> Refusal | None:
        pool = self.pool
        async with self._lock:
            now = self._now()
            if self.budget is not None:  # elected while this request waited
                return self.budget.take(amounts, now)
            if pool.take(amounts):
                return None
            refusal = pool.denied(amounts, now)
            if refusal is not None:
                return refusal
            link = self._link
            reply = None if link.is_lost else await link.call(lambda: pool.request(link.id, amounts))
            now = self._now()
            if self.budget is not None:
                return self.budget.take(amounts, now)
            if reply is None or not reply.has_tenant:
                return self._take_share(amounts, now)
            self._share = None
            refusal = pool.apply(amounts, reply, now)
            if refusal is None:
                pool.take(amounts)
            return refusal

    def _take_share(self, amounts: Amounts, now: float) -> Refusal | None:
        """Take amounts from this process's share of the limits, which starts empty: a lost limiter is no burst."""
        pool, part = self.pool, 1.0 / max(self._link.num_frontends, 1)
        share = self._share
        if share is None:
            pool.release_slots()
            share = self._share = TenantBudget(pool.tenant, now, part, is_empty=True)
            share.charge(Amounts(concurrency=self.held), now)
        elif share.tenant is not pool.tenant:
            share.update(pool.tenant, part, now)
        missing = pool.missing(amounts)
        refusal = share.take(missing, now)
        if refusal is None:
            pool.add(missing)
            pool.take(amounts)
        return refusal
