"""Discovery inside one process: for tests, the twin and a single-process server.

`MemStore` is the store; each participant has a `MemDiscovery` on it. The store can be lost (`offline`),
emptied (`wipe`), and a client can crash (`abandon`). Leases need no keep-alive here: a client lives
until it is closed or abandoned. Must not know threads, files or sockets.
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
    """Set when nobody keeps it alive any more."""


class MemStore:
    """What all clients share."""

    def __init__(self) -> None:
        self._connected = True
        self._leases: dict[LeaseId, _Lease] = {}
        self._owners: dict[str, LeaseId] = {}
        self._clients: dict[MemDiscovery, None] = {}
        self._shown: dict[str, bytes] = {}
        self._timer: asyncio.TimerHandle | None = None

    # -- faults, for tests and the twin

    def offline(self) -> None:
        """Every call raises DiscoveryLost and every watch is silent, until `online`."""
        self._connected = False
        self._set_timer()

    def online(self) -> None:
        self._connected = True
        for lease in self._leases.values():
            if lease.expires_at is not None:
                lease.expires_at = lease.clock.monotonic() + lease.ttl_s
        self._catch_up()

    def wipe(self) -> None:
        """Forget everything; living clients put their keys back before anybody looks."""
        self._leases = {name: lease for name, lease in self._leases.items() if lease.expires_at is None}
        self._owners = {key: name for name, lease in self._leases.items() for key in lease.keys}
        self._catch_up()

    def drop_client(self, client: MemDiscovery) -> None:
        """Let a client's leases run out; MemDiscovery.abandon() calls it."""
        for name in client.leases:
            self.let_expire(name)
        self.leave(client)

    # -- for MemDiscovery

    def join(self, client: MemDiscovery) -> None:
        self._clients[client] = None
        self._set_timer()

    def leave(self, client: MemDiscovery) -> None:
        self._clients.pop(client, None)
        self._set_timer()

    def check(self) -> None:
        if not self._connected:
            raise DiscoveryLost("the in-memory store is offline", address="mem")

    def add_lease(self, name: LeaseId, ttl_s: float, clock: Clock) -> None:
        left_behind = self._leases.get(name)
        self._leases[name] = _Lease(ttl_s, clock, {} if left_behind is None else left_behind.keys)

    def put(self, key: str, value: bytes, name: LeaseId) -> None:
        if self._owners.setdefault(key, name) != name:
            raise KeyConflict(f"another live lease owns {key}", key=key)
        self._leases[name].keys[key] = value
        self._publish([(key, value)])

    def delete(self, key: str) -> None:
        """Seen at once, or, while the store is offline, when it is back."""
        if self._forget(key) and self._connected:
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

    def let_expire(self, name: LeaseId) -> None:
        lease = self._leases.get(name)
        if lease is not None and lease.expires_at is None:
            lease.expires_at = lease.clock.monotonic() + lease.ttl_s
            self._set_timer()

    def begin_watches(self, client: MemDiscovery) -> None:
        if self._connected:
            for queue in client.watches.waiting():
                queue.begin(dict(sorted(self._shown.items())))

    def content(self, prefix: str) -> dict[str, bytes]:
        return {key: self._shown[key] for key in sorted(self._shown) if key.startswith(prefix)}

    # -- inside

    def _forget(self, key: str) -> bool:
        owner = self._owners.pop(key, None)
        if owner is None:
            return False
        del self._leases[owner].keys[key]
        return True

    def _publish(self, changes: list[Change]) -> None:
        for key, value in changes:
            if value is None:
                del self._shown[key]
            else:
                self._shown[key] = value
        for client in self._clients:
            client.watches.publish(changes)

    def _catch_up(self) -> None:
        """Tell the watches the difference between what they last saw and what is there now."""
        if not self._connected:
            return
        actual = {key: self._leases[owner].keys[key] for key, owner in self._owners.items()}
        gone: list[Change] = [(key, None) for key in sorted(self._shown) if key not in actual]
        new: list[Change] = [
            (key, actual[key]) for key in sorted(actual) if self._shown.get(key) != actual[key]
        ]
        self._publish(gone + new)
        for client in self._clients:
            self.begin_watches(client)
        self._set_timer()

    def _set_timer(self) -> None:
        """One timer for the next expiry, and none while nobody could see it."""
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
    """One client of a MemStore."""

    def __init__(self, store: MemStore, clock: Clock, rng: random.Random) -> None:
        self._store = store
        self._clock = clock
        self._rng = rng
        self._closed = False
        self.leases: dict[LeaseId, None] = {}
        self.watches = Watches()
        store.join(self)

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
        self._store.begin_watches(self)
        return queue

    async def revoke(self, lease: LeaseId) -> None:
        if lease not in self.leases:
            return
        del self.leases[lease]
        try:
            self._check()
        except DiscoveryLost:
            self._store.let_expire(lease)
            raise
        self._store.end_lease(lease)

    async def close(self) -> None:
        if self._closed:
            return
        for lease in list(self.leases):
            with suppress(DiscoveryLost):
                await self.revoke(lease)
        self._end()
        self._store.leave(self)

    def abandon(self) -> None:
        """Crash: the watches end, the leases run out after their ttl."""
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
