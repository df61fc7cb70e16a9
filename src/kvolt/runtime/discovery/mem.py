"""`mem` discovery inside one process: for tests, the twin and a single-process server.

`MemStore` is the store; each participant has a `MemDiscovery` on it. The store can be lost (`offline`) or emptied
(`wipe`), and a client can crash (`abandon`). Leases need no renewal: a client lives until it is closed or abandoned.
Must not use threads, files or sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from kvolt.core.errors import DiscoveryLost, KeyConflict, NotFound
from kvolt.runtime.clock import Clock, new_id
from kvolt.runtime.discovery.port import LeaseId, WatchEvent, check_key
from kvolt.runtime.discovery.watch import Change, Watches


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    clock: Clock
    keys: dict[str, bytes] = field(default_factory=dict)
    expires_at: float | None = None
    """Set when the client is gone."""


class MemStore:
    """The store shared by all clients."""

    def __init__(self) -> None:
        self._connected = True
        self._leases: dict[LeaseId, _Lease] = {}
        self._owners: dict[str, LeaseId] = {}
        self._clients: dict[MemDiscovery, None] = {}
        self._published: dict[str, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- faults, for tests and the twin

    def offline(self) -> None:
        """Make every call raise DiscoveryLost and every watch silent, until `online`."""
        self._connected = False
        self._set_timer()

    def online(self) -> None:
        self._connected = True
        for lease in self._leases.values():
            if lease.expires_at is not None:
                lease.expires_at = lease.clock.monotonic() + lease.ttl_s
        self._publish_difference()

    def wipe(self) -> None:
        """Lose everything; live clients restore their keys before any read."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires_at is None}
        self._owners = {key: name for name, lease in self._leases.items() for key in lease.keys}
        self._publish_difference()

    def drop_client(self, client: MemDiscovery) -> None:
        """Let a crashed client's leases expire; called by `MemDiscovery.abandon`."""
        for name in client.leases:
            self.start_expiry(name)
        self.remove_client(client)

    # -- for MemDiscovery

    def add_client(self, client: MemDiscovery) -> None:
        self._clients[client] = None
        self._set_timer()

    def remove_client(self, client: MemDiscovery) -> None:
        self._clients.pop(client, None)
        self._set_timer()

    def check(self) -> None:
        if not self._connected:
            raise DiscoveryLost("the in-memory store is offline", address="mem")

    def add_lease(self, name: LeaseId, ttl_s: float, clock: Clock) -> None:
        previous = self._leases.get(name)
        self._leases[name] = _Lease(ttl_s, clock, {} if previous is None else previous.keys)

    def put(self, key: str, value: bytes, name: LeaseId) -> None:
        if self._owners.setdefault(key, name) != name:
            raise KeyConflict(f"another live lease owns {key}", key=key)
        self._leases[name].keys[key] = value
        self._publish([(key, value)])

    def delete(self, key: str) -> None:
        """Delete a key; visible at once, or when the store is back online."""
        if self._remove_key(key) and self._connected:
            self._publish([(key, None)])

    def owner(self, key: str) -> LeaseId | None:
        return self._owners.get(key)

    def end_lease(self, name: LeaseId) -> None:
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        for key in lease.keys:
            del self._owners[key]
        self._publish([(key, None) for key in sorted(lease.keys)])
        self._set_timer()

    def start_expiry(self, name: LeaseId) -> None:
        lease = self._leases.get(name)
        if lease is not None and lease.expires_at is None:
            lease.expires_at = lease.clock.monotonic() + lease.ttl_s
            self._set_timer()

    def start_watches(self, client: MemDiscovery) -> None:
        if self._connected:
            for queue in client.watches.not_started():
                queue.set_initial(dict(sorted(self._published.items())))

    def content(self, prefix: str) -> dict[str, bytes]:
        return {key: self._published[key] for key in sorted(self._published) if key.startswith(prefix)}

    # -- inside

    def _remove_key(self, key: str) -> bool:
        owner = self._owners.pop(key, None)
        if owner is None:
            return False
        del self._leases[owner].keys[key]
        return True

    def _publish(self, changes: list[Change]) -> None:
        for key, value in changes:
            if value is None:
                del self._published[key]
            else:
                self._published[key] = value
        for client in self._clients:
            client.watches.publish(changes)

    def _publish_difference(self) -> None:
        """Publish the difference between the published and the actual content."""
        if not self._connected:
            return
        actual = {key: self._leases[owner].keys[key] for key, owner in self._owners.items()}
        removed: list[Change] = [(key, None) for key in sorted(self._published) if key not in actual]
        added: list[Change] = [
            (key, actual[key]) for key in sorted(actual) if self._published.get(key) != actual[key]
        ]
        self._publish(removed + added)
        for client in self._clients:
            self.start_watches(client)
        self._set_timer()

    def _set_timer(self) -> None:
        """Set one timer for the next expiry, and none without clients or while offline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        delays = [
            lease.expires_at - lease.clock.monotonic()
            for lease in self._leases.values()
            if lease.expires_at is not None
        ]
        if delays and self._clients and self._connected:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, min(delays)), self._expire)

    def _expire(self) -> None:
        due = [
            name
            for name, lease in self._leases.items()
            if lease.expires_at is not None and lease.expires_at <= lease.clock.monotonic()
        ]
        for name in due:
            self.end_lease(name)
        self._set_timer()


class MemDiscovery:
    """A client of a MemStore."""

    def __init__(self, store: MemStore, clock: Clock, rng: random.Random) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._closed = False
        self.leases: dict[LeaseId, None] = {}
        self.watches = Watches()
        store.add_client(self)

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        self._check()
        name = name or LeaseId(new_id(self._rng))
        self._store.add_lease(name, ttl_s, self._clock)
        self.leases[name] = None
        return name

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        """`on_lost` is never called: a lease of this store ends only with its client."""
        check_key(key)
        self._check()
        if lease not in self.leases:
            raise NotFound("no such lease in this process", kind="lease", name=lease)
        self._store.put(key, value, lease)

    async def delete(self, key: str) -> None:
        self._check_open()
        if self._store.owner(key) in self.leases:
            self._store.delete(key)
        self._store.check()

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        self._check()
        return self._store.content(prefix)

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        queue = self.watches.open(prefix)
        self._store.start_watches(self)
        return queue

    async def revoke(self, lease: LeaseId) -> None:
        if lease not in self.leases:
            return
        del self.leases[lease]
        try:
            self._check()
        except DiscoveryLost:
            self._store.start_expiry(lease)
            raise
        self._store.end_lease(lease)

    async def close(self) -> None:
        if self._closed:
            return
        for lease in list(self.leases):
            with suppress(DiscoveryLost):
                await self.revoke(lease)
        self._end()
        self._store.remove_client(self)

    def abandon(self) -> None:
        """Simulate a crash: watches end, leases expire after their ttl."""
        if not self._closed:
            self._end()
            self._store.drop_client(self)

    def _end(self) -> None:
        self._closed = True
        self.watches.close()

    def _check(self) -> None:
        self._check_open()
        self._store.check()

    def _check_open(self) -> None:
        if self._closed:
            raise DiscoveryLost("this discovery client is closed", address="mem")
