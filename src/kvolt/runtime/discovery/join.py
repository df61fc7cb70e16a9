"""Discovery through a join server: `--join HOST:PORT`, nothing to install.

Owns reconnecting: one keeper per lease holds it and, after every loss, brings what the server has in line
with what this process owns; one follower per watched prefix mirrors it. While the server is away the
mirrors stand still, and when it is back what is missing is believed for a while longer. A silent server is
away: what it would say after a stall or a partition, of leases that expired in that time, is not news.

    put / delete --- turn of the lease ---> server
    keeper --------- hold, put back ------> server, whenever the hold broke or a change was left in doubt
    follower <------ watch ---------------- server ----> mirror ----> watch queues

The connection to the server may carry other calls, in both directions. Only our own calls end when it is silent.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvolt.core.errors import DiscoveryLost, InvalidRequest, KeyConflict, KvoltError, NotFound, WorkerLost
from kvolt.runtime.discovery import join_server as join
from kvolt.runtime.discovery.join_mirror import Mirror
from kvolt.runtime.discovery.join_state import Backoff, ServerState
from kvolt.runtime.discovery.port import LeaseId, WatchEvent, check_key
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream
from kvolt.runtime.endpoint.client import open_stream
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.tasks import Crew

_FOREVER_S = 1e9

_decode_any: Decode = msgspec.msgpack.Decoder().decode
_decode_hold: Decode = msgspec.msgpack.Decoder(join.HoldItem).decode
_decode_watch: Decode = msgspec.msgpack.Decoder(join.WatchItem).decode


@dataclass(slots=True, eq=False)
class _OwnLease:
    secret: LeaseId
    """Not from the injected generator: its other output is public, and would let others predict this."""
    task: str
    ttl_s: float
    keys: dict[str, bytes] = field(default_factory=dict)
    """What was put and not deleted: put back whenever the server lost it."""
    on_lost: dict[str, Callable[[], None]] = field(default_factory=dict)
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Whoever has it may change what the lease has at the server."""
    held: asyncio.Event = field(default_factory=asyncio.Event)
    hold: ResponseStream | None = None
    keeper: asyncio.Task[Any] | None = None
    in_doubt: bool = False
    """The hold was given up by ourselves, for the keeper to go over what the server has."""
    trouble: str = ""


