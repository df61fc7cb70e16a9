"""Join server: serves this process's discovery to other machines over the request plane.

Clients' keys are stored in the underlying store (`mem` in a process of its own, `file` in `kvolt serve`), so both
see the same cluster; the store refuses a put over another lease's key. A client's lease lives as long as its `hold`
stream. When the stream breaks or the client falls silent, the lease can be held again within its ttl. A client
whose stall outlasts the lease sees its `hold` end, and restores everything.

A full server evicts leases of the address with the highest use (see `shares`).

A lease id is a secret of its client: 128 random bits, never shown or logged here. A connection without it can neither
hold, use nor revoke the lease; a reconnecting client proves with it that it owns the lease.

    hold    keeps a lease; reports the lease's keys on this server, then the keys that it loses
    put     sets a key; KeyConflict if another live lease owns it
    watch   the store's watch events, preceded by the remaining settling time of the server

After a restart the server settles: until then clients must not treat a missing key as deleted.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import AccessDenied, DiscoveryLost, KeyConflict, NotFound, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import Clock
from kvolt.runtime.discovery.port import Delete, Discovery, LeaseId, Put, Synced
from kvolt.runtime.endpoint.server import EndpointServer, msgpack_decoder
from kvolt.runtime.join.shares import LeaseShares
from kvolt.runtime.logs import is_logged
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.security.access import check_registration
from kvolt.runtime.security.identity import Identity
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

HOLD, PUT, DELETE, REVOKE, GET, WATCH = (
    f"kvolt.discovery.{verb}" for verb in ("hold", "put", "delete", "revoke", "get", "watch")
)


MAX_LEASES = 16_384
MAX_BYTES = 256 << 20
"""Limit of keys and values of all clients."""
MAX_TTL_S = 60.0
"""Maximum lifetime of a lease after its connection is lost, whatever ttl the client requests."""

LeaseSecret = Annotated[str, Meta(min_length=1, max_length=64)]


class HoldRequest(msgspec.Struct, frozen=True):
    lease: LeaseSecret
    ttl_s: Annotated[float, Meta(gt=0, le=86_400)]
    """Bounded, which also excludes NaN, because it sets a timer."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    """First item of a hold: the lease is held and has these keys on this server."""

    keys: tuple[str, ...]


class KeyLost(msgspec.Struct, frozen=True, tag="lost"):
    """Another lease acquired this key while the server's own lease in the store had expired."""

    key: str


HoldItem = Held | KeyLost


class PutRequest(msgspec.Struct, frozen=True):
    lease: str
    key: str
    value: bytes


class KeyRequest(msgspec.Struct, frozen=True):
    lease: str
    key: str


class WatchStart(msgspec.Struct, frozen=True, tag="start"):
    """First item of a watch. While the server settles, a missing key is not a deleted key."""

    settles_in_s: float


WatchItem = WatchStart | Put | Delete | Synced


@dataclass(slots=True, eq=False)
class _Hold:
    """A stream that holds a lease."""

    has_ended: bool = False
    lost_keys: dict[str, None] = field(default_factory=dict)
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)

    def report_lost(self, key: str) -> None:
        self.lost_keys[key] = None
        self.wakeup.set()

    def end(self) -> None:
        self.has_ended = True
        self.wakeup.set()


