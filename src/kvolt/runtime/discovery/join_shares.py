"""Which lease a full join server gives up for another one. Pure.

Nothing is reserved: while there is room, one address (a NAT, or a host with all workers) may use all of it. When
it is full, the address that uses the most pays, so that the others always find room: first with leases that no
connection holds, and for another address also with leases that are held. The address that uses the most gets
nothing more than what it frees itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Generic, Protocol, TypeVar

from kvolt.runtime.network import peer_group


class SharedLease(Protocol):
    """A lease as far as shares are concerned. Compared by identity."""

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
        """By address, in the order in which they were held last."""
        self._idle: dict[str, dict[L, None]] = {}
        """By address, in the order in which they were lost."""

    def count_leases(self, peer_host: str, change: int) -> None:
        """A lease of this address is being made, or was not made after all."""
        self.num_leases += change
        _count(self._num_leases, peer_group(peer_host), change)

    def add_lease(self, lease: L) -> None:
        self.count_leases(lease.peer_host, 1)
        self.set_held(lease, False)

    def remove_lease(self, lease: L) -> None:
        """Its bytes stay counted until they are released."""
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
        """Its client is back from another address."""
        self.remove_lease(lease)
        _count(self._bytes, peer_group(lease.peer_host), -lease.num_bytes)
        lease.peer_host = peer_host
        _count(self._bytes, peer_group(peer_host), lease.num_bytes)
        self.add_lease(lease)

    def add_bytes(self, lease: L, num_bytes: int) -> None:
        """Or release them, with a negative number."""
        lease.num_bytes += num_bytes
        self.num_bytes += num_bytes
        _count(self._bytes, peer_group(lease.peer_host), num_bytes)

    def lease_to_replace(self, peer_host: str) -> L | None:
        """Which lease to give up for a new one of this address; None: the new one is refused."""
        payer, is_own = _payer(self._num_leases, peer_group(peer_host), 1)
        idle = self._idle.get(payer)
        if idle:
            return next(iter(idle))
        return None if is_own else next(reversed(self._held.get(payer, {})), None)

    def lease_to_empty(self, lease: L, num_bytes: int) -> L | None:
        """Which lease to give up for bytes of this one; None: they are refused."""
        payer, is_own = _payer(self._bytes, peer_group(lease.peer_host), num_bytes)
        for leases in (self._idle, {} if is_own else self._held):
            others = [other for other in leases.get(payer, ()) if other is not lease and other.num_bytes]
            if others:
                return max(others, key=lambda other: other.num_bytes)
        return None


def _payer(used: Counter[str], group: str, more: int) -> tuple[str, bool]:
    """The address that uses the most once this one has more, and whether it is this one."""
    most = max(used, key=used.__getitem__, default=group)
    is_own = used[group] + more >= used[most]
    return (group if is_own else most), is_own


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
