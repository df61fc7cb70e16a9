"""Eviction policy of a full join server: which lease gives way to another. Pure.

Nothing is reserved: while there is room, one address (a NAT, or a host with all workers) may use all of it. When
the server is full, the address with the highest use pays, so that the others always find room: first with leases
without a connection, and for another address also with connected ones. The address with the highest use gets only
what it frees itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from kvolt.runtime.network import peer_group


class SharedLease(Protocol):
    """The fields of a lease that shares need. Compared by identity."""

    peer_host: str
    num_bytes: int


L = TypeVar("L", bound=SharedLease)


class LeaseShares(Generic[L]):
    """Leases and bytes by address."""

    def __init__(self) -> None:
        self.num_leases = 0
        self.num_bytes = 0
        self._bytes: Counter[str] = Counter()
        self._num_leases: Counter[str] = Counter()
        self._held: dict[str, dict[L, None]] = {}
        """Leases with a connection by address, least recently connected first."""
        self._idle: dict[str, dict[L, None]] = {}
        """Leases without a connection by address, longest disconnected first."""

    def count_leases(self, peer_host: str, change: int) -> None:
        """Adjust the lease count of an address, also for leases still being created."""
        self.num_leases += change
        _count(self._num_leases, peer_group(peer_host), change)

    def add_lease(self, lease: L) -> None:
        self.count_leases(lease.peer_host, 1)
        self.set_held(lease, False)

    def remove_lease(self, lease: L) -> None:
        """Remove a lease; its bytes stay counted until they are released."""
        group = peer_group(lease.peer_host)
        _discard(self._held, group, lease)
        _discard(self._idle, group, lease)
        self.count_leases(lease.peer_host, -1)

    def set_held(self, lease: L, is_held: bool) -> None:
        group = peer_group(lease.peer_host)
        to, source = (self._held, self._idle) if is_held else (self._idle, self._held)
        _discard(source, group, lease)
        to.setdefault(group, {})[lease] = None

    def move_lease(self, lease: L, peer_host: str) -> None:
        """Account a lease to the new address of its client."""
        self.remove_lease(lease)
        _count(self._bytes, peer_group(lease.peer_host), -lease.num_bytes)
        lease.peer_host = peer_host
        _count(self._bytes, peer_group(peer_host), lease.num_bytes)
        self.add_lease(lease)

    def add_bytes(self, lease: L, num_bytes: int) -> None:
        """Add bytes to a lease, or release them with a negative number."""
        lease.num_bytes += num_bytes
        self.num_bytes += num_bytes
        _count(self._bytes, peer_group(lease.peer_host), num_bytes)

    def lease_to_replace(self, peer_host: str) -> L | None:
        """The lease to evict for a new one of this address; None: refuse the new one."""
        largest, is_largest = _largest_user(self._num_leases, peer_group(peer_host), 1)
        idle = self._idle.get(largest)
        if idle:
            return next(iter(idle))
        return None if is_largest else next(reversed(self._held.get(largest, {})), None)

    def lease_to_empty(self, lease: L, num_bytes: int) -> L | None:
        """The lease to evict for more bytes of this one; None: refuse them."""
        largest, is_largest = _largest_user(self._bytes, peer_group(lease.peer_host), num_bytes)
        for leases in (self._idle, {} if is_largest else self._held):
            others = [other for other in leases.get(largest, ()) if other is not lease and other.num_bytes]
            if others:
                return max(others, key=lambda other: other.num_bytes)
        return None


def _largest_user(used: Counter[str], group: str, more: int) -> tuple[str, bool]:
    """The address with the highest use after adding `more` to `group`, and whether it is `group`."""
    most = max(used, key=used.__getitem__, default=group)
    is_largest = used[group] + more >= used[most]
    return (group if is_largest else most), is_largest


def _discard(leases: dict[str, dict[L, None]], group: str, lease: L) -> None:
    members = leases.get(group)
    if members is not None:
        members.pop(lease, None)
        if not members:
            del leases[group]


def _count(counter: Counter[str], group: str, change: int) -> None:
    counter[group] += change
    if not counter[group]:
        del counter[group]
