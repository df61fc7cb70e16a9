"""SharedBudgets: the limits of tenants over all frontends of a namespace.

The oldest frontend is the limiter; all see the same one in discovery. It spends its buckets directly, so a single
frontend is exact; the others lease from it (`leases`). While it cannot be reached they spend
their last lease, then a local share: the limit divided by the number of known frontends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field

import msgspec

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import KvoltError
from kvolt.core.ids import InstanceId
from kvolt.frontend.tenants.leases import LeaseReply, LeaseRequest, Limiter, Pool
from kvolt.frontend.tenants.limits import Amounts, Limit, LimitState, Refusal, TenantBudget
from kvolt.frontend.tenants.records import Tenant
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.plane.wire import MALFORMED
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 1.0
_DEADLINES = Deadlines(
    connect_s=_CALL_TIMEOUT_S, first_s=_CALL_TIMEOUT_S, between_s=_CALL_TIMEOUT_S, total_s=_CALL_TIMEOUT_S
)
_RENEW_S = 1.0
_SLOT_RETRY_S = 0.05
"""A slot that another process has just released may be on its way to the limiter."""

_decode_reply = msgspec.msgpack.Decoder(LeaseReply).decode
_decode_since = msgspec.msgpack.Decoder(float).decode


@dataclass(slots=True, eq=False)
class _Shared:
    """State of one tenant in this process."""

    pool: Pool
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One call to the limiter at a time: the requests that wait may be covered by its lease."""
    share: TenantBudget | None = None
    """Local share while the limiter is lost."""


