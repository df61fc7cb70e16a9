"""Whose turn it is: priorities, turns of tenants, order within a tenant, kinds that cannot go, who is refused."""

from __future__ import annotations

import pytest

from kvolt.router.queue.waiting_queue import Order, QueueLimits, Waiting, WaitingQueue


def drained(queue: WaitingQueue) -> list[Waiting]:
    taken = []
    while (entry := queue.next()) is not None:
        assert queue.next() is entry, "asking changes nothing"
        queue.take(entry)
        taken.append(entry)
    return taken


def test_the_first_to_come_goes_first_and_higher_priorities_before_all() -> None:
    queue = WaitingQueue()
    low = [Waiting(100, float(at)) for at in range(3)]
    high = [Waiting(100, float(at), priority=5) for at in range(3, 5)]
    for entry in (*low, *high):
        assert queue.push(entry) == []
    assert (queue.num_waiting, queue.num_tokens, len(queue)) == (5, 500, 5)
    assert drained(queue) == [*high, *low]
    assert (queue.num_waiting, queue.num_tokens, queue.num_kinds, queue.next()) == (0, 0, 0, None)


def test_tenants_take_turns_by_tokens_and_not_by_requests() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    many = [Waiting(100, 0.0, "small") for _ in range(40)]
    few = [Waiting(1000, 0.0, "large") for _ in range(4)]
    for entry in (*many, *few):
        queue.push(entry)
    order = [entry.tenant for entry in drained(queue)]
    assert order == (["small"] * 10 + ["large"]) * 4


def test_who_takes_more_than_a_turn_pays_it_back() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    for entry in [Waiting(5000, 0.0, "large") for _ in range(2)] + [
        Waiting(500, 0.0, "small") for _ in range(20)
    ]:
        queue.push(entry)
    order = "".join(entry.tenant[0] if entry.tenant else "?" for entry in drained(queue))
    assert order == "l" + "s" * 10 + "l" + "s" * 10


def test_a_debt_is_not_left_behind_by_leaving() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=1000))
    for _ in range(100):
        queue.push(Waiting(1000, 0.0, "steady"))
    served = {"steady": 0, "comes and goes": 0}
    last = Waiting(5000, 0.0, "comes and goes")
    queue.push(last)
    for _ in range(40):
        entry = queue.next()
        assert entry is not None
        queue.take(entry)
        assert entry.tenant is not None
        served[entry.tenant] += entry.tokens
        if not last.is_here:  # it never has more than one waiting
            last = Waiting(5000, 0.0, "comes and goes")
            queue.push(last)
        assert abs(served["steady"] - served["comes and goes"]) <= 2 * 1000 + 5000


def test_nobody_owes_anything_once_nobody_waits() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=10))
    queue.push(Waiting(1000, 0.0, "a"))
    drained(queue)
    for tenant in ("a", "b"):
        queue.push(Waiting(10, 1.0, tenant))
    assert [entry.tenant for entry in drained(queue)] == ["a", "b"]


def test_debts_are_remembered_of_a_bounded_number_of_tenants() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=10, max_debtors=2))
    for tenant in "abc":
        queue.push(Waiting(1000, 0.0, tenant))
    queue.push(Waiting(5, 0.0, "z", kind="pinned"))
    for tenant in "abc":
        entry = queue.next({"pinned"})
        assert entry is not None
        assert entry.tenant == tenant
        queue.take(entry)
    level = queue._levels[0]
    assert (list(level._debtors), set(level._turns)) == (["b", "c"], {"z", "b", "c"})


def test_the_shortest_goes_first_less_what_it_has_waited_for() -> None:
    queue = WaitingQueue(QueueLimits(aging_tokens_per_s=100.0), Order.SHORTEST)
    long, short = Waiting(1000, 0.0), Waiting(10, 1.0)
    before, after = Waiting(10, 9.8), Waiting(10, 10.0)
    for entry in (after, long, before, short):
        queue.push(entry)
    assert drained(queue) == [short, before, long, after], "ten seconds make up for a thousand tokens"


def test_what_cannot_go_is_passed_over_and_keeps_its_place() -> None:
    queue = WaitingQueue(QueueLimits(quantum_tokens=100))
    pinned = Waiting(100, 0.0, "a", kind="pinned")
    queue.push(pinned)
    others = [Waiting(100, 1.0, tenant) for tenant in ("b", "b", "c", "b")]
    for other in others:
        queue.push(other)
    assert queue.next({"pinned", None}) is None
    for tenant in ("b", "c", "b"):
        entry = queue.next({"pinned"})
        assert entry is not None
        assert entry.tenant == tenant
        queue.take(entry)
        assert queue.next() is pinned, "its turn is not over"
    assert queue.num_kinds == 2


def test_who_leaves_does_so_once() -> None:
    queue = WaitingQueue()
    entries = [Waiting(10, float(at), deadline=100.0) for at in range(200)]
    for entry in entries:
        queue.push(entry)
    for entry in entries[1:]:
        assert queue.remove(entry)
        assert not queue.remove(entry)
    line = queue._levels[0]._turns[None].lines[None]
    assert len(line._heap) < 64, "what is gone is swept away"
    assert (queue.num_waiting, queue.num_tokens) == (1, 10)
    assert drained(queue) == entries[:1]
    assert not queue.remove(entries[0])


def test_deadlines() -> None:
    queue = WaitingQueue()
    late, early, never = Waiting(1, 0.0, deadline=9.0), Waiting(1, 0.0, deadline=3.0), Waiting(1, 0.0)
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
    first, second, third = (Waiting(10, float(at), priority=at % 2) for at in range(3))
    for entry in (first, second, third):
        assert queue.push(entry) == []
    fourth = Waiting(10, 3.0)
    assert queue.push(fourth) == [fourth], "itself, since it is the newest"
    assert not fourth.is_here
    urgent = Waiting(10, 4.0, priority=1)
    assert queue.push(urgent) == [third]
    lowest = Waiting(10, 5.0, priority=-1)
    assert queue.push(lowest) == [lowest]
    assert drained(queue) == [second, urgent, first]


def test_when_full_it_is_the_tenant_with_the_most_tokens_who_makes_room() -> None:
    queue = WaitingQueue(QueueLimits(max_requests=4))
    flood = [Waiting(10, float(at), "flood") for at in range(4)]
    for entry in flood:
        queue.push(entry)
    polite = Waiting(20, 4.0, "polite")
    assert queue.push(polite) == [flood[3]]
    more = Waiting(10, 5.0, "flood")
    assert queue.push(more) == [more]
    equal = Waiting(10, 6.0, "polite")
    assert queue.push(equal) == [equal], "it would have as many as they have"


def test_tokens_are_bounded_too_but_nothing_is_too_large_to_wait_alone() -> None:
    queue = WaitingQueue(QueueLimits(max_tokens=100))
    huge = Waiting(1000, 0.0)
    assert queue.push(huge) == []
    small = Waiting(1, 1.0)
    assert queue.push(small) == [small]
    queue.remove(huge)
    several = [Waiting(30, float(at)) for at in range(3)]
    for entry in several:
        assert queue.push(entry) == []
    urgent = Waiting(50, 9.0, priority=1)
    assert queue.push(urgent) == [several[2], several[1]], "as many as it needs"
    assert (queue.num_waiting, queue.num_tokens) == (2, 80)


def test_limits_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="room for one"):
        QueueLimits(quantum_tokens=0)
