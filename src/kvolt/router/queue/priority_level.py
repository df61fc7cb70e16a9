"""Requests that wait at one priority, and whose turn it is among them. Pure.

Tenants take turns by tokens (deficit round robin): each turn is worth a quantum, who takes more than is left of it pays
that back in turns to come, and a debt is remembered for as long as others wait. Within a tenant the lowest `rank` goes
first, of several the oldest.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

_COMPACT_FROM = 64
"""Below this many dead entries, sweeping a heap costs more than carrying them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLimits:
    max_requests: int = 4096
    max_tokens: int = 16_777_216
    max_debtors: int = 1024
    """Tenants with nothing waiting whose debts are remembered; the first to have left is forgotten first."""
    quantum_tokens: int = 4096
    aging_tokens_per_s: float = 1000.0
    """In order of the shortest: how many tokens a second of waiting makes up for."""
    promote_s: float = 10.0
    """After so long a request has its share whatever waits with a higher priority."""

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


class Line:
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
        self.lines: dict[Hashable, Line] = {}
        """By kind; none is empty."""

    def add(self, entry: Waiting) -> None:
        self.waiting[entry.number] = entry
        self.tokens += entry.tokens
        self.lines.setdefault(entry.kind, Line()).add(entry.rank, entry)

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


class Level:
    """One priority: its tenants in the order of their turns."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._turns: OrderedDict[str | None, _Tenant] = OrderedDict()
        """Those with something waiting, and those who only owe."""
        self._debtors: OrderedDict[str | None, None] = OrderedDict()
        """With nothing waiting, the first to have left first."""
        self._by_age: dict[Hashable, Line] = {}
        """By kind, the oldest first; none is empty."""
        self.num_waiting = 0
        self.num_tokens = 0

    @property
    def kinds(self) -> Collection[Hashable]:
        return self._by_age.keys()

    def add(self, entry: Waiting) -> None:
        tenant = self._turns.get(entry.tenant)
        if tenant is None:
            tenant = self._turns[entry.tenant] = _Tenant(entry.tenant, self._limits.quantum_tokens)
        self._debtors.pop(entry.tenant, None)
        tenant.add(entry)
        self._by_age.setdefault(entry.kind, Line()).add(entry.arrived_at, entry)
        self.num_waiting += 1
        self.num_tokens += entry.tokens

    def drop(self, entry: Waiting) -> None:
        tenant = self._turns[entry.tenant]
        tenant.drop(entry)
        line = self._by_age[entry.kind]
        line.drop()
        if not line:
            del self._by_age[entry.kind]
        self.num_waiting -= 1
        self.num_tokens -= entry.tokens
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

    def oldest_at(self, blocked: Collection[Hashable]) -> float:
        """When the oldest arrived, of those whose kind is not blocked; infinite where there is none."""
        return min(
            (line.front[0] for kind, line in self._by_age.items() if kind not in blocked), default=math.inf
        )

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