class SharedBudgets:
    """Budgets of this process. `start` before the port opens."""

    def __init__(self, runtime: Runtime, namespace: str, tenants: Callable[[], Mapping[str, Tenant]]) -> None:
        """`tenants`: current tenants of the key store."""
        self._runtime = runtime
        self._endpoint = EndpointAddress(namespace, "frontend", "limiter")
        self._tenants = tenants
        self._now = runtime.ports.clock.monotonic
        self._own: InstanceId | None = None
        self._client: EndpointClient | None = None
        self._limiter: Limiter | None = Limiter(self._now())
        """Set while this process is the limiter."""
        self._leader: Instance | None = None
        self._since = 0.0
        """Wall time of the start, by which the limiter is elected."""
        self._was_listed = False
        """Whether this process has been a candidate; one that is not any more is cordoned."""
        self._is_known = False
        """Whether the limiter knows the slots that this process holds."""
        self._introduction = asyncio.Lock()
        self._is_lost = False
        self._num_failures = 0
        self._old_levels: dict[str, dict[Limit, float]] = {}
        self._shared: dict[str, _Shared] = {}
        self._wakeup = asyncio.Event()
        self._task_group = TaskGroup("tenant-budgets")

    async def start(self) -> None:
        self._since = self._runtime.ports.clock.wall()
        instance = await self._runtime.serve(self._endpoint, self._serve, LeaseRequest, self._since)
        self._own = instance.id
        self._client = await self._runtime.client(self._endpoint)
        await self._client.wait_synced(_CALL_TIMEOUT_S)
        self._elect()
        self._client.on_change(self._elect)
        self._task_group.start(self._renew(), "renew")

    async def close(self) -> None:
        await self._task_group.close()

    @property
    def is_limiter(self) -> bool:
        return self._limiter is not None

    # --- Budgets

    async def take(self, tenant: Tenant, amounts: Amounts) -> Refusal | None:
        tenant = self._current(tenant)
        refusal = await self._take(tenant, amounts)
        if refusal is not None and refusal.limit is Limit.CONCURRENCY and self._num_frontends > 1:
            await asyncio.sleep(_SLOT_RETRY_S)
            refusal = await self._take(tenant, amounts)
        return refusal

    async def _take(self, tenant: Tenant, amounts: Amounts) -> Refusal | None:
        limiter = self._limiter
        if limiter is None:
            return await self._lease(self._of(tenant), amounts)
        now = self._now()
        budget = limiter.budget(tenant, now)
        refusal = budget.take(amounts, now)
        if refusal is None and tenant.concurrency is not None:
            self._of(tenant).pool.held += amounts.get(Limit.CONCURRENCY, 0.0)
        return refusal

    def charge(self, tenant: Tenant, amounts: Amounts) -> None:
        tenant = self._current(tenant)
        if self._limiter is not None:
            now = self._now()
            self._limiter.budget(tenant, now).charge(amounts, now)
        else:
            self._of(tenant).pool.charge(amounts)

    def put_back(self, tenant: Tenant, amounts: Amounts) -> None:
        tenant = self._current(tenant)
        shared = self._of(tenant)
        if self._limiter is not None:
            now = self._now()
            shared.pool.held = max(shared.pool.held - amounts.get(Limit.CONCURRENCY, 0.0), 0.0)
            self._limiter.budget(tenant, now).put_back(amounts, now)
            return
        if shared.share is not None and Limit.CONCURRENCY in amounts:
            shared.share.put_back({Limit.CONCURRENCY: amounts[Limit.CONCURRENCY]}, self._now())
        if shared.pool.put_back(amounts):
            self._wakeup.set()

    def states(self, tenant: Tenant) -> dict[Limit, LimitState]:
        tenant = self._current(tenant)
        if self._limiter is not None:
            now = self._now()
            return self._limiter.budget(tenant, now).states(now)
        return self._of(tenant).pool.states()

    def capacity(self, tenant: Tenant, limit: Limit) -> float:
        rule = self._of(self._current(tenant)).pool.rules.get(limit)
        return float("inf") if rule is None else rule.capacity

    def retain(self, names: Collection[str]) -> None:
        self._shared = {name: each for name, each in self._shared.items() if name in names}
        if self._limiter is not None:
            self._limiter.retain(frozenset(names))

    # --- leases

    def _current(self, tenant: Tenant) -> Tenant:
        """The tenant with its current limits, which may have changed since its request began."""
        return self._tenants().get(tenant.name, tenant)

    def _of(self, tenant: Tenant) -> _Shared:
        shared = self._shared.get(tenant.name)
        if shared is None:
            shared = self._shared[tenant.name] = _Shared(Pool(tenant))
        elif shared.pool.tenant is not tenant:
            shared.pool.update(tenant)
        return shared

    async def _lease(self, shared: _Shared, amounts: Amounts) -> Refusal | None:
        pool = shared.pool
        if pool.take(amounts, self._now()):
            return None
        async with shared.lock:
            now = self._now()
            if pool.take(amounts, now):
                return None
            if self._limiter is not None:  # elected while this request waited
                return await self._take(pool.tenant, amounts)
            refusal = pool.denied(amounts, now)
            if refusal is not None:
                return refusal
            reply = None if self._is_lost else await self._call(pool.request(self._id, amounts))
            now = self._now()
            if reply is None or not reply.has_tenant:
                return self._take_share(shared, amounts, now)
            shared.share = None
            refusal = pool.apply(amounts, reply, now)
            if refusal is None:
                pool.take(amounts, now)
            return refusal

    def _take_share(self, shared: _Shared, amounts: Amounts, now: float) -> Refusal | None:
        """Take amounts from this process's share of the limits, which starts empty: a lost limiter is no burst."""
        pool = shared.pool
        part = 1.0 / max(self._num_frontends, 1)
        if shared.share is None:
            shared.share = TenantBudget(pool.tenant, now, part, is_empty=True)
            shared.share.charge({Limit.CONCURRENCY: pool.held}, now)
        elif shared.share.tenant is not pool.tenant:
            shared.share.update(pool.tenant, part, now)
        missing = pool.missing(amounts)
        refusal = shared.share.take(missing, now)
        if refusal is None:
            pool.add(missing)
            pool.take(amounts, now)
        return refusal

    async def _call(self, request: LeaseRequest) -> LeaseReply | None:
        """Send a message to the limiter; None if it is lost."""
        for _ in range(2):
            if not self._is_known:
                if not await self._introduce():
                    return None
                request = _without_slots(request)  # `held` was without them already
            reply = await self._send(request)
            if reply is None or reply.is_known:
                return reply
            self._is_known = False
        return None

    async def _introduce(self) -> bool:
        """Report all slots in use to the limiter; whether it knows them now."""
        async with self._introduction:
            if not self._is_known:
                for shared in self._shared.values():
                    shared.pool.forget_limiter()
                held = {name: shared.pool.held for name, shared in self._shared.items() if shared.pool.held}
                reply = await self._send(LeaseRequest(self._id, held=held, levels=self._old_levels))
                if reply is not None and reply.is_known:
                    self._find_limiter()
            return self._is_known

    async def _send(self, request: LeaseRequest) -> LeaseReply | None:
        leader = self._leader
        if leader is None or self._client is None:
            return None
        try:
            async with await self._client.stream(request, leader, _DEADLINES, _decode_reply) as stream:
                reply: LeaseReply | None = await anext(stream, None)
        except KvoltError as error:
            if leader is self._leader:
                self._lose_limiter(error.message)
            return None
        if leader is not self._leader:
            return None  # another one was elected: the amounts are the former limiter's
        return reply

    # --- the limiter

    async def _serve(self, request: LeaseRequest) -> AsyncIterator[LeaseReply]:
        if self._limiter is None:  # this process has not seen yet that it is elected, or is not any more
            yield LeaseReply(is_known=False)
        else:
            yield self._limiter.handle(request, self._tenants(), self._now())

    def _elect(self) -> None:
        """Follow the oldest candidate, or lead."""
        assert self._client is not None
        assert self._own is not None
        candidates = {each.id: each for each in self._client.candidates()}
        self._was_listed |= self._own in candidates
        ages = {instance_id: _since(each) for instance_id, each in candidates.items()}
        if not self._was_listed or not candidates:
            ages[self._own] = self._since
        leader = min(ages, key=lambda instance_id: (ages[instance_id], instance_id))
        if leader == self._own:
            if self._limiter is None:
                self._lead()
        elif self._leader is None or leader != self._leader.id:
            self._follow(candidates[leader])

    def _lead(self) -> None:
        now = self._now()
        self._limiter = Limiter(now, is_successor=True)
        self._limiter.set_held(self._id, {name: each.pool.held for name, each in self._shared.items()}, now)
        self._leader = None
        self._end_shares()
        log.info("limiter of the tenants' budgets: this process")

    def _follow(self, leader: Instance) -> None:
        if self._limiter is not None:
            self._old_levels = self._limiter.levels(self._now())
            self._limiter = None
        self._leader, self._is_known, self._is_lost = leader, False, False
        self._wakeup.set()
        log.info("limiter of the tenants' budgets: process=%s", leader.process)

    def _lose_limiter(self, reason: str) -> None:
        self._is_known, self._is_lost = False, True
        self._num_failures += 1
        if self._num_failures == 2:  # a process that starts may be late once
            log.warning("limiter lost; using a share of the tenants' budgets: reason=%s", reason)

    def _find_limiter(self) -> None:
        self._is_known, self._old_levels = True, {}
        if self._is_lost:
            self._is_lost = False
            self._end_shares()
        if self._num_failures >= 2:
            log.info("limiter found again")
        self._num_failures = 0

    def _end_shares(self) -> None:
        for shared in self._shared.values():
            shared.share = None

    async def _renew(self) -> None:
        """Return unspent amounts, at once for slots, and show the limiter that this process lives."""
        while True:
            try:
                async with asyncio.timeout(_RENEW_S):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()
            if self._limiter is not None:
                continue
            now = self._now()
            for shared in self._shared.values():
                shared.pool.release_idle(now)
            returned = {
                name: amounts for name, each in self._shared.items() if (amounts := each.pool.unsent())
            }
            await self._call(LeaseRequest(self._id, returned=returned))

    @property
    def _id(self) -> str:
        return str(self._own)

    @property
    def _num_frontends(self) -> int:
        return 1 if self._client is None else len(self._client.candidates())


def _since(instance: Instance) -> float:
    """Wall time of a frontend's start, from its registration."""
    try:
        return _decode_since(instance.info)
    except MALFORMED:
        return float("inf")


def _without_slots(request: LeaseRequest) -> LeaseRequest:
    returned = {
        name: {limit: amount for limit, amount in amounts.items() if limit is not Limit.CONCURRENCY}
        for name, amounts in request.returned.items()
    }
    return msgspec.structs.replace(request, returned=returned)
