"""The waiting queue under random operations: bounded, fair, no entry lost or returned twice."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvolt.router.queue.priority_level import QueueEntry, QueueLimits
from kvolt.router.queue.waiting_queue import KEPT_ONE_IN, PROMOTED_ONE_IN, Order, WaitingQueue

KINDS = (None, "pinned", "adapter")
TENANTS = (None, "a", "b", "c")
picks = st.integers(0, 1000)
blockings = st.sets(st.sampled_from(KINDS))


class Queues(RuleBasedStateMachine):
    @initialize(order=st.sampled_from(Order), max_requests=st.integers(1, 12))
    def start(self, order: Order, max_requests: int) -> None:
        self.limits = QueueLimits(
            max_requests=max_requests,
            max_tokens=1000,
            max_debtors=2,
            quantum_tokens=50,
            aging_tokens_per_s=10.0,
        )
        self.order = order
        self.queue = WaitingQueue(self.limits, order)
        self.waiting: list[QueueEntry] = []
        self.now = 0.0

    @rule(
        tokens=st.integers(0, 400),
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-1, 1),
        constraints=st.sampled_from(KINDS),
        patience=st.none() | st.integers(0, 20),
    )
    def push(
        self, tokens: int, tenant: str | None, priority: int, constraints: str | None, patience: int | None
    ) -> None:
        deadline = float("inf") if patience is None else self.now + patience
        entry = QueueEntry(tokens, self.now, tenant, priority, constraints, deadline)
        before = [*self.waiting, entry]
        refused = self.queue.push(entry)
        lowest = self._priority_to_evict(before)
        self.waiting = [each for each in before if each not in refused]
        assert len(set(map(id, refused))) == len(refused)
        for victim in refused:
            assert victim in before
            assert not victim.is_queued
        if refused:
            assert refused[0].priority == lowest
            first_out = [
                each for each in before if (each.priority, each.tenant) == (lowest, refused[0].tenant)
            ]
            assert refused[0] is first_out[-1], "the newest"

    def _priority_to_evict(self, before: list[QueueEntry]) -> int:
        """The lowest priority of which more is here than is kept for it and those below."""
        most = self.limits.max_requests // KEPT_ONE_IN, self.limits.max_tokens // KEPT_ONE_IN
        for priority in sorted({each.priority for each in before}):
            below = [each for each in before if each.priority <= priority]
            if len(below) > most[0] or sum(each.tokens for each in below) > most[1]:
                break
        return priority

    @precondition(lambda self: self.waiting)
    @rule(number=picks)
    def leave(self, number: int) -> None:
        entry = self.waiting.pop(number % len(self.waiting))
        assert self.queue.remove(entry)
        assert not self.queue.remove(entry)

    @rule(blocked=blockings, is_timed=st.booleans())
    def take(self, blocked: set[str | None], is_timed: bool) -> None:
        able = [each for each in self.waiting if each.constraints not in blocked]
        entry = self.queue.next_entry(blocked, self.now) if is_timed else self.queue.next_entry(blocked)
        if entry is None:
            assert not able, "work conserving"
            return
        assert entry in able
        highest = max(each.priority for each in able)
        if entry.priority < highest:
            assert is_timed
            own = [each for each in able if each.priority == entry.priority]
            assert max(self.now - each.arrived_at for each in own) >= self.limits.promote_s
        peers = [each for each in able if (each.priority, each.tenant) == (entry.priority, entry.tenant)]
        assert entry is min(peers, key=self._rank)
        self.queue.admit(entry)
        self.waiting.remove(entry)

    def _rank(self, entry: QueueEntry) -> tuple[float, int]:
        if self.order is Order.FCFS:
            return 0.0, entry.sequence
        return entry.tokens - self.limits.aging_tokens_per_s * (self.now - entry.arrived_at), entry.sequence

    @rule(seconds=st.integers(0, 10))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        expired = self.queue.expire(self.now)
        due = [each for each in self.waiting if each.deadline <= self.now]
        assert sorted(map(id, expired)) == sorted(map(id, due))
        self.waiting = [each for each in self.waiting if each not in expired]

    @invariant()
    def counts_hold(self) -> None:
        queue, waiting = self.queue, self.waiting
        assert (queue.num_waiting, queue.num_tokens) == (len(waiting), sum(each.tokens for each in waiting))
        assert all(each.is_queued for each in waiting)
        assert queue.num_waiting <= self.limits.max_requests
        assert queue.num_tokens <= self.limits.max_tokens or queue.num_waiting == 1
        assert len(queue._constraints) == len({each.constraints for each in waiting})
        assert queue.next_deadline == min(
            (each.deadline for each in waiting if each.deadline < float("inf")), default=None
        )
        assert sorted(queue._levels) == sorted({each.priority for each in waiting})
        for level in queue._levels.values():
            assert len(level._debtors) <= self.limits.max_debtors


TestQueues = Queues.TestCase


@given(
    sizes=st.lists(st.lists(st.integers(1, 300), min_size=30, max_size=30), min_size=2, max_size=4),
    quantum=st.integers(1, 200),
    shares=st.lists(st.sampled_from([0.1, 0.5, 1.0, 2.0, 7.0]), min_size=4, max_size=4),
)
def test_tenants_that_wait_all_the_time_get_their_shares_within_a_turn(
    sizes: list[list[int]], quantum: int, shares: list[float]
) -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=quantum))
    for tenant, tokens in enumerate(sizes):
        for each in tokens:
            queue.push(QueueEntry(each, 0.0, str(tenant), share=shares[tenant]))
    left = Counter({str(tenant): len(tokens) for tenant, tokens in enumerate(sizes)})
    served: Counter[str] = Counter({str(tenant): 0 for tenant in range(len(sizes))})
    largest = max(map(max, sizes))
    while min(left.values()) > 0:
        entry = queue.next_entry()
        assert entry is not None
        assert entry.tenant is not None
        queue.admit(entry)
        served[entry.tenant] += entry.tokens
        left[entry.tenant] -= 1
        # A request cannot be divided: beside a turn it is the largest that makes the difference.
        rounds = {tenant: tokens / shares[int(tenant)] for tenant, tokens in served.items()}
        slack = {tenant: largest / shares[int(tenant)] for tenant in rounds}
        for tenant, other in permutations(rounds, 2):
            assert rounds[tenant] - rounds[other] <= 2 * quantum + slack[tenant] + 1e-6


@given(
    arrivals=st.lists(
        st.tuples(st.integers(0, 200), st.integers(-(2**31), 2**31 - 2), st.sampled_from(TENANTS)),
        min_size=1,
        max_size=8,
    ),
    order=st.sampled_from(Order),
    flood=st.integers(1, 3),
)
def test_no_priority_waits_longer_than_the_bound_under_a_flood_of_the_highest(
    arrivals: list[tuple[int, int, str | None]], order: Order, flood: int
) -> None:
    """One request leaves every 0.1 s, and at least as many of the highest priority arrive."""
    limits = QueueLimits(max_requests=64, promote_s=5.0)
    queue = WaitingQueue(limits, order)
    low: list[QueueEntry] = []
    served: dict[int, float] = {}
    for tick in range(400):
        now = tick / 10.0
        for at, priority, tenant in arrivals:
            if at == tick:
                low.append(QueueEntry(10, now, tenant, priority))
                assert low[-1] not in queue.push(low[-1]), "an eighth of the room is theirs"
        for _ in range(flood):
            assert not set(map(id, queue.push(QueueEntry(10, now, priority=2**31 - 1)))) & set(map(id, low))
        entry = queue.next_entry((), now)
        assert entry is not None
        queue.admit(entry)
        served[entry.sequence] = now
    for each in low:
        ahead = sum(other.arrived_at <= each.arrived_at for other in low)
        bound_s = limits.promote_s + 0.1 * PROMOTED_ONE_IN * ahead
        assert served[each.sequence] - each.arrived_at <= bound_s + 0.1


@given(st.integers(0, 200))
def test_a_backlog_of_low_priority_costs_the_high_one_its_share_only(num_low: int) -> None:
    queue = WaitingQueue(QueueLimits(promote_s=0.0))
    for _ in range(num_low):
        queue.push(QueueEntry(10, 0.0))
    high = [QueueEntry(10, 1.0, priority=1) for _ in range(70)]
    for each in high:
        queue.push(each)
    num_taken = num_high = 0
    while num_high < len(high):
        entry = queue.next_entry((), 2.0)
        assert entry is not None
        queue.admit(entry)
        num_taken += 1
        num_high += entry.priority
    assert num_taken == 70 + min(num_low, 69 // (PROMOTED_ONE_IN - 1))
