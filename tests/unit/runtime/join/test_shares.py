"""A full join server: the address that uses the most pays, and every count balances."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvolt.runtime.join.shares import LeaseShares


@dataclass(eq=False)
class Lease:
    peer_host: str
    num_bytes: int = 0


def filled(*hosts: str) -> tuple[LeaseShares[Lease], list[Lease]]:
    """Leases that are held."""
    shares: LeaseShares[Lease] = LeaseShares()
    leases = [Lease(host) for host in hosts]
    for lease in leases:
        shares.add_lease(lease)
        shares.set_held(lease, True)
    return shares, leases


def test_the_address_with_the_most_leases_pays_with_what_no_connection_holds() -> None:
    shares, leases = filled("a", "a", "a", "b")
    shares.set_held(leases[1], False)
    shares.set_held(leases[3], False)
    assert shares.lease_to_replace("b") is leases[1]
    assert shares.lease_to_replace("a") is leases[1]
    shares.set_held(leases[1], True)
    assert shares.lease_to_replace("new") is leases[1], "held last"
    assert shares.lease_to_replace("a") is None


def test_equal_addresses_take_nothing_from_each_other() -> None:
    shares, _ = filled("a", "b", "c")
    assert [shares.lease_to_replace(host) for host in ("a", "b", "new")] == [None] * 3


def test_leases_that_are_being_made_count() -> None:
    shares, _ = filled("a", "a", "a")
    shares.count_leases("stranger", 5)
    assert shares.lease_to_replace("stranger") is None
    assert shares.lease_to_replace("a") is None
    shares.count_leases("stranger", -5)
    assert shares.num_leases == 3


def test_bytes_are_taken_from_the_largest_lease_of_the_address_with_the_most() -> None:
    shares, leases = filled("a", "a", "b", "b")
    for lease, num_bytes in zip(leases, (50, 30, 10, 0), strict=True):
        shares.add_bytes(lease, num_bytes)
    assert shares.lease_to_empty(leases[2], 5) is leases[0]
    assert shares.lease_to_empty(leases[2], 70) is None, "it would have the most itself"
    assert shares.lease_to_empty(leases[0], 5) is None
    shares.set_held(leases[1], False)
    assert shares.lease_to_empty(leases[2], 5) is leases[1]
    assert shares.lease_to_empty(leases[0], 5) is leases[1]
    assert shares.lease_to_empty(leases[1], 5) is None, "not for itself"


def test_the_addresses_of_one_ipv6_network_are_one() -> None:
    shares, leases = filled("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
    assert shares.lease_to_replace("new") is leases[1]
    assert shares.lease_to_replace("2001:db8::3") is None


STEPS = st.tuples(st.sampled_from(["add", "remove", "hold", "lose", "move", "bytes"]), st.integers(0, 99))


@given(st.lists(STEPS, max_size=60))
def test_counts_balance(steps: list[tuple[str, int]]) -> None:
    shares: LeaseShares[Lease] = LeaseShares()
    leases: list[Lease] = []
    for step, number in steps:
        host = f"host{number % 3}"
        if step == "add":
            leases.append(Lease(host))
            shares.add_lease(leases[-1])
        elif leases:
            lease = leases[number % len(leases)]
            if step == "remove":
                leases.remove(lease)
                shares.remove_lease(lease)
                shares.add_bytes(lease, -lease.num_bytes)
            elif step == "move":
                shares.move_lease(lease, host)
            elif step == "bytes":
                shares.add_bytes(lease, number)
            else:
                shares.set_held(lease, step == "hold")
        assert shares.num_leases == len(leases)
        assert shares.num_bytes == sum(lease.num_bytes for lease in leases)
        assert shares._num_leases == Counter(lease.peer_host for lease in leases)
        listed = [
            lease for each in (shares._held, shares._idle) for group in each.values() for lease in group
        ]
        assert sorted(map(id, listed)) == sorted(map(id, leases))
    for lease in leases:
        shares.remove_lease(lease)
        shares.add_bytes(lease, -lease.num_bytes)
    assert not any((shares._held, shares._idle, shares._bytes, shares._num_leases, shares.num_bytes))
