"""The join server: this process's discovery, served to other machines over the request plane.

What clients put goes into the store it stands on (`mem` in a process of its own, `file` in `kvolt
serve`), so both see the same cluster; the store refuses a put over another lease's key. A client's lease
lives as long as its `hold` stream; when the stream breaks or its client falls silent, the lease gets its ttl
to be held again. A client whose stall outlasts the lease sees its `hold` end, and puts everything back.

A full server gives up leases of the address that has the most (see `join_shares`).

A lease id is a secret of its client: 128 random bits that are never shown or logged here. A connection
that does not know it can neither hold, use nor revoke the lease; a client that reconnects proves by it
that the lease is its own.

    hold    keeps a lease; says what the lease has here, then the keys that it loses
    put     sets a key; KeyConflict if another live lease has it
    watch   what the store's own watch says, after how long the server is still settling

After a restart the server settles: until then nobody may take "not back yet" for "gone".
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

from kvolt.core.errors import DiscoveryLost, KeyConflict, NotFound, Overloaded, Unavailable
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import Clock
from kvolt.runtime.discovery.join_shares import LeaseShares
from kvolt.runtime.discovery.port import Delete, Discovery, LeaseId, Put
from kvolt.runtime.endpoint.server import EndpointServer, decoder
from kvolt.runtime.plane.port import IncomingStream
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

HOLD, PUT, DELETE, REVOKE, GET, WATCH = (
    f"kvolt.discovery.{verb}" for verb in ("hold", "put", "delete", "revoke", "get", "watch")
)


MAX_LEASES = 16_384
MAX_BYTES = 256 << 20
"""Of keys and values that clients put."""
MAX_TTL_S = 60.0
"""How long a lease lasts from the loss of its connection, whatever its client asks for and whichever others return."""

LeaseSecret = Annotated[str, Meta(min_length=1, max_length=64)]


class HoldRequest(msgspec.Struct, frozen=True):
    lease: LeaseSecret
    ttl_s: Annotated[float, Meta(gt=0, le=86_400)]
    """Bounded, and nan is out of bounds: it becomes a timer here."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    """First item of a hold: the lease is kept, and has these keys here."""

    keys: tuple[str, ...]


class KeyLost(msgspec.Struct, frozen=True, tag="lost"):
    """The store lost this key to another lease while the server's own lease there had expired."""

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
    """First item of a watch. While the server settles, a missing key is no news."""

    settles_in_s: float


class WatchPut(msgspec.Struct, frozen=True, tag="put"):
    key: str
    value: bytes


class WatchDelete(msgspec.Struct, frozen=True, tag="delete"):
    key: str


class WatchSynced(msgspec.Struct, frozen=True, tag="synced"):
    pass


WatchItem = WatchStart | WatchPut | WatchDelete | WatchSynced


@dataclass(slots=True, eq=False)
class _Hold:
    """One stream that keeps a lease."""

    over: bool = False
    lost: dict[str, None] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def report_lost(self, key: str) -> None:
        self.lost[key] = None
        self.news.set()

    def end(self) -> None:
        self.over = True
        self.news.set()


@dataclass(slots=True, eq=False)
class _Lease:
    name: str
    """The secret of its client."""
    stored: LeaseId
    ttl_s: float
    peer_host: str
    num_bytes: int = 0
    """Of its keys, and of puts that are not done."""
    keys: dict[str, int] = field(default_factory=dict)
    """With the bytes of each."""
    hold: _Hold | None = None
    expiry: asyncio.TimerHandle | None = None
    """Running while nobody holds it."""
    lost_at: float = 0.0
    """When `expiry` was first started."""
    spared: bool = False
    """Its time was started anew once, since the loss seems to be our own."""

    def stop_expiry(self) -> None:
        if self.expiry is not None:
            self.expiry.cancel()
            self.expiry = None


