"""WaitingQueue: priorities, tenant turns, order within a tenant, constraints, overflow."""

from __future__ import annotations

import pytest

from kvolt.router.queue.priority_level import QueueEntry, QueueLimits
from kvolt.router.queue.waiting_queue import Order, WaitingQueue


def drained(queue: WaitingQueue) -> list[QueueEntry]:
    taken = []
    while (entry := queue.next_entry()) is not None:
        assert queue.next_entry() is entry, "asking changes nothing"
        queue.admit(entry)
        taken.append(entry)
    return taken


def test_first_come_first_served_within_a_priority() -> None:
    queue = WaitingQueue()
    low = [QueueEntry(100, float(at)) for at in range(3)]
    high = [QueueEntry(100, float(at), priority=5) for at in range(3, 5)]
    for entry in (*low, *high):
        assert queue.push(entry) == []
    assert (queue.num_waiting, queue.num_tokens, len(queue)) == (5, 500, 5)
    assert drained(queue) == [*high, *low]
    assert (queue.num_waiting, queue.num_tokens, len(queue._constraints), queue.next_entry()) == (
        0,
        0,
        0,
        None,
    )


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    many = [QueueEntry(100, 0.0, "small") for _ in range(40)]
    few = [QueueEntry(1000, 0.0, "large") for _ in range(4)]
    for entry in (*many, *few):
        queue.push(entry)
    order = [entry.tenant for entry in drained(queue)]
    assert order == (["small"] * 10 + ["large"]) * 4


def test_shares_are_of_tokens() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    for _ in range(40):
        queue.push(QueueEntry(500, 0.0, "double", share=2.0))
        queue.push(QueueEntry(500, 0.0, "single"))
    order = [entry.tenant for entry in drained(queue)]
    assert order[:60] == (["double"] * 4 + ["single"] * 2) * 10


def test_a_large_share_does_not_starve_a_small_one() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=100))
    for _ in range(1000):
        queue.push(QueueEntry(500, 0.0, "heavy", share=100.0))
    for _ in range(3):
        queue.push(QueueEntry(300, 0.0, "light", share=0.1))
    order = [entry.tenant for entry in drained(queue)]
    # First after one turn of 10,000 tokens; then its debt of 290 is paid back by 10 for each such turn.
    assert [number for number, tenant in enumerate(order) if tenant == "light"] == [
        20,
        20 + 30 * 20 + 1,
        1002,
    ]


def test_a_share_counts_where_the_queue_is_full() -> None:
    queue = WaitingQueue(QueueLimits(max_requests=4))
    heavy = [QueueEntry(100, 0.0, "heavy", share=4.0) for _ in range(3)]
    light = QueueEntry(100, 0.0, "light")
    for entry in (*heavy, light):
        assert queue.push(entry) == []
    assert queue.push(QueueEntry(10, 1.0, "heavy", share=4.0)) == [light]


def test_an_overdraft_is_paid_back() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    for entry in [QueueEntry(5000, 0.0, "large") for _ in range(2)] + [
        QueueEntry(500, 0.0, "small") for _ in range(20)
    ]:
        queue.push(entry)
    order = "".join(entry.tenant[0] if entry.tenant else "?" for entry in drained(queue))
    assert order == "l" + "s" * 10 + "l" + "s" * 10


def test_a_debt_is_not_left_behind_by_leaving() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    for _ in range(100):
        queue.push(QueueEntry(1000, 0.0, "steady"))
    served = {"steady": 0, "comes and goes": 0}
    last = QueueEntry(5000, 0.0, "comes and goes")
    queue.push(last)
    for _ in range(40):
        entry = queue.next_entry()
        assert entry is not None
        queue.admit(entry)
        assert entry.tenant is not None
        served[entry.tenant] += entry.tokens
        if not last.is_queued:  # it never has more than one waiting
            last = QueueEntry(5000, 0.0, "comes and goes")
            queue.push(last)
        assert abs(served["steady"] - served["comes and goes"]) <= 2 * 1000 + 5000


def test_debts_end_when_the_queue_is_empty() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=10))
    queue.push(QueueEntry(1000, 0.0, "a"))
    drained(queue)
    for tenant in ("a", "b"):
        queue.push(QueueEntry(10, 1.0, tenant))
    assert [entry.tenant for entry in drained(queue)] == ["a", "b"]


def test_debts_are_remembered_of_a_bounded_number_of_tenants() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=10, max_debtors=2))
    for tenant in "abc":
        queue.push(QueueEntry(1000, 0.0, tenant))
    queue.push(QueueEntry(5, 0.0, "z", constraints="pinned"))
    for tenant in "abc":
        entry = queue.next_entry({"pinned"})
        assert entry is not None
        assert entry.tenant == tenant
        queue.admit(entry)
    level = queue._levels[0]
    assert (list(level._debtors), set(level._turns)) == (["b", "c"], {"z", "b", "c"})


