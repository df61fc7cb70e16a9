"""WaitingQueue: order and bounds of requests that no worker can take now. Pure.

Order: the highest priority first; within a priority the tenant whose turn it is (`priority_level`); within a tenant
the oldest request, or with `shortest` the one with the fewest tokens minus an aging credit. All requests age alike, so
their order is fixed at arrival and none starves.

Priorities age. Once a request has waited `promote_s`, one of every `PROMOTED_ONE_IN` admissions comes from a lower
priority: the one whose oldest request is the oldest. This bounds the wait of that request, and the share that a
backlog of low priority takes from the highest.

Requests differ in the workers that may take them (pin, adapter, excluded workers): their `constraints`. The caller
names the constraints that are blocked now; entries with those are skipped and keep their position.

Bounded in requests and tokens. On overflow the newest request of the lowest priority is refused, from the tenant with
the most tokens there; the lower priorities keep 1 / `KEPT_ONE_IN` of the queue, so that a flood of high priority does
not displace them. A request with more tokens than the bound may wait alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from kvolt.router.queue.priority_level import LazyHeap, PriorityLevel, QueueEntry, QueueLimits
from kvolt.runtime.histogram import Histogram

PROMOTED_ONE_IN = 8
KEPT_ONE_IN = 8
_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_HALF_LIFE_S = 5.0
MAX_DRAIN_S = 60.0
"""Upper bound of a predicted drain time: a recent rate does not predict longer times."""


class Order(StrEnum):
    """Order within a tenant."""

    FCFS = "fcfs"
    SHORTEST = "shortest"
    """Fewest tokens first, minus an aging credit."""


class WaitingQueue:
    """See the module. Changes are O(log n) in the waiting requests; overflow visits every tenant of a priority."""

    def __init__(self, limits: QueueLimits | None = None, order: Order = Order.FCFS) -> None:
        self.limits = limits or QueueLimits()
        self._order = order
        self._levels: dict[int, PriorityLevel] = {}
        self._priorities: list[int] = []
        """Negated priorities of the levels, highest first."""
        self._constraints: dict[Hashable, int] = {}
        self._deadlines = LazyHeap()
        self._num_pushed = 0
        self._num_before_lower = 0
        """Admissions from the highest priority since the last one from a lower priority, while lower ones wait."""
        self.num_waiting = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self.num_waiting

    def push(self, entry: QueueEntry) -> list[QueueEntry]:
        """Add a request. Returns the refused requests: none, some that waited, or the request itself."""
        refused: list[QueueEntry] = []
        while self._is_full(entry):
            victim = self._victim(entry)
            refused.append(victim)
            if victim is entry:
                return refused
            self._drop(victim)
        self._add(entry)
        return refused

    def next_entry(self, blocked: Collection[Hashable] = (), now: float = -math.inf) -> QueueEntry | None:
        """Next entry whose constraints are not blocked; None if there is none. Stable until a change or a promotion."""
        if all(constraints in blocked for constraints in self._constraints):
            return None
        if self._num_before_lower >= PROMOTED_ONE_IN - 1:
            level = self._promoted(blocked, now)
            if level is not None:
                return level.next_entry(blocked)
        for negated in self._priorities:
            entry = self._levels[-negated].next_entry(blocked)
            if entry is not None:
                return entry
        return None

    def _promoted(self, blocked: Collection[Hashable], now: float) -> PriorityLevel | None:
        """Lower level with the oldest entry, if that has waited `promote_s`."""
        lower = [self._levels[-negated] for negated in self._priorities[1:]]
        oldest = min(lower, key=lambda level: level.oldest_arrival(blocked), default=None)
        if oldest is None or oldest.oldest_arrival(blocked) + self.limits.promote_s > now:
            return None
        return oldest

    def admit(self, entry: QueueEntry) -> None:
        """Remove a routed entry and charge its tenant."""
        is_highest = -entry.priority == self._priorities[0]
        has_lower = len(self._priorities) > 1
        self._num_before_lower = self._num_before_lower + 1 if is_highest and has_lower else 0
        self._levels[entry.priority].charge(entry)
        self._drop(entry)

    def remove(self, entry: QueueEntry) -> bool:
        """Remove an entry without a charge; return whether it was queued."""
        if not entry.is_queued:
            return False
        self._drop(entry)
        return True

    def expire(self, now: float) -> list[QueueEntry]:
        """Remove and return the entries whose deadline has passed."""
        expired: list[QueueEntry] = []
        while (at := self.next_deadline) is not None and at <= now:
            entry = self._deadlines.first[2]
            self._drop(entry)
            expired.append(entry)
        return expired

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines.first[0] if self._deadlines else None

    # ---

    def _is_full(self, entry: QueueEntry) -> bool:
        if not self.num_waiting:
            return False
        limits = self.limits
        return self.num_waiting >= limits.max_requests or self.num_tokens + entry.tokens > limits.max_tokens

    def _victim(self, entry: QueueEntry) -> QueueEntry:
        """Newest entry of the heaviest tenant in the lowest priority above its guaranteed share."""
        priority = self._priority_to_evict(entry)
        level = self._levels.get(priority)
        tenant = (
            None if level is None else level.heaviest_tenant(entry if entry.priority == priority else None)
        )
        return entry if tenant is None else tenant.waiting[next(reversed(tenant.waiting))]

    def _priority_to_evict(self, entry: QueueEntry) -> int:
        """Lowest priority that exceeds the guaranteed share together with those below it and `entry`."""
        kept_requests = self.limits.max_requests // KEPT_ONE_IN
        kept_tokens = self.limits.max_tokens // KEPT_ONE_IN
        num_requests = num_tokens = 0
        priorities = sorted({entry.priority, *self._levels})
        for priority in priorities:
            if (level := self._levels.get(priority)) is not None:
                num_requests += level.num_waiting
                num_tokens += level.num_tokens
            if priority == entry.priority:
                num_requests += 1
                num_tokens += entry.tokens
            if num_requests > kept_requests or num_tokens > kept_tokens:
                return priority
        return priorities[-1]

    def _add(self, entry: QueueEntry) -> None:
        self._num_pushed += 1
        entry.sequence = self._num_pushed
        entry.is_queued = True
        if self._order is Order.SHORTEST:
            entry.sort_key = entry.tokens + self.limits.aging_tokens_per_s * entry.arrived_at
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = PriorityLevel(self.limits)
            insort(self._priorities, -entry.priority)
        level.add(entry)
        _count(self._constraints, entry.constraints, 1)
        self.num_waiting += 1
        self.num_tokens += entry.tokens
        if entry.deadline < math.inf:
            self._deadlines.push(entry.deadline, entry)

    def _drop(self, entry: QueueEntry) -> None:
        entry.is_queued = False
        level = self._levels[entry.priority]
        level.remove(entry)
        if not level.num_waiting:  # debts matter only while other tenants wait
            del self._levels[entry.priority]
            del self._priorities[bisect_left(self._priorities, -entry.priority)]
        _count(self._constraints, entry.constraints, -1)
        self.num_waiting -= 1
        self.num_tokens -= entry.tokens
        if entry.deadline < math.inf:
            self._deadlines.note_removal()


def _count(counts: dict[Hashable, int], key: Hashable, change: int) -> None:
    count = counts.get(key, 0) + change
    if count:
        counts[key] = count
    else:
        del counts[key]


@dataclass(slots=True)
class QueueStats:
    """Counters of one router's queue, for metrics."""

    num_immediate: int = 0
    """Requests routed without waiting."""
    waits_s: Histogram = field(default_factory=lambda: Histogram(_WAITS_S))
    """Waiting time of requests that were routed."""
    refused: Counter[str] = field(default_factory=Counter)
    """Requests not routed, by reason: full, displaced, deadline, cancelled, or an error code."""
    num_withdrawals: int = 0
    """Requests withdrawn from a worker and sent to another."""


class DrainRate:
    """Tokens per second that leave the queue, exponentially decayed."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._at: float | None = None
        self._since = 0.0

    def record(self, tokens: int, now: float) -> None:
        if self._at is None:
            self._since = now
        self._tokens = self._decayed(now) + tokens
        self._at = now

    def drain_time_s(self, tokens: int, now: float) -> float:
        """Predicted time until this many tokens have left the queue; 0 if none has left yet."""
        if self._at is None:
            return 0.0
        # Shortly after the start only part of the averaging window has passed.
        weight_s = _HALF_LIFE_S / math.log(2) * (1.0 - math.exp2(-max(now - self._since, 0.1) / _HALF_LIFE_S))
        decayed_tokens = self._decayed(now)
        return min(tokens * weight_s / decayed_tokens, MAX_DRAIN_S) if decayed_tokens > 0.0 else MAX_DRAIN_S

    def _decayed(self, now: float) -> float:
        if self._at is None:
            return 0.0
        return self._tokens * math.exp2((self._at - now) / _HALF_LIFE_S)