class JoinServer:
    """Serves a Discovery. Its endpoints are added to the process's EndpointServer."""

    def __init__(self, store: Discovery, clock: Clock, settle_s: float) -> None:
        self._store = store
        self._clock = clock
        self._settled_at = clock.monotonic() + settle_s
        self._leases: dict[str, _Lease] = {}
        self._shares: LeaseShares[_Lease] = LeaseShares()
        self._num_shed = 0
        self._crew = Crew("join-server")

    def add_to(self, server: EndpointServer) -> None:
        server.add(HOLD, InstanceId(""), partial(self._on_hold, server))
        for endpoint, handler, kind in (
            (PUT, self._put, PutRequest),
            (DELETE, self._delete, KeyRequest),
            (REVOKE, self._revoke, str),
            (GET, self._get, str),
            (WATCH, self._watch, str),
        ):
            server.add(endpoint, InstanceId(""), server.generator(handler, decoder(kind)))

    async def close(self) -> None:
        """End every hold. The leases stay with the store, which ends them when it is closed."""
        for lease in self._leases.values():
            lease.stop_expiry()
            if lease.hold is not None:
                lease.hold.end()
        await self._crew.close()

    # -- leases

    def _on_hold(self, server: EndpointServer, stream: IncomingStream) -> None:
        server.generator(lambda request: self._hold(request, stream), decoder(HoldRequest))(stream)

    async def _hold(self, request: HoldRequest, stream: IncomingStream) -> AsyncIterator[HoldItem]:
        lease = self._leases.get(request.lease)
        if lease is None:
            lease = await self._new_lease(request, stream.peer_host)
        if lease.peer_host != stream.peer_host:
            self._shares.move_lease(lease, stream.peer_host)
        self._stop_expiry(lease)
        if lease.hold is not None:
            lease.hold.end()  # the same client over an older connection, of whose end we have not heard
        hold = lease.hold = _Hold()

        def on_silent(is_silent: bool) -> None:
            if lease.hold is hold and is_silent:
                self._start_expiry(lease)
            elif lease.hold is hold:
                self._stop_expiry(lease)

        stream.on_silent = on_silent
        try:
            yield Held(tuple(lease.keys))
            while not hold.over:
                await hold.news.wait()  # ends with the stream: the caller goes, or its connection
                hold.news.clear()
                while hold.lost:
                    key = next(iter(hold.lost))
                    del hold.lost[key]
                    yield KeyLost(key)
        finally:
            if lease.hold is hold:
                lease.hold = None
                if self._leases.get(request.lease) is lease:
                    self._start_expiry(lease)

    async def _new_lease(self, request: HoldRequest, peer_host: str) -> _Lease:
        if self._crew.closed:
            raise Unavailable("the join server is going away", reason="draining")
        while self._shares.num_leases >= MAX_LEASES:
            victim = self._shares.lease_to_replace(peer_host)
            if victim is None:
                raise Overloaded("the join server has too many leases", queue="leases", limit=MAX_LEASES)
            self._shed(victim)
        # Named after the secret: after a restart of this server the lease goes on, and its keys with it.
        name = LeaseId(hashlib.blake2b(request.lease.encode(), digest_size=16).hexdigest())
        ttl_s = min(request.ttl_s, MAX_TTL_S)
        self._shares.count_leases(peer_host, 1)  # before the wait: many may be made at once
        try:
            stored = await self._store.lease(ttl_s, name)
        finally:
            self._shares.count_leases(peer_host, -1)
        other = self._leases.get(request.lease)
        if other is not None:  # its client came twice while the store was slow
            return other
        lease = self._leases[request.lease] = _Lease(request.lease, stored, ttl_s, peer_host)
        self._shares.add_lease(lease)
        return lease

    def _stop_expiry(self, lease: _Lease) -> None:
        """A live connection holds the lease."""
        self._shares.set_held(lease, True)
        lease.spared = False
        if lease.expiry is not None:
            lease.stop_expiry()
            self._spare_others()

    def _start_expiry(self, lease: _Lease) -> None:
        """The connection is silent or gone. One that is first silent and then gone was lost once."""
        if lease.expiry is None:
            self._shares.set_held(lease, False)
            lease.lost_at = asyncio.get_running_loop().time()
            self._set_expiry(lease)

    def _set_expiry(self, lease: _Lease) -> None:
        lease.stop_expiry()
        if not self._crew.closed:
            loop = asyncio.get_running_loop()
            expires_at = min(loop.time() + lease.ttl_s, lease.lost_at + MAX_TTL_S)
            lease.expiry = loop.call_at(expires_at, self._expire, lease)

    def _spare_others(self) -> None:
        """One who was lost is back: the others may be on their way, so their time starts anew, once."""
        for lease in self._leases.values():
            if lease.expiry is not None and not lease.spared:
                lease.spared = True
                self._set_expiry(lease)

    def _expire(self, lease: _Lease) -> None:
        log.warning("lease of a joined process expired: keys=%s", list(lease.keys))
        self._forget(lease)
        self._crew.start(self._end_stored(lease.stored), "expire")

    def _shed(self, lease: _Lease) -> None:
        self._num_shed += 1
        if self._num_shed & (self._num_shed - 1) == 0:  # an attack must not fill the log
            log.warning(
                "join server full, lease given up: peer=%s keys=%d bytes=%d held=%s so far=%d",
                lease.peer_host,
                len(lease.keys),
                lease.num_bytes,
                lease.hold is not None,
                self._num_shed,
            )
        self._forget(lease)
        if not self._crew.closed:  # else the store ends it when it is closed
            self._crew.start(self._end_stored(lease.stored), "shed")

    def _forget(self, lease: _Lease) -> None:
        """At once and whole, so that whoever comes back under this name starts with a new lease."""
        lease.stop_expiry()
        del self._leases[lease.name]
        self._shares.remove_lease(lease)
        self._shares.add_bytes(lease, -sum(lease.keys.values()))
        lease.keys.clear()
        if lease.hold is not None:
            lease.hold.end()
            lease.hold = None  # its stream may still be open, and fall silent

    async def _end_stored(self, stored: LeaseId) -> None:
        with suppress(DiscoveryLost):  # the store lets it expire
            await self._store.revoke(stored)

    async def _revoke(self, name: str) -> AsyncIterator[bool]:
        lease = self._leases.get(name)
        if lease is not None:
            self._forget(lease)
            await self._end_stored(lease.stored)
        yield True

    # -- keys

    async def _put(self, request: PutRequest) -> AsyncIterator[bool]:
        lease = self._leases.get(request.lease)
        if lease is None:
            raise NotFound("no such lease: hold it first", kind="lease")
        num_bytes = len(request.key) + len(request.value)
        while self._shares.num_bytes + num_bytes > MAX_BYTES:
            victim = self._shares.lease_to_empty(lease, num_bytes)
            if victim is None:
                raise Overloaded("the join server has too much to keep", queue="values", limit=MAX_BYTES)
            self._shed(victim)
        on_lost = partial(self._lose, lease, request.key)
        self._shares.add_bytes(lease, num_bytes)  # before the wait: many may be written at once
        try:
            await self._store.put(request.key, request.value, lease.stored, on_lost)
        except BaseException as error:
            self._shares.add_bytes(lease, -num_bytes)
            if isinstance(error, KeyConflict):
                log.warning("put refused, another live lease owns the key: key=%r", request.key)
            raise
        if self._leases.get(request.lease) is lease:
            self._drop_key(lease, request.key)
            lease.keys[request.key] = num_bytes
        else:
            self._shares.add_bytes(lease, -num_bytes)
        yield True

    def _drop_key(self, lease: _Lease, key: str) -> bool:
        """Whether the lease had it."""
        num_bytes = lease.keys.pop(key, None)
        self._shares.add_bytes(lease, -(num_bytes or 0))
        return num_bytes is not None

    def _lose(self, lease: _Lease, key: str) -> None:
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
            if isinstance(event, Put):
                yield WatchPut(event.key, event.value)
            elif isinstance(event, Delete):
                yield WatchDelete(event.key)
            else:
                yield WatchSynced()
