"""WaitingQueue: requests that no worker can take now, and whose turn it is. Pure.

Owns the order. The highest priority goes first, always. Within a priority tenants take turns by tokens (deficit round
robin): each turn is worth a quantum, who takes more than is left of it pays that back in turns to come, and a debt is
remembered for as long as others wait. Within a tenant the oldest goes first, or the one whose tokens less what it has
waited for are fewest: since all that wait get older alike, that order never changes while they do, and nobody can be
overtaken for ever.

Requests differ in who may take them: a pin, an adapter, workers that have failed them. That is their `kind`, and who
asks whose turn it is names the kinds that nobody can take now: those are passed over, and keep their places.

It is bounded in requests and in tokens. Beyond, the newest of the lowest priority is refused, of the tenant with the
most tokens there. A single request may have more tokens than the bound: it is never too large to wait alone.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

_COMPACT_FROM = 64
"""Below this many dead entries, sweeping a heap costs more than carrying them."""


class Order(StrEnum):
    """Within a tenant."""

    FCFS = "fcfs"
    SHORTEST = "shortest"
    """The fewest tokens first, less what has been waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    max_requests: int = 4096
    max_tokens: int = 16_777_216
    max_debtors: int = 1024
    """Tenants with nothing waiting whose debts are remembered; the first to have left is forgotten first."""
    quantum_tokens: int = 4096
    aging_tokens_per_s: float = 1000.0
    """In order of the shortest: how many tokens a second of waiting makes up for."""

    def __post_init__(self) -> None:
        if min(self.max_requests, self.max_tokens, self.quantum_tokens) < 1:
            raise ValueError("a queue needs room for one request, and turns that are worth something")


@dataclass(slots=True, eq=False)
class Waiting:
    """One request, from `push` until it is taken, removed, refused or expired."""

    tokens: int
    arrived_at: float
    tenant: str | None = None
    priority: int = 0
    kind: Hashable = None
    deadline: float = math.inf
    is_here: bool = field(default=False, init=False)
    """The queue's own; so is the rest."""
    number: int = field(default=0, init=False)
    rank: float = field(default=0.0, init=False)


class _Line:
    """Some that wait, in order. Who leaves from the middle is struck out when it comes to the front, or when more are
    struck out than are left."""

    __slots__ = ("_heap", "_num_here")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Waiting]] = []
        self._num_here = 0

    def __bool__(self) -> bool:
        return bool(self._num_here)

    def add(self, at: float, entry: Waiting) -> None:
        heapq.heappush(self._heap, (at, entry.number, entry))
        self._num_here += 1

    def drop(self) -> None:
        """One of them is here no more."""
        self._num_here -= 1
        heap = self._heap
        if len(heap) >= _COMPACT_FROM and len(heap) > 2 * self._num_here:
            heap[:] = [each for each in heap if each[2].is_here]
            heapq.heapify(heap)
        while heap and not heap[0][2].is_here:
            heapq.heappop(heap)

    @property
    def front(self) -> tuple[float, int, Waiting]:
        return self._heap[0]


class _Tenant:
    """What one tenant has waiting at one priority."""

    __slots__ = ("credit", "lines", "name", "tokens", "waiting")

    def __init__(self, name: str | None, credit: float) -> None:
        self.name = name
        self.credit = credit
        """Tokens that it may take in this turn; below zero it has taken more."""
        self.waiting: OrderedDict[int, Waiting] = OrderedDict()
        """By number: the newest last."""
        self.tokens = 0
        self.lines: dict[Hashable, _Line] = {}
        """By kind; none is empty."""

    def add(self, entry: Waiting) -> None:
        self.waiting[entry.number] = entry
        self.tokens += entry.tokens
        self.lines.setdefault(entry.kind, _Line()).add(entry.rank, entry)

    def drop(self, entry: Waiting) -> None:
        del self.waiting[entry.number]
        self.tokens -= entry.tokens
        line = self.lines[entry.kind]
        line.drop()
        if not line:
            del self.lines[entry.kind]

    def first(self, blocked: Collection[Hashable]) -> Waiting | None:
        """Of those whose kind is not blocked."""
        fronts = [line.front for kind, line in self.lines.items() if kind not in blocked]
        return min(fronts)[2] if fronts else None


