"""SharedBudgets: the limits of tenants over all frontends of a namespace.

The oldest frontend is the limiter; all see the same one in discovery. It spends its buckets directly, so a single
frontend is exact; the others lease from it (`leases`). While it cannot be reached they spend
their last lease, then a local share: the limit divided by the number of known frontends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping

import msgspec

from kvolt.core.endpoints import EndpointAddress, Instance
from kvolt.core.errors import MALFORMED, KvoltError
from kvolt.core.ids import InstanceId
from kvolt.frontend.tenants.lease_pool import KEEP_S, LeasePool
from kvolt.frontend.tenants.leases import LeaseReply, LeaseRequest, Limiter
from kvolt.frontend.tenants.limits import Amounts
from kvolt.frontend.tenants.local_budget import LocalBudget
from kvolt.frontend.tenants.records import Tenant
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.endpoint.client import EndpointClient
from kvolt.runtime.runtime import Runtime
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_CALL_TIMEOUT_S = 1.0
_DEADLINES = Deadlines(
    connect_s=_CALL_TIMEOUT_S, first_s=_CALL_TIMEOUT_S, between_s=_CALL_TIMEOUT_S, total_s=_CALL_TIMEOUT_S
)
_RENEW_S = KEEP_S

_decode_reply = msgspec.msgpack.Decoder(LeaseReply).decode
_decode_since = msgspec.msgpack.Decoder(float).decode


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
        self._old_levels: dict[str, Amounts] = {}
        self._locals: dict[str, LocalBudget] = {}
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

    def of(self, tenant: Tenant) -> LocalBudget:
        """Budget of a tenant with these limits."""
        local = self._locals.get(tenant.name)
        if local is None:
            local = self._locals[tenant.name] = LocalBudget(tenant, self, self._now)
            self._connect(local)
        elif local.tenant is not tenant:
            local.update(tenant)
            self._connect(local)
        return local

    def retain(self, names: Collection[str]) -> None:
        """Forget all other tenants."""
        if any(local.held for name, local in self._locals.items() if name not in names):
            self._is_known = False  # so that the limiter forgets their slots, which are returned to no budget
        self._locals = {name: each for name, each in self._locals.items() if name in names}
        if self._limiter is not None:
            self._limiter.retain(frozenset(names))

    # --- LimiterLink

    @property
    def id(self) -> str:
        return str(self._own)

    @property
    def num_frontends(self) -> int:
        return 1 if self._client is None else len(self._client.candidates())

    @property
    def is_lost(self) -> bool:
        return self._is_lost

    def send_returns(self) -> None:
        self._wakeup.set()

    async def call(self, build: Callable[[], LeaseRequest]) -> LeaseReply | None:
        for _ in range(2):
            if not self._is_known and not await self._introduce():
                return None
            reply = await self._send(build())
            if reply is None or reply.is_known:
                return reply
            self._is_known = False
        return None

    async def _introduce(self) -> bool:
        """Report all slots in use to the limiter; whether it knows them now."""
        async with self._introduction:
            if not self._is_known:
                for local in self._locals.values():
                    local.pool.forget_limiter()
                reply = await self._send(LeaseRequest(self.id, held=self._held(), levels=self._old_levels))
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
        except asyncio.CancelledError:
            # The limiter may have granted slots whose reply is lost: it gets the number of those in use again.
            self._is_known = False
            raise
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
        self._leader = None
        for local in self._locals.values():
            local.pool = LeasePool(local.tenant)
            self._connect(local)
            local.charge(Amounts(concurrency=local.held))
        self._end_shares()
        log.info("limiter of the tenants' budgets: this process")

    def _follow(self, leader: Instance) -> None:
        if self._limiter is not None:
            self._old_levels = self._limiter.levels(self._now())
            self._limiter = None
            for local in self._locals.values():
                self._connect(local)
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
        for local in self._locals.values():
            local.end_share()

    def _connect(self, local: LocalBudget) -> None:
        """Let a budget spend the limiter's buckets, if they are in this process."""
        limiter = self._limiter
        local.budget = None if limiter is None else limiter.budget(local.tenant, self._now())

    def _held(self) -> dict[str, float]:
        return {name: local.held for name, local in self._locals.items() if local.held}

    async def _renew(self) -> None:
        """Return unspent amounts, at once for slots, and show the limiter that this process lives."""
        released_at = self._now()
        while True:
            try:
                async with asyncio.timeout(_RENEW_S):
                    await self._wakeup.wait()
            except TimeoutError:
                pass
            self._wakeup.clear()
            if self._limiter is not None:
                continue
            if self._now() - released_at >= KEEP_S:
                released_at = self._now()
                for local in self._locals.values():
                    local.pool.release_unused()
            await self.call(self._returns)

    def _returns(self) -> LeaseRequest:
        returned = {name: amounts for name, each in self._locals.items() if (amounts := each.pool.unsent())}
        return LeaseRequest(self.id, returned=returned)


def _since(instance: Instance) -> float:
    """Wall time of a frontend's start, from its registration."""
    try:
        return _decode_since(instance.info)
    except MALFORMED:
        return float("inf")
