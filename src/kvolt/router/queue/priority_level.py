"""Waiting requests of one priority, shared fairly between tenants. Pure.

Deficit round robin by tokens: each turn of a tenant is worth a quantum times its share, an overdraft is paid back in
later turns, and the debt is remembered while other tenants wait. So tenants that wait all the time are served in the
ratio of their shares, up to one turn and one request, and no tenant waits longer than one turn of each other.
Within a tenant the lowest `sort_key` goes first, then the oldest.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

_COMPACT_FROM = 64
"""Heaps below this size are not compacted: sweeping costs more than the dead entries."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    max_requests: int = 4096
    max_tokens: int = 16_777_216
    max_debtors: int = 1024
    """Tenants without waiting requests whose debts are remembered; the one that left first is dropped first."""
    quantum_tokens: int = 4096
    aging_tokens_per_s: float = 1000.0
    """Order `shortest`: tokens that one second of waiting makes up for."""
    promote_s: float = 10.0
    """Wait after which a request gets its share whatever waits with a higher priority."""

    def __post_init__(self) -> None:
        if min(self.max_requests, self.max_tokens, self.quantum_tokens) < 1:
            raise ValueError("max_requests, max_tokens and quantum_tokens must be at least 1")


@dataclass(slots=True, eq=False)
class QueueEntry:
    """One request, from `push` until it is admitted, removed, refused or expired."""

    tokens: int
    arrived_at: float
    tenant: str | None = None
    priority: int = 0
    constraints: Hashable = None
    deadline: float = math.inf
    share: float = 1.0
    """Of the entry's tenant; that of the tenant's newest entry applies."""
    is_queued: bool = field(default=False, init=False)
    """Set by the queue, like the fields below."""
    sequence: int = field(default=0, init=False)
    sort_key: float = field(default=0.0, init=False)


class LazyHeap:
    """Heap of entries with lazy deletion: a removed entry is popped when it reaches the top, or swept when
    more entries are dead than alive."""

    __slots__ = ("_heap", "_num_queued")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, QueueEntry]] = []
        self._num_queued = 0

    def __bool__(self) -> bool:
        return bool(self._num_queued)

    def push(self, at: float, entry: QueueEntry) -> None:
        heapq.heappush(self._heap, (at, entry.sequence, entry))
        self._num_queued += 1

    def note_removal(self) -> None:
        """Count an entry as removed; its `is_queued` is False."""
        self._num_queued -= 1
        heap = self._heap
        if len(heap) >= _COMPACT_FROM and len(heap) > 2 * self._num_queued:
            heap[:] = [each for each in heap if each[2].is_queued]
            heapq.heapify(heap)
        while heap and not heap[0][2].is_queued:
            heapq.heappop(heap)

    @property
    def first(self) -> tuple[float, int, QueueEntry]:
        return self._heap[0]


class _Tenant:
    """Waiting requests of one tenant at one priority."""

    __slots__ = ("credit", "heaps", "name", "quantum", "share", "tokens", "waiting")

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.share = 1.0
        self.quantum = 0.0
        """Tokens of a turn."""
        self.credit = 0.0
        """Tokens left in this turn; negative after an overdraft."""
        self.waiting: OrderedDict[int, QueueEntry] = OrderedDict()
        """By sequence number, newest last."""
        self.tokens = 0
        self.heaps: dict[Hashable, LazyHeap] = {}
        """By constraints; no heap is empty."""

    def add(self, entry: QueueEntry) -> None:
        self.waiting[entry.sequence] = entry
        self.tokens += entry.tokens
        self.heaps.setdefault(entry.constraints, LazyHeap()).push(entry.sort_key, entry)

    def remove(self, entry: QueueEntry) -> None:
        del self.waiting[entry.sequence]
        self.tokens -= entry.tokens
        heap = self.heaps[entry.constraints]
        heap.note_removal()
        if not heap:
            del self.heaps[entry.constraints]

    def first_entry(self, blocked: Collection[Hashable]) -> QueueEntry | None:
        """First entry whose constraints are not blocked."""
        heads = [heap.first for constraints, heap in self.heaps.items() if constraints not in blocked]
        return min(heads)[2] if heads else None