class _Level:
    """One priority: its tenants in the order of their turns."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._turns: OrderedDict[str | None, _Tenant] = OrderedDict()
        """Those with something waiting, and those who only owe."""
        self._debtors: OrderedDict[str | None, None] = OrderedDict()
        """With nothing waiting, the first to have left first."""
        self.kinds: dict[Hashable, int] = {}

    def add(self, entry: Waiting) -> None:
        tenant = self._turns.get(entry.tenant)
        if tenant is None:
            tenant = self._turns[entry.tenant] = _Tenant(entry.tenant, self._limits.quantum_tokens)
        self._debtors.pop(entry.tenant, None)
        tenant.add(entry)
        _count(self.kinds, entry.kind, 1)

    def drop(self, entry: Waiting) -> None:
        tenant = self._turns[entry.tenant]
        tenant.drop(entry)
        _count(self.kinds, entry.kind, -1)
        if not tenant.waiting:
            self._leave(tenant)

    def _leave(self, tenant: _Tenant) -> None:
        """What is left of a turn is lost; a debt is not."""
        if tenant.credit > 0:
            del self._turns[tenant.name]
            return
        self._debtors[tenant.name] = None
        if len(self._debtors) > self._limits.max_debtors:
            first, _ = self._debtors.popitem(last=False)
            del self._turns[first]

    def charge(self, entry: Waiting) -> None:
        self._turns[entry.tenant].credit -= max(entry.tokens, 1)

    def next(self, blocked: Collection[Hashable]) -> Waiting | None:
        """Whose turn it is. Who has one and can only not go now keeps it: when the worker that it is pinned to has
        room, it must not find that those behind it have taken that as well."""
        if all(kind in blocked for kind in self.kinds):
            return None
        turns = self._turns
        passed: dict[str | None, None] = {}
        while True:
            name, tenant = next(iter(turns.items()))
            if tenant.credit <= 0:  # its turn is over; the next one begins behind all others
                tenant.credit += self._limits.quantum_tokens
                turns.move_to_end(name)
                if not tenant.waiting and tenant.credit > 0:
                    del turns[name]
                    self._debtors.pop(name)
                continue
            entry = tenant.first(blocked)
            if entry is not None:
                break
            passed[name] = None
            turns.move_to_end(name)
        for name in reversed(passed):
            turns.move_to_end(name, last=False)
        return entry

    def heaviest(self, asking: Waiting | None) -> _Tenant | None:
        """The tenant with the most tokens; None when that is whose request asks to come in."""
        own = most = None
        if asking is not None:
            own = self._turns.get(asking.tenant)
            most = asking.tokens + (own.tokens if own is not None else 0)
        heaviest: _Tenant | None = None
        for tenant in self._turns.values():
            if tenant is not own and tenant.waiting and (most is None or tenant.tokens > most):
                heaviest, most = tenant, tenant.tokens
        return heaviest


class WaitingQueue:
    """See the module. A change is O(log n) in what waits; only overflow looks at every tenant of a priority."""

    def __init__(self, limits: QueueLimits | None = None, order: Order = Order.FCFS) -> None:
        self.limits = limits or QueueLimits()
        self._order = order
        self._levels: dict[int, _Level] = {}
        self._priorities: list[int] = []
        """Of the levels, negated: the highest first."""
        self._kinds: dict[Hashable, int] = {}
        self._deadlines = _Line()
        self._num_pushed = 0
        self.num_waiting = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_waiting

    @property
    def num_kinds(self) -> int:
        return len(self._kinds)

    def push(self, entry: Waiting) -> list[Waiting]:
        """Let it wait; who is refused for want of room: none, some that waited, or itself."""
        refused: list[Waiting] = []
        while self._is_full(entry):
            victim = self._victim(entry)
            refused.append(victim)
            if victim is entry:
                return refused
            self._drop(victim)
        self._add(entry)
        return refused

    def next(self, blocked: Collection[Hashable] = ()) -> Waiting | None:
        """Whose turn it is, of those whose kind is not blocked; the same again until it is taken or something else
        changes. None only where no such one waits."""
        if all(kind in blocked for kind in self._kinds):
            return None
        for negated in self._priorities:
            entry = self._levels[-negated].next(blocked)
            if entry is not None:
                return entry
        return None

    def take(self, entry: Waiting) -> None:
        """It has found a worker: its tenant pays for it."""
        self._levels[entry.priority].charge(entry)
        self._drop(entry)

    def remove(self, entry: Waiting) -> bool:
        """It waits no longer, and nothing is paid; whether it did."""
        if not entry.is_here:
            return False
        self._drop(entry)
        return True

    def expire(self, now: float) -> list[Waiting]:
        """Those whose deadline has come; they wait no longer."""
        expired: list[Waiting] = []
        while (at := self.next_deadline) is not None and at <= now:
            entry = self._deadlines.front[2]
            self._drop(entry)
            expired.append(entry)
        return expired

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.front[0] if self._deadlines else None

    # ---

    def _is_full(self, entry: Waiting) -> bool:
        if not self.num_waiting:
            return False
        limits = self.limits
        return self.num_waiting >= limits.max_requests or self.num_tokens + entry.tokens > limits.max_tokens

    def _victim(self, entry: Waiting) -> Waiting:
        """The newest of the lowest priority, of the tenant with the most tokens there."""
        lowest = -self._priorities[-1]
        if entry.priority < lowest:
            return entry
        tenant = self._levels[lowest].heaviest(entry if entry.priority == lowest else None)
        return entry if tenant is None else tenant.waiting[next(reversed(tenant.waiting))]

    def _add(self, entry: Waiting) -> None:
        self._num_pushed += 1
        entry.number = self._num_pushed
        entry.is_here = True
        if self._order is Order.SHORTEST:
            entry.rank = entry.tokens + self.limits.aging_tokens_per_s * entry.arrived_at
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = _Level(self.limits)
            insort(self._priorities, -entry.priority)
        level.add(entry)
        _count(self._kinds, entry.kind, 1)
        self.num_waiting += 1
        self.num_tokens += entry.tokens
        if entry.deadline < math.inf:
            self._deadlines.add(entry.deadline, entry)

    def _drop(self, entry: Waiting) -> None:
        entry.is_here = False
        level = self._levels[entry.priority]
        level.drop(entry)
        if not level.kinds:  # nobody is kept waiting by what others owe
            del self._levels[entry.priority]
            del self._priorities[bisect_left(self._priorities, -entry.priority)]
        _count(self._kinds, entry.kind, -1)
        self.num_waiting -= 1
        self.num_tokens -= entry.tokens
        if entry.deadline < math.inf:
            self._deadlines.drop()


def _count(counts: dict[Hashable, int], key: Hashable, change: int) -> None:
    left = counts.get(key, 0) + change
    if left:
        counts[key] = left
    else:
        del counts[key]