class JoinDiscovery:
    """One process's client of a join server. `on_state` is told when it is lost and when it is back."""

    def __init__(
        self,
        plane: RequestPlane,
        address: str,
        rng: random.Random,
        timeout_s: float = 5.0,
        on_state: Callable[[bool], None] | None = None,
        *,
        retry_max_s: float = 2.0,
        grace_s: float = 5.0,
    ) -> None:
        """`grace_s`: after a loss owners come back one by one, each after at most `retry_max_s` and a dial."""
        self._plane = plane
        self._address = address
        self._rng = rng
        self._timeout_s = timeout_s
        self._retry_max_s = retry_max_s
        self._grace_s = grace_s
        self._limits = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=timeout_s, total_s=timeout_s
        )
        self._standing = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=_FOREVER_S, total_s=_FOREVER_S
        )
        self._state = ServerState(address, on_state)
        self._own: dict[LeaseId, _OwnLease] = {}
        self._num_leases = 0
        self._mirrors: dict[str, Mirror] = {}
        self._followers: dict[str, asyncio.Task[Any]] = {}
        self._streams: dict[ResponseStream, None] = {}
        """Open calls to the server."""
        self._crew = Crew("discovery-join")
        self._closed = False
        plane.on_silent(self._on_silent)

    # -- the port

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        self._check_open()
        if name is not None and name in self._own:
            return name
        self._num_leases += 1
        own = _OwnLease(name or LeaseId(secrets.token_hex(16)), f"keeper {self._num_leases}", ttl_s)
        self._own[own.secret] = own
        own.keeper = self._crew.start(self._keep(own), own.task)
        try:
            async with asyncio.timeout(self._timeout_s):
                await own.held.wait()
        except TimeoutError:
            self._drop(own.secret)
            raise self._lost(own.trouble or f"no answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._drop(own.secret)
            raise
        return own.secret

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        check_key(key)
        self._check_open()
        own = self._own.get(lease)
        if own is None:
            raise NotFound("no such lease in this process", kind="lease")
        async with self._in_time():
            while not await self._try_put(own, key, value):
                await own.held.wait()
        own.on_lost.pop(key, None)
        if on_lost is not None:
            own.on_lost[key] = on_lost

    async def delete(self, key: str) -> None:
        self._check_open()
        own = next((own for own in self._own.values() if key in own.keys), None)
        if own is None:
            return
        # Before the attempt: even if it fails, the key must not be put back.
        del own.keys[key]
        own.on_lost.pop(key, None)
        async with self._in_time():
            await self._change(own, join.DELETE, join.KeyRequest(own.secret, key))

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        self._check_open()
        content: dict[str, bytes] = await self._ask(join.GET, prefix)
        return dict(sorted(content.items()))

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        if self._closed:
            closed = Mirror(prefix)
            closed.close()
            return closed.watch()
        self._stop_idle_followers(prefix)
        mirror = self._mirrors.get(prefix)
        if mirror is None:
            mirror = self._mirrors[prefix] = Mirror(prefix)
            self._followers[prefix] = self._crew.start(self._follow(mirror), f"follow {prefix}")
        return mirror.watch()

    async def revoke(self, lease: LeaseId) -> None:
        if self._drop(lease):
            await self._ask(join.REVOKE, lease)

    async def close(self) -> None:
        if self._closed:
            return
        self._end_watches()
        try:
            # All of them in the time of one: with the server away they end by themselves.
            async with asyncio.timeout(self._timeout_s):
                for lease in list(self._own):
                    with suppress(DiscoveryLost):
                        await self.revoke(lease)
        except TimeoutError:
            pass
        finally:
            await self._crew.close()

    async def abandon(self) -> None:
        """Stop without revoking, as a crash would. For tests."""
        self._end_watches()
        self._own.clear()
        await self._crew.close()

    # -- owning

    async def _keep(self, own: _OwnLease) -> None:
        """Hold the lease; whenever the hold breaks, take it again and put everything back."""
        backoff = Backoff(self._rng, self._retry_max_s)
        while True:
            try:
                await self._hold(own, backoff)
            except KvoltError as error:
                if not own.in_doubt:
                    own.trouble = str(error.fields.get("reason", error.message))
                    self._state.failed(own.task, error.message)
            own.held.clear()
            own.hold, own.in_doubt = None, False
            await backoff.pause()

    async def _hold(self, own: _OwnLease, backoff: Backoff) -> None:
        async with AsyncExitStack() as stack:
            async with own.turn:
                request = join.HoldRequest(own.secret, own.ttl_s)
                stream = await stack.enter_async_context(
                    self._open(join.HOLD, request, self._standing, _decode_hold)
                )
                held = await self._next(stream)
                await self._put_back(own, held.keys)
                own.hold = stream
            backoff.reset()
            self._state.works(own.task)
            own.held.set()
            while True:
                self._lose(own, (await self._next(stream)).key)

    async def _put_back(self, own: _OwnLease, there: tuple[str, ...]) -> None:
        """Make the server have what we own: no more, no less, and nothing that another lease owns by now."""
        for key in there:
            if key not in own.keys:
                await self._ask(join.DELETE, join.KeyRequest(own.secret, key))
        for key in list(own.keys):
            value = own.keys.get(key)
            if value is not None:
                try:
                    await self._ask(join.PUT, join.PutRequest(own.secret, key, value))
                except KeyConflict:
                    self._lose(own, key)

    @staticmethod
    def _lose(own: _OwnLease, key: str) -> None:
        own.keys.pop(key, None)
        on_lost = own.on_lost.pop(key, None)
        if on_lost is not None:
            on_lost()

    async def _try_put(self, own: _OwnLease, key: str, value: bytes) -> bool:
        """False: the server does not know our lease (it was restarted), so the keeper has to go there first."""
        try:
            await self._change(own, join.PUT, join.PutRequest(own.secret, key, value))
        except NotFound:
            if self._own.get(own.secret) is not own:
                raise
            return False
        own.keys[key] = value
        return True

    async def _change(self, own: _OwnLease, endpoint: str, request: Any) -> None:
        in_doubt = True
        try:
            async with own.turn:
                await self._ask(endpoint, request)
            in_doubt = False
        except (InvalidRequest, KeyConflict):
            in_doubt = False
            raise
        finally:
            if in_doubt:
                self._break_hold(own)

    def _break_hold(self, own: _OwnLease) -> None:
        """A change may have been made or not, or may be made late: let the keeper go over it."""
        own.held.clear()
        if own.hold is not None:
            own.in_doubt = True
            own.hold.call.cancel()

    def _drop(self, lease: LeaseId) -> bool:
        own = self._own.pop(lease, None)
        if own is None:
            return False
        if own.keeper is not None:
            own.keeper.cancel()
        self._state.forget(own.task)
        return True

    # -- reading

    async def _follow(self, mirror: Mirror) -> None:
        backoff = Backoff(self._rng, self._retry_max_s)
        name = f"watch {mirror.prefix}"
        while True:
            try:
                async with self._open(join.WATCH, mirror.prefix, self._standing, _decode_watch) as stream:
                    start = await self._next(stream)
                    backoff.reset()
                    grace_s = max(start.settles_in_s, self._grace_s)
                    await mirror.follow(stream, grace_s, lambda: self._state.works(name))
                    raise self._lost("ended our watch")
            except KvoltError as error:
                self._state.failed(name, error.message)
            await backoff.pause()

    def _stop_idle_followers(self, wanted: str) -> None:
        idle = [mirror.prefix for mirror in self._mirrors.values() if not mirror.is_watched]
        for prefix in idle:
            if prefix == wanted:
                continue
            del self._mirrors[prefix]
            self._followers.pop(prefix).cancel()
            self._state.forget(f"watch {prefix}")

    def _on_silent(self, address: str, is_silent: bool) -> None:
        if is_silent and address == self._address:
            for stream in list(self._streams):
                stream.call.cancel(WorkerLost(f"{address} is silent", address=address, reason="heartbeat"))

    def _end_watches(self) -> None:
        self._closed = True
        self._plane.forget(self._on_silent)
        for mirror in self._mirrors.values():
            mirror.close()

    # -- both

    async def _ask(self, endpoint: str, request: Any) -> Any:
        async with self._open(endpoint, request, self._limits, _decode_any) as stream:
            return await self._next(stream)

    @asynccontextmanager
    async def _open(
        self, endpoint: str, request: Any, limits: Deadlines, decode: Decode
    ) -> AsyncIterator[ResponseStream]:
        to = Destination(self._address, endpoint)
        try:
            stream = await open_stream(self._plane, to, request, limits, decode)
        except KvoltError as error:
            raise self._translated(error) from error
        self._streams[stream] = None
        try:
            async with stream:
                yield stream
        finally:
            del self._streams[stream]

    async def _next(self, stream: ResponseStream) -> Any:
        try:
            return await anext(stream)
        except StopAsyncIteration:
            raise self._lost("ended the stream") from None
        except KvoltError as error:
            raise self._translated(error) from error

    def _translated(self, error: KvoltError) -> KvoltError:
        """What a caller of the port may see: its own mistakes as they are, all else as a loss."""
        unknown_lease = isinstance(error, NotFound) and error.fields.get("kind") == "lease"
        own_mistake = unknown_lease or isinstance(error, InvalidRequest | KeyConflict)
        return error if own_mistake else self._lost(error.message)

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise self._lost(f"no answer within {self._timeout_s:g} s") from None

    def _lost(self, reason: str) -> DiscoveryLost:
        return DiscoveryLost(f"join server {self._address}: {reason}", address=self._address, reason=reason)

    def _check_open(self) -> None:
        if self._closed:
            raise self._lost("this client is closed")
