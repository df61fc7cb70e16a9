"""A budget for unfinished messages: the largest holder of the largest peer is shed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.runtime.plane.byte_budget import ByteBudget


class Holder:
    def __init__(self, peer_host: str) -> None:
        self.peer_host = peer_host
        self.num_shed = 0

    def shed(self) -> None:
        self.num_shed += 1


def test_the_largest_holder_of_an_address_is_shed() -> None:
    budget = ByteBudget(100, 60)
    small, large, other = Holder("a"), Holder("a"), Holder("b")
    budget.set_held_bytes(other, 30)
    budget.set_held_bytes(large, 50)
    budget.set_held_bytes(small, 10)
    assert large.num_shed == 0
    budget.set_held_bytes(small, 11)
    assert (small.num_shed, large.num_shed, other.num_shed) == (0, 1, 0)
    assert budget.used_bytes == 41
    assert budget.num_shed == 1


def test_the_process_limit_takes_from_the_address_that_has_most() -> None:
    budget = ByteBudget(100, 60)
    normal = Holder("normal")
    attackers = [Holder(f"{number}") for number in range(2)]
    for attacker in attackers:
        budget.set_held_bytes(attacker, 45)
    budget.set_held_bytes(normal, 20)
    assert normal.num_shed == 0
    assert sum(attacker.num_shed for attacker in attackers) == 1
    assert budget.used_bytes == 65


def test_what_is_let_go_is_free_again() -> None:
    budget = ByteBudget(100, 60)
    holder = Holder("a")
    for _ in range(10):
        budget.set_held_bytes(holder, 60)
        budget.set_held_bytes(holder, 0)
    assert (budget.used_bytes, holder.num_shed) == (0, 0)


def test_the_addresses_of_one_ipv6_network_share_a_limit() -> None:
    budget = ByteBudget(100, 60)
    holders = [Holder(f"2001:db8::{number:x}") for number in range(7)]
    other, mapped, plain = Holder("2001:db8:0:1::1"), Holder("::ffff:10.0.0.1"), Holder("10.0.0.1")
    for holder in holders:
        budget.set_held_bytes(holder, 10)
    assert sum(holder.num_shed for holder in holders) == 1
    for holder in (other, mapped, plain):
        budget.set_held_bytes(holder, 1)
    budget.set_held_bytes(mapped, 30)
    budget.set_held_bytes(plain, 31)
    assert (other.num_shed, mapped.num_shed, plain.num_shed) == (0, 0, 1)
    for holder in (*holders, other, mapped, plain):
        budget.set_held_bytes(holder, 0)
    assert budget.used_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 80)), max_size=60))
def test_the_limits_hold_whatever_comes(holds: list[tuple[int, int]]) -> None:
    budget = ByteBudget(100, 60)
    holders = [Holder(f"{number % 3}") for number in range(10)]
    for number, num_bytes in holds:
        budget.set_held_bytes(holders[number], num_bytes)
        assert budget.used_bytes <= 100
        kept = [sum(held.values()) for held in budget._holders.values()]
        assert sum(kept) == budget.used_bytes
        assert all(each <= 60 for each in kept)
