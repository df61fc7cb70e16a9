"""WaitingQueue: requests that no worker can take now, and whose turn it is. Pure.

Owns the order. The highest priority goes first, and within a priority the tenant whose turn it is (`queue_level`).
Within a tenant the oldest goes first, or the one whose tokens less what it has waited for are fewest: since all that
wait get older alike, that order never changes while they do, and no request can be overtaken for ever.

Priorities age. Once a request has waited for `promote_s`, one of every `PROMOTED_ONE_IN` that leave the queue comes
from a priority below the highest: from the one whose oldest request is the oldest. So the oldest of those below waits
for that time and `PROMOTED_ONE_IN` others at most, and a backlog of low priority takes only that share from the high.

Requests differ in who may take them: a pin, an adapter, workers that have failed them. That is their `kind`, and who
asks whose turn it is names the kinds that nobody can take now: those are passed over, and keep their places.

It is bounded in requests and in tokens. Beyond, the newest of the lowest priority is refused, of the tenant with the
most tokens there; but lower priorities keep 1 / `KEPT_ONE_IN` of the room, so that a flood of a high one does not push
them out. A single request may have more tokens than the bound: it is never too large to wait alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Hashable
from enum import StrEnum

from kvolt.router.queue.priority_level import Level, Line, QueueLimits, Waiting

__all__ = ["KEPT_ONE_IN", "PROMOTED_ONE_IN", "Order", "QueueLimits", "Waiting", "WaitingQueue"]

PROMOTED_ONE_IN = 8
KEPT_ONE_IN = 8


class Order(StrEnum):
    """Within a tenant."""

    FCFS = "fcfs"
    SHORTEST = "shortest"
    """The fewest tokens first, less what has been waited for."""


class WaitingQueue:
    """See the module. A change is O(log n) in what waits; only overflow looks at every tenant of a priority."""

    def __init__(self, limits: QueueLimits | None = None, order: Order = Order.FCFS) -> None:
        self.limits = limits or QueueLimits()
        self._order = order
        self._levels: dict[int, Level] = {}
        self._priorities: list[int] = []
        """Of the levels, negated: the highest first."""
        self._kinds: dict[Hashable, int] = {}
        self._deadlines = Line()
        self._num_pushed = 0
        self._num_before_lower = 0
        """Taken of the highest priority since one of a lower was, or none of a lower waited."""
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

    def next(self, blocked: Collection[Hashable] = (), now: float = -math.inf) -> Waiting | None:
        """Whose turn it is, of those whose kind is not blocked; the same again until it is taken, something else
        changes or a request has waited for long. None only where no such one waits."""
        if all(kind in blocked for kind in self._kinds):
            return None
        if self._num_before_lower >= PROMOTED_ONE_IN - 1:
            level = self._promoted(blocked, now)
            if level is not None:
                return level.next(blocked)
        for negated in self._priorities:
            entry = self._levels[-negated].next(blocked)
            if entry is not None:
                return entry
        return None

    def _promoted(self, blocked: Collection[Hashable], now: float) -> Level | None:
        """The level below the highest with the oldest that has waited for long."""
        lower = [self._levels[-negated] for negated in self._priorities[1:]]
        oldest = min(lower, key=lambda level: level.oldest_at(blocked), default=None)
        if oldest is None or oldest.oldest_at(blocked) + self.limits.promote_s > now:
            return None
        return oldest

    def take(self, entry: Waiting) -> None:
        """It has found a worker: its tenant pays for it."""
        is_highest = -entry.priority == self._priorities[0]
        has_lower = len(self._priorities) > 1
        self._num_before_lower = self._num_before_lower + 1 if is_highest and has_lower else 0
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
        """The newest of the lowest priority that has more than is kept for it, of the tenant with the most tokens."""
        priority = self._lowest_to_go(entry)
        level = self._levels.get(priority)
        tenant = None if level is None else level.heaviest(entry if entry.priority == priority else None)
        return entry if tenant is None else tenant.waiting[next(reversed(tenant.waiting))]

    def _lowest_to_go(self, entry: Waiting) -> int:
        """The lowest priority that has, with those below it and what asks to come in, more than is kept for them."""
        most_requests = self.limits.max_requests // KEPT_ONE_IN
        most_tokens = self.limits.max_tokens // KEPT_ONE_IN
        num_requests = num_tokens = 0
        priorities = sorted({entry.priority, *self._levels})
        for priority in priorities:
            if (level := self._levels.get(priority)) is not None:
                num_requests += level.num_waiting
                num_tokens += level.num_tokens
            if priority == entry.priority:
                num_requests += 1
                num_tokens += entry.tokens
            if num_requests > most_requests or num_tokens > most_tokens:
                return priority
        return priorities[-1]

    def _add(self, entry: Waiting) -> None:
        self._num_pushed += 1
        entry.number = self._num_pushed
        entry.is_here = True
        if self._order is Order.SHORTEST:
            entry.rank = entry.tokens + self.limits.aging_tokens_per_s * entry.arrived_at
        level = self._levels.get(entry.priority)
        if level is None:
            level = self._levels[entry.priority] = Level(self.limits)
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
        if not level.num_waiting:  # no request waits for what others owe
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
