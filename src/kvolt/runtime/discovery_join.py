"""Discovery through a join server: `--join HOST:PORT`, nothing to install.

Owns reconnecting: one keeper per lease holds it and puts everything back after a loss, one follower
per watched prefix mirrors it. While the server is away the mirrors stand still.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvolt.core.errors import (
    DeadlineExceeded,
    DiscoveryLost,
    InvalidRequest,
    KvoltError,
    NetworkFault,
    NotFound,
    Unavailable,
)
from kvolt.runtime import join_server as join
from kvolt.runtime.call import Deadlines
from kvolt.runtime.client import Destination, open_stream
from kvolt.runtime.clock import new_id
from kvolt.runtime.connections import Connections
from kvolt.runtime.discovery import LeaseId, WatchEvent
from kvolt.runtime.discovery_watch import Watches
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_FOREVER_S = 1e9
_RETRY_FIRST_S = 0.1
_RETRY_MAX_S = 2.0

_LOST = (NetworkFault, DeadlineExceeded, Unavailable)
"""What a call to a server that is away, restarting or going away ends with."""

_decode_watch = msgspec.msgpack.Decoder(join.WatchItem).decode


@dataclass(slots=True)
class _OwnLease:
    ttl_s: float
    keys: dict[str, bytes] = field(default_factory=dict)
    held: asyncio.Event = field(default_factory=asyncio.Event)
    keeper: asyncio.Task[Any] | None = None


@dataclass(slots=True)
class _Mirror:
    """What is under one prefix, as last known."""

    content: dict[str, bytes] = field(default_factory=dict)
    synced: bool = False


class JoinDiscovery:
    """One process's client of a join server. `on_state` is told when it is lost and when it is back."""

    def __init__(
        self,
        connections: Connections,
        address: str,
        rng: random.Random,
        timeout_s: float = 5.0,
        on_state: Callable[[bool], None] | None = None,
    ) -> None:
        self._connections = connections
        self._address = address
        self._rng = rng
        self._limits = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=timeout_s, total_s=timeout_s
        )
        self._standing = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=_FOREVER_S, total_s=_FOREVER_S
        )
        self._on_state = on_state
        self._connected: bool | None = None
        self._own: dict[LeaseId, _OwnLease] = {}
        self._mirrors: dict[str, _Mirror] = {}
        self._watches = Watches()
        self._crew = Crew("discovery-join")

    # -- the port

    async def lease(self, ttl_s: float) -> LeaseId:
        self._check_open()
        name = LeaseId(new_id(self._rng))
        own = self._own[name] = _OwnLease(ttl_s)
        own.keeper = self._crew.start(self._keep(name, own), f"keeper {name}")
        try:
            async with asyncio.timeout(self._limits.total_s):
                await own.held.wait()
        except TimeoutError:
            self._drop(name)
            raise self._lost("did not answer") from None
        except asyncio.CancelledError:
            self._drop(name)
            raise
        return name

    async def put(self, key: str, value: bytes, lease: LeaseId) -> None:
        if not key:
            raise InvalidRequest("a discovery key is not empty", param="key")
        own = self._own.get(lease)
        if own is None:
            raise NotFound("no such lease in this process", kind="lease", name=lease)
        await self._put(own, lease, key, value)
        for other in self._own.values():
            other.keys.pop(key, None)
        own.keys[key] = value

    async def delete(self, key: str) -> None:
        for name, own in self._own.items():
            if own.keys.pop(key, None) is not None:
                await self._ask(join.DELETE, join.KeyRequest(name, key))
                return

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        self._check_open()
        content = await self._ask(join.GET, prefix)
        return dict(sorted(content.items()))

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        queue = self._watches.open(prefix)
        if self._crew.closed:
            return queue
        mirror = self._mirrors.get(prefix)
        if mirror is None:
            mirror = self._mirrors[prefix] = _Mirror()
            self._crew.start(self._follow(prefix, mirror), f"follow {prefix}")
        elif mirror.synced:
            queue.begin(dict(sorted(mirror.content.items())))
        return queue

    async def revoke(self, lease: LeaseId) -> None:
        if self._drop(lease):
            await self._ask(join.REVOKE, lease)

    async def close(self) -> None:
        if self._crew.closed:
            return
        self._watches.close()
        for lease in list(self._own):
            with suppress(KvoltError):
                await self.revoke(lease)
        await self._crew.close()

    async def abandon(self) -> None:
        """Stop without revoking, as a crash would. For tests."""
        self._watches.close()
        self._own.clear()
        await self._crew.close()

    # -- owning

    async def _keep(self, name: LeaseId, own: _OwnLease) -> None:
        """Hold the lease; whenever the hold breaks, take it again and put everything back."""
        pause_s = _RETRY_FIRST_S
        while True:
            try:
                to = Destination(self._address, join.HOLD)
                async with await open_stream(
                    self._connections, to, join.HoldRequest(name, own.ttl_s), self._standing
                ) as stream:
                    await anext(stream)
                    for key, value in list(own.keys.items()):
                        await self._ask(join.PUT, join.PutRequest(name, key, value))
                    self._turn(connected=True)
                    own.held.set()
                    pause_s = _RETRY_FIRST_S
                    async for _ in stream:
                        pass
            except (*_LOST, KvoltError, StopAsyncIteration) as error:
                self._turn(connected=False, reason=str(error))
            own.held.clear()
            await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
            pause_s = min(pause_s * 2, _RETRY_MAX_S)

    async def _put(self, own: _OwnLease, lease: LeaseId, key: str, value: bytes) -> None:
        request = join.PutRequest(lease, key, value)
        try:
            await self._ask(join.PUT, request)
        except NotFound:
            # The server was restarted and our keeper has not been there yet.
            try:
                async with asyncio.timeout(self._limits.total_s):
                    await own.held.wait()
            except TimeoutError:
                raise self._lost("did not take our lease back") from None
            await self._ask(join.PUT, request)

    def _drop(self, lease: LeaseId) -> bool:
        own = self._own.pop(lease, None)
        if own is None:
            return False
        if own.keeper is not None:
            own.keeper.cancel()
        return True

    # -- reading

    async def _follow(self, prefix: str, mirror: _Mirror) -> None:
        pause_s = _RETRY_FIRST_S
        while True:
            try:
                to = Destination(self._address, join.WATCH)
                async with await open_stream(
                    self._connections, to, prefix, self._standing, _decode_watch
                ) as stream:
                    start = await anext(stream)
                    settles_in_s = start.settles_in_s if isinstance(start, join.WatchStart) else 0.0
                    pause_s = _RETRY_FIRST_S
                    await self._mirror(prefix, mirror, stream, settles_in_s)
            except (*_LOST, KvoltError, StopAsyncIteration) as error:
                self._turn(connected=False, reason=str(error))
            await asyncio.sleep(pause_s * self._rng.uniform(0.75, 1.25))
            pause_s = min(pause_s * 2, _RETRY_MAX_S)

    async def _mirror(
        self, prefix: str, mirror: _Mirror, stream: AsyncIterator[join.WatchItem], settles_in_s: float
    ) -> None:
        """Follow one watch stream to its end."""
        there: dict[str, None] = {}
        synced = False
        forget: asyncio.Task[Any] | None = None
        try:
            async for item in stream:
                if isinstance(item, join.WatchPut):
                    there[item.key] = None
                    self._set(mirror, item.key, item.value)
                elif isinstance(item, join.WatchDelete):
                    there.pop(item.key, None)
                    self._set(mirror, item.key, None)
                elif not synced:
                    synced = True
                    self._turn(connected=True)
                    self._begin(prefix, mirror)
                    forget = self._crew.start(self._forget_missing(mirror, there, settles_in_s), "forget")
        finally:
            if forget is not None:
                forget.cancel()

    async def _forget_missing(self, mirror: _Mirror, there: dict[str, None], after_s: float) -> None:
        """What was known before and is not there is gone, once its owner has had time to put it back."""
        await asyncio.sleep(after_s)
        for key in sorted(mirror.content):
            if key not in there:
                self._set(mirror, key, None)

    def _begin(self, prefix: str, mirror: _Mirror) -> None:
        mirror.synced = True
        for queue in self._watches.waiting():
            if queue.prefix == prefix:
                queue.begin(dict(sorted(mirror.content.items())))

    def _set(self, mirror: _Mirror, key: str, value: bytes | None) -> None:
        if value is None:
            mirror.content.pop(key, None)
        else:
            mirror.content[key] = value
        if mirror.synced:
            self._watches.publish([(key, value)])

    # -- both

    async def _ask(self, endpoint: str, request: Any) -> Any:
        try:
            to = Destination(self._address, endpoint)
            async with await open_stream(self._connections, to, request, self._limits) as stream:
                return await anext(stream)
        except _LOST as error:
            raise self._lost(error.message) from error
        except StopAsyncIteration:
            raise self._lost("gave no answer") from None

    def _lost(self, reason: str) -> DiscoveryLost:
        return DiscoveryLost(f"join server {self._address}: {reason}", address=self._address)

    def _check_open(self) -> None:
        if self._crew.closed:
            raise self._lost("this client is closed")

    def _turn(self, connected: bool, reason: str = "") -> None:
        if connected == self._connected:
            return
        if not connected:
            log.warning("join server %s is lost, going on with what is known: %s", self._address, reason)
        elif self._connected is not None:
            log.warning("join server %s is back", self._address)
        self._connected = connected
        if self._on_state is not None:
            self._on_state(connected)