def test_shortest_first_with_aging() -> None:
    queue = WaitingQueue(QueueLimits(aging_tokens_per_s=100.0), Order.SHORTEST)
    long, short = QueueEntry(1000, 0.0), QueueEntry(10, 1.0)
    before, after = QueueEntry(10, 9.8), QueueEntry(10, 10.0)
    for entry in (after, long, before, short):
        queue.push(entry)
    assert drained(queue) == [short, before, long, after], "ten seconds make up for a thousand tokens"


def test_blocked_entries_are_skipped_and_keep_their_position() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=100))
    pinned = QueueEntry(100, 0.0, "a", constraints="pinned")
    queue.push(pinned)
    others = [QueueEntry(100, 1.0, tenant) for tenant in ("b", "b", "c", "b")]
    for other in others:
        queue.push(other)
    assert queue.next_entry({"pinned", None}) is None
    for tenant in ("b", "c", "b"):
        entry = queue.next_entry({"pinned"})
        assert entry is not None
        assert entry.tenant == tenant
        queue.admit(entry)
        assert queue.next_entry() is pinned, "its turn is not over"
    assert len(queue._constraints) == 2


def test_an_entry_is_removed_once() -> None:
    queue = WaitingQueue()
    entries = [QueueEntry(10, float(at), deadline=100.0) for at in range(200)]
    for entry in entries:
        queue.push(entry)
    for entry in entries[1:]:
        assert queue.remove(entry)
        assert not queue.remove(entry)
    line = queue._levels[0]._turns[None].heaps[None]
    assert len(line._heap) < 64, "what is gone is swept away"
    assert (queue.num_waiting, queue.num_tokens) == (1, 10)
    assert drained(queue) == entries[:1]
    assert not queue.remove(entries[0])


def test_deadlines() -> None:
    queue = WaitingQueue()
    late, early, never = (
        QueueEntry(1, 0.0, deadline=9.0),
        QueueEntry(1, 0.0, deadline=3.0),
        QueueEntry(1, 0.0),
    )
    for entry in (late, early, never):
        queue.push(entry)
    assert queue.next_deadline == 3.0
    assert queue.expire(2.9) == []
    assert queue.expire(3.0) == [early]
    assert queue.next_deadline == 9.0
    queue.remove(late)
    assert queue.next_deadline is None
    assert queue.expire(1e9) == []
    assert queue.num_waiting == 1


# --- overflow


def test_when_full_the_newest_of_the_lowest_priority_is_refused() -> None:
    queue = WaitingQueue(QueueLimits(max_requests=3))
    first, second, third = (QueueEntry(10, float(at), priority=at % 2) for at in range(3))
    for entry in (first, second, third):
        assert queue.push(entry) == []
    fourth = QueueEntry(10, 3.0)
    assert queue.push(fourth) == [fourth], "itself, since it is the newest"
    assert not fourth.is_queued
    urgent = QueueEntry(10, 4.0, priority=1)
    assert queue.push(urgent) == [third]
    lowest = QueueEntry(10, 5.0, priority=-1)
    assert queue.push(lowest) == [lowest]
    assert drained(queue) == [second, urgent, first]


def test_overflow_refuses_the_tenant_with_the_most_tokens() -> None:
    queue = WaitingQueue(QueueLimits(max_requests=4))
    flood = [QueueEntry(10, float(at), "flood") for at in range(4)]
    for entry in flood:
        queue.push(entry)
    polite = QueueEntry(20, 4.0, "polite")
    assert queue.push(polite) == [flood[3]]
    more = QueueEntry(10, 5.0, "flood")
    assert queue.push(more) == [more]
    equal = QueueEntry(10, 6.0, "polite")
    assert queue.push(equal) == [equal], "it would have as many as they have"


def test_tokens_are_bounded_too_but_nothing_is_too_large_to_wait_alone() -> None:
    queue = WaitingQueue(QueueLimits(max_tokens=100))
    huge = QueueEntry(1000, 0.0)
    assert queue.push(huge) == []
    small = QueueEntry(1, 1.0)
    assert queue.push(small) == [small]
    queue.remove(huge)
    several = [QueueEntry(30, float(at)) for at in range(3)]
    for entry in several:
        assert queue.push(entry) == []
    urgent = QueueEntry(50, 9.0, priority=1)
    assert queue.push(urgent) == [several[2], several[1]], "as many as it needs"
    assert (queue.num_waiting, queue.num_tokens) == (2, 80)


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        QueueLimits(quantum_tokens=0)
