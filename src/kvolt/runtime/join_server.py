"""The join server: this process's discovery, served to other machines over the request plane.

It keeps nothing of its own: what clients put goes into the store it stands on (`mem` in a process of
its own, `file` in `kvolt serve`), so both see the same cluster. A client's lease lives as long as its
`hold` stream; when the stream breaks, the lease gets its ttl to be held again. After a restart the
server says how long it is still settling, so that nobody takes "not back yet" for "gone".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from kvolt.core.errors import DiscoveryLost, NotFound
from kvolt.core.ids import InstanceId
from kvolt.runtime.clock import Clock
from kvolt.runtime.discovery import Delete, Discovery, LeaseId, Put
from kvolt.runtime.server import EndpointServer, decoder
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

HOLD, PUT, DELETE, REVOKE, GET, WATCH = (
    f"kvolt.discovery.{verb}" for verb in ("hold", "put", "delete", "revoke", "get", "watch")
)


class HoldRequest(msgspec.Struct, frozen=True):
    lease: str
    ttl_s: float


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


@dataclass(slots=True)
class _Held:
    stored: LeaseId
    ttl_s: float
    num_holders: int = 0
    expiry: asyncio.TimerHandle | None = None


class JoinServer:
    """Serves a Discovery. Its endpoints are added to the process's EndpointServer."""

    def __init__(self, store: Discovery, clock: Clock, settle_s: float) -> None:
        self._store = store
        self._clock = clock
        self._settled_at = clock.monotonic() + settle_s
        self._leases: dict[str, _Held] = {}
        self._crew = Crew("join-server")

    def add_to(self, server: EndpointServer) -> None:
        for endpoint, handler, kind in (
            (HOLD, self._hold, HoldRequest),
            (PUT, self._put, PutRequest),
            (DELETE, self._delete, KeyRequest),
            (REVOKE, self._revoke, str),
            (GET, self._get, str),
            (WATCH, self._watch, str),
        ):
            server.add(endpoint, InstanceId(""), server.generator(handler, decoder(kind)))

    async def close(self) -> None:
        for held in self._leases.values():
            if held.expiry is not None:
                held.expiry.cancel()
        await self._crew.close()

    async def _hold(self, request: HoldRequest) -> AsyncIterator[bool]:
        held = self._leases.get(request.lease)
        if held is None:
            stored = await self._store.lease(request.ttl_s)
            held = self._leases.setdefault(request.lease, _Held(stored, request.ttl_s))
        if held.expiry is not None:
            held.expiry.cancel()
            held.expiry = None
        held.num_holders += 1
        try:
            yield True
            await asyncio.get_running_loop().create_future()  # until the caller goes
        finally:
            held.num_holders -= 1
            if held.num_holders == 0 and self._leases.get(request.lease) is held and not self._crew.closed:
                loop = asyncio.get_running_loop()
                held.expiry = loop.call_later(held.ttl_s, self._expire, request.lease)

    def _expire(self, lease: str) -> None:
        log.warning("a joined process is gone: its lease %s ends", lease)
        self._crew.start(self._end(lease), "expire")

    async def _end(self, lease: str) -> None:
        held = self._leases.pop(lease, None)
        if held is None:
            return
        if held.expiry is not None:
            held.expiry.cancel()
        with suppress(DiscoveryLost):  # the store lets it expire
            await self._store.revoke(held.stored)

    async def _put(self, request: PutRequest) -> AsyncIterator[bool]:
        held = self._leases.get(request.lease)
        if held is None:
            raise NotFound("no such lease: hold it first", kind="lease", name=request.lease)
        await self._store.put(request.key, request.value, held.stored)
        yield True

    async def _delete(self, request: KeyRequest) -> AsyncIterator[bool]:
        await self._store.delete(request.key)
        yield True

    async def _revoke(self, lease: str) -> AsyncIterator[bool]:
        await self._end(lease)
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