class PriorityLevel:
    """Waiting requests of one priority; tenants in turn order."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._turns: OrderedDict[str | None, _Tenant] = OrderedDict()
        """Tenants with waiting requests or debts."""
        self._debtors: OrderedDict[str | None, None] = OrderedDict()
        """Tenants with debts only, the one that left first in front."""
        self._by_arrival: dict[Hashable, LazyHeap] = {}
        """Entries by constraints, oldest first; no heap is empty."""
        self.num_waiting = 0
        self.num_tokens = 0

    @property
    def constraints(self) -> Collection[Hashable]:
        return self._by_arrival.keys()

    def add(self, entry: QueueEntry) -> None:
        tenant = self._turns.get(entry.tenant)
        if tenant is None:
            tenant = self._turns[entry.tenant] = _Tenant(entry.tenant)
            tenant.credit = self._limits.quantum_tokens * entry.share
        tenant.share, tenant.quantum = entry.share, self._limits.quantum_tokens * entry.share
        self._debtors.pop(entry.tenant, None)
        tenant.add(entry)
        self._by_arrival.setdefault(entry.constraints, LazyHeap()).push(entry.arrived_at, entry)
        self.num_waiting += 1
        self.num_tokens += entry.tokens

    def remove(self, entry: QueueEntry) -> None:
        tenant = self._turns[entry.tenant]
        tenant.remove(entry)
        heap = self._by_arrival[entry.constraints]
        heap.note_removal()
        if not heap:
            del self._by_arrival[entry.constraints]
        self.num_waiting -= 1
        self.num_tokens -= entry.tokens
        if not tenant.waiting:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        """Drop a tenant without requests. Its unused credit is lost, its debt kept."""
        if tenant.credit > 0:
            del self._turns[tenant.name]
            return
        self._debtors[tenant.name] = None
        if len(self._debtors) > self._limits.max_debtors:
            first, _ = self._debtors.popitem(last=False)
            del self._turns[first]

    def charge(self, entry: QueueEntry) -> None:
        self._turns[entry.tenant].credit -= max(entry.tokens, 1)

    def next_entry(self, blocked: Collection[Hashable]) -> QueueEntry | None:
        """Entry of the tenant whose turn it is, if its constraints are not blocked.

        A tenant whose entries are all blocked keeps its turn: capacity that becomes free at the worker that it is
        pinned to must not have been taken by tenants behind it.
        """
        if all(constraints in blocked for constraints in self.constraints):
            return None
        turns = self._turns
        skipped: dict[str | None, None] = {}
        num_ended = 0
        while True:
            name, tenant = next(iter(turns.items()))
            if tenant.credit <= 0:  # turn over: the next one starts behind all others
                self._add_turns(tenant, 1)
                if name in turns:
                    turns.move_to_end(name)
                num_ended += 1
                if num_ended % len(turns) == 0:
                    self._skip_rounds(skipped)
                continue
            entry = tenant.first_entry(blocked)
            if entry is not None:
                break
            skipped[name] = None
            turns.move_to_end(name)
        for name in reversed(skipped):
            turns.move_to_end(name, last=False)
        return entry

    def _skip_rounds(self, blocked: Collection[str | None]) -> None:
        """Add the turns of all rounds in which every waiting tenant is in debt or blocked: there may be many after a
        large request."""
        indebted = [tenant for tenant in self._turns.values() if tenant.credit <= 0]
        waiting = [tenant for name, tenant in self._turns.items() if tenant.waiting and name not in blocked]
        rounds = min((int(max(-each.credit, 0.0) / each.quantum) for each in waiting), default=0)
        for tenant in indebted:
            self._add_turns(tenant, rounds)

    def _add_turns(self, tenant: _Tenant, count: int) -> None:
        tenant.credit += count * tenant.quantum
        if not tenant.waiting and tenant.credit > 0:
            del self._turns[tenant.name]
            self._debtors.pop(tenant.name)

    def oldest_arrival(self, blocked: Collection[Hashable]) -> float:
        """Arrival time of the oldest entry whose constraints are not blocked; infinity without one."""
        return min(
            (heap.first[0] for constraints, heap in self._by_arrival.items() if constraints not in blocked),
            default=math.inf,
        )

    def heaviest_tenant(self, incoming: QueueEntry | None) -> _Tenant | None:
        """Tenant with the most waiting tokens for its share; None if that is the tenant of `incoming`."""
        own_tenant = None
        max_tokens: float | None = None
        if incoming is not None:
            own_tenant = self._turns.get(incoming.tenant)
            own_tokens = own_tenant.tokens if own_tenant is not None else 0
            max_tokens = (incoming.tokens + own_tokens) / incoming.share
        heaviest: _Tenant | None = None
        for tenant in self._turns.values():
            if (
                tenant is not own_tenant
                and tenant.waiting
                and (max_tokens is None or tenant.tokens / tenant.share > max_tokens)
            ):
                heaviest, max_tokens = tenant, tenant.tokens / tenant.share
        return heaviest