@dataclass(slots=True, eq=False)
class _Lease:
    name: str
    """The client's secret."""
    store_lease: LeaseId
    ttl_s: float
    peer_host: str
    identity: Identity | None
    """Of its client, from the certificate; None without TLS."""
    num_bytes: int = 0
    """Bytes of its keys and of pending puts."""
    keys: dict[str, int] = field(default_factory=dict)
    """Keys with their size in bytes."""
    hold: _Hold | None = None
    expiry: asyncio.TimerHandle | None = None
    """Timer that runs while no connection holds the lease."""
    lost_at: float = 0.0
    """When the connection was lost."""
    was_extended: bool = False
    """The expiry was restarted once, because the loss was probably the server's own."""

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class JoinServer:
    """Serves a Discovery through endpoints of the process's EndpointServer."""

    def __init__(self, store: Discovery, clock: Clock, settle_s: float) -> None:
        self._store = store
        self._clock = clock
        self._settled_at = clock.monotonic() + settle_s
        self._leases: dict[str, _Lease] = {}
        self._shares: LeaseShares[_Lease] = LeaseShares()
        self._num_evicted = 0
        self._task_group = TaskGroup("join-server")

    def register_endpoints(self, server: EndpointServer) -> None:
        server.register(HOLD, InstanceId(""), partial(self._on_hold, server))
        for endpoint, handler, kind in (
            (PUT, self._put, PutRequest),
            (DELETE, self._delete, KeyRequest),
            (REVOKE, self._revoke, str),
            (GET, self._get, str),
            (WATCH, self._watch, str),
        ):
            server.register(endpoint, InstanceId(""), server.wrap_generator(handler, msgpack_decoder(kind)))

    async def close(self) -> None:
        """End every hold. The leases remain in the store, which ends them when it is closed."""
        for lease in self._leases.values():
            lease.stop_expiry()
            if lease.hold is not None:
                lease.hold.end()
        await self._task_group.close()

    # -- leases

    def _on_hold(self, server: EndpointServer, stream: IncomingStream) -> None:
        server.wrap_generator(lambda request: self._hold(request, stream), msgpack_decoder(HoldRequest))(
            stream
        )

    async def _hold(self, request: HoldRequest, stream: IncomingStream) -> AsyncIterator[HoldItem]:
        lease = self._leases.get(request.lease)
        if lease is None:
            lease = await self._new_lease(request, stream)
        if lease.identity != stream.peer_identity:
            raise AccessDenied("the lease is of another process")
        if lease.peer_host != stream.peer_host:
            self._shares.move_lease(lease, stream.peer_host)
        self._stop_expiry(lease)
        if lease.hold is not None:
            lease.hold.end()  # the same client over an older connection whose end was not detected yet
        hold = lease.hold = _Hold()

        def on_silent(is_silent: bool) -> None:
            if lease.hold is hold and is_silent:
                self._start_expiry(lease)
            elif lease.hold is hold:
                self._stop_expiry(lease)

        stream.on_silent = on_silent
        try:
            yield Held(tuple(lease.keys))
            while not hold.has_ended:
                await hold.wakeup.wait()  # cancelled when the stream ends
                hold.wakeup.clear()
                while hold.lost_keys:
                    key = next(iter(hold.lost_keys))
                    del hold.lost_keys[key]
                    yield KeyLost(key)
        finally:
            if lease.hold is hold:
                lease.hold = None
                if self._leases.get(request.lease) is lease:
                    self._start_expiry(lease)

    async def _new_lease(self, request: HoldRequest, stream: IncomingStream) -> _Lease:
        peer_host = stream.peer_host
        if self._task_group.closed:
            raise Unavailable("the join server is shutting down", reason="draining")
        while self._shares.num_leases >= MAX_LEASES:
            victim = self._shares.lease_to_replace(peer_host)
            if victim is None:
                raise Overloaded("the join server has too many leases", queue="leases", limit=MAX_LEASES)
            self._evict_lease(victim)
        # Derived from the secret: after a restart of this server the lease continues with its keys.
        name = LeaseId(hashlib.blake2b(request.lease.encode(), digest_size=16).hexdigest())
        ttl_s = min(request.ttl_s, MAX_TTL_S)
        self._shares.count_leases(peer_host, 1)  # before the await: many may be created concurrently
        try:
            store_lease = await self._store.lease(ttl_s, name)
        finally:
            self._shares.count_leases(peer_host, -1)
        other = self._leases.get(request.lease)
        if other is not None:  # the client connected twice while the store was slow
            return other
        lease = self._leases[request.lease] = _Lease(
            request.lease, store_lease, ttl_s, peer_host, stream.peer_identity
        )
        self._shares.add_lease(lease)
        return lease

    def _stop_expiry(self, lease: _Lease) -> None:
        """Mark the lease as held by a live connection."""
        self._shares.set_held(lease, True)
        lease.was_extended = False
        if lease.expiry is not None:
            lease.stop_expiry()
            self._extend_other_leases()

    def _start_expiry(self, lease: _Lease) -> None:
        """Start the expiry when the connection falls silent or closes; a closed silent connection counts once."""
        if lease.expiry is None:
            self._shares.set_held(lease, False)
            lease.lost_at = asyncio.get_running_loop().time()
            self._set_expiry(lease)

    def _set_expiry(self, lease: _Lease) -> None:
        lease.stop_expiry()
        if not self._task_group.closed:
            loop = asyncio.get_running_loop()
            expires_at = min(loop.time() + lease.ttl_s, lease.lost_at + MAX_TTL_S)
            lease.expiry = loop.call_at(expires_at, self._expire, lease)

    def _extend_other_leases(self) -> None:
        """Restart the expiry of the other leases once: after one client returns, the others may follow."""
        for lease in self._leases.values():
            if lease.expiry is not None and not lease.was_extended:
                lease.was_extended = True
                self._set_expiry(lease)

    def _expire(self, lease: _Lease) -> None:
        log.warning("lease expired: keys=%s", list(lease.keys))
        self._remove_lease(lease)
        self._task_group.start(self._end_stored(lease.store_lease), "expire")

    def _evict_lease(self, lease: _Lease) -> None:
        self._num_evicted += 1
        if is_logged(self._num_evicted):
            log.warning(
                "lease evicted: reason=join server full peer=%s keys=%d bytes=%d held=%s evicted=%d",
                lease.peer_host,
                len(lease.keys),
                lease.num_bytes,
                lease.hold is not None,
                self._num_evicted,
            )
        self._remove_lease(lease)
        if not self._task_group.closed:  # else the store ends it on close
            self._task_group.start(self._end_stored(lease.store_lease), "shed")

    def _remove_lease(self, lease: _Lease) -> None:
        """Remove a lease completely, so that a returning client starts with a new one."""
        lease.stop_expiry()
        del self._leases[lease.name]
        self._shares.remove_lease(lease)
        self._shares.add_bytes(lease, -sum(lease.keys.values()))
        lease.keys.clear()
        if lease.hold is not None:
            lease.hold.end()
            lease.hold = None  # its stream may still be open, and fall silent

    async def _end_stored(self, store_lease: LeaseId) -> None:
        with suppress(DiscoveryLost):  # the store lets it expire
            await self._store.revoke(store_lease)

    async def _revoke(self, name: str) -> AsyncIterator[bool]:
        lease = self._leases.get(name)
        if lease is not None:
            self._remove_lease(lease)
            await self._end_stored(lease.store_lease)
        yield True

    # -- keys

    async def _put(self, request: PutRequest) -> AsyncIterator[bool]:
        lease = self._leases.get(request.lease)
        if lease is None:
            raise NotFound("no such lease: hold it first", kind="lease")
        if lease.identity is not None:
            check_registration(lease.identity, request.key, request.value)
        num_bytes = len(request.key) + len(request.value)
        while self._shares.num_bytes + num_bytes > MAX_BYTES:
            victim = self._shares.lease_to_empty(lease, num_bytes)
            if victim is None:
                raise Overloaded("the join server is full", queue="values", limit=MAX_BYTES)
            self._evict_lease(victim)
        on_lost = partial(self._on_key_lost, lease, request.key)
        self._shares.add_bytes(lease, num_bytes)  # before the await: many puts may run concurrently
        try:
            await self._store.put(request.key, request.value, lease.store_lease, on_lost)
        except BaseException as error:
            self._shares.add_bytes(lease, -num_bytes)
            if isinstance(error, KeyConflict):
                log.warning("put refused: key=%r reason=another live lease owns the key", request.key)
            raise
        if self._leases.get(request.lease) is lease:
            self._drop_key(lease, request.key)
            lease.keys[request.key] = num_bytes
        else:
            self._shares.add_bytes(lease, -num_bytes)
        yield True

    def _drop_key(self, lease: _Lease, key: str) -> bool:
        """Remove a key from a lease; returns whether it had the key."""
        num_bytes = lease.keys.pop(key, None)
        self._shares.add_bytes(lease, -(num_bytes or 0))
        return num_bytes is not None

    def _on_key_lost(self, lease: _Lease, key: str) -> None:
        if self._drop_key(lease, key) and lease.hold is not None:
            lease.hold.report_lost(key)

    async def _delete(self, request: KeyRequest) -> AsyncIterator[bool]:
        lease = self._leases.get(request.lease)
        if lease is not None and request.key in lease.keys:
            await self._store.delete(request.key)
            self._drop_key(lease, request.key)
        yield True

    async def _get(self, prefix: str) -> AsyncIterator[dict[str, bytes]]:
        yield dict(await self._store.get_prefix(prefix))

    async def _watch(self, prefix: str) -> AsyncIterator[WatchItem]:
        yield WatchStart(max(self._settled_at - self._clock.monotonic(), 0.0))
        async for event in self._store.watch_prefix(prefix):
            yield event
