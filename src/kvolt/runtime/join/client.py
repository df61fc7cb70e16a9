"""`join` discovery: client of a join server (`--join HOST:PORT`); nothing to install.

Owns reconnecting. One keep-alive task per lease holds it, and after every loss makes the server's keys equal to
the keys of this process. One task per watched prefix mirrors it. While the server is away the mirrors keep their
state; after a reconnect missing keys are kept for a grace period. A silent server counts as away: leases that it
expired during a stall or a partition are no information about their owners.

    put / delete --- lock of the lease ---> server
    keep-alive ----- hold, resync --------> server, whenever the hold broke or a change is uncertain
    mirror task <--- watch ---------------- server ----> mirror ----> watch queues

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

from kvolt.core.errors import (
    AccessDenied,
    DiscoveryLost,
    FieldValue,
    InvalidRequest,
    KeyConflict,
    KvoltError,
    NotFound,
    WorkerLost,
)
from kvolt.runtime.discovery.port import LeaseId, WatchEvent, check_key
from kvolt.runtime.discovery.store_state import Backoff, StoreState
from kvolt.runtime.endpoint.call import Deadlines, ResponseStream, open_stream
from kvolt.runtime.join import server as join
from kvolt.runtime.join.mirror import Mirror
from kvolt.runtime.plane.port import Destination, RequestPlane
from kvolt.runtime.plane.streams import Decode
from kvolt.runtime.tasks import TaskGroup

_OWN_MISTAKES = (AccessDenied, InvalidRequest, KeyConflict)
"""Errors of the caller, raised unchanged."""
_FOREVER_S = 1e9

_decode_any: Decode = msgspec.msgpack.Decoder().decode
_decode_hold: Decode = msgspec.msgpack.Decoder(join.HoldItem).decode
_decode_watch: Decode = msgspec.msgpack.Decoder(join.WatchItem).decode


@dataclass(slots=True, eq=False)
class _OwnLease:
    secret: LeaseId
    """Not from the injected random generator: its other output is public and would make this predictable."""
    task_name: str
    ttl_s: float
    keys: dict[str, bytes] = field(default_factory=dict)
    """Keys put and not deleted; restored whenever the server lost them."""
    on_lost: dict[str, Callable[[], None]] = field(default_factory=dict)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Serialises changes of the lease at the server."""
    is_held: asyncio.Event = field(default_factory=asyncio.Event)
    hold_stream: ResponseStream | None = None
    keepalive: asyncio.Task[Any] | None = None
    needs_resync: bool = False
    """The hold was cancelled locally, so that the keep-alive task resynchronises the keys."""
    last_error: str = ""


class JoinDiscovery:
    """A process's client of a join server. `on_state` gets False when it is lost and True when it is back."""

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
        """`grace_s`: time for owners to restore their keys after a loss, each within `retry_max_s` and a dial."""
        self._plane = plane
        self._address = address
        self._rng = rng
        self._timeout_s = timeout_s
        self._retry_max_s = retry_max_s
        self._grace_s = grace_s
        self._call_deadlines = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=timeout_s, total_s=timeout_s
        )
        self._stream_deadlines = Deadlines(
            connect_s=timeout_s, first_s=timeout_s, between_s=_FOREVER_S, total_s=_FOREVER_S
        )
        self._state = StoreState(f"join_server={address}", on_state)
        self._leases: dict[LeaseId, _OwnLease] = {}
        self._num_leases = 0
        self._mirrors: dict[str, Mirror] = {}
        self._mirror_tasks: dict[str, asyncio.Task[Any]] = {}
        self._streams: dict[ResponseStream, None] = {}
        """Open calls to the server."""
        self._task_group = TaskGroup("discovery-join")
        self._closed = False
        plane.on_silent(self._on_silent)

    # -- the port

    async def lease(self, ttl_s: float, name: LeaseId | None = None) -> LeaseId:
        self._check_open()
        if name is not None and name in self._leases:
            return name
        self._num_leases += 1
        own = _OwnLease(name or LeaseId(secrets.token_hex(16)), f"keeper {self._num_leases}", ttl_s)
        self._leases[own.secret] = own
        own.keepalive = self._task_group.start(self._keep_alive(own), own.task_name)
        try:
            async with asyncio.timeout(self._timeout_s):
                await own.is_held.wait()
        except TimeoutError:
            self._drop_lease(own.secret)
            raise self._lost_error(own.last_error or f"no answer within {self._timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._drop_lease(own.secret)
            raise
        return own.secret

    async def put(
        self, key: str, value: bytes, lease: LeaseId, on_lost: Callable[[], None] | None = None
    ) -> None:
        check_key(key)
        self._check_open()
        own = self._leases.get(lease)
        if own is None:
            raise NotFound("no such lease in this process", kind="lease")
        async with self._time_limit():
            while not await self._try_put(own, key, value):
                await own.is_held.wait()
        own.on_lost.pop(key, None)
        if on_lost is not None:
            own.on_lost[key] = on_lost

    async def delete(self, key: str) -> None:
        self._check_open()
        own = next((own for own in self._leases.values() if key in own.keys), None)
        if own is None:
            return
        # Before the attempt: even if it fails, the key must not be restored.
        del own.keys[key]
        own.on_lost.pop(key, None)
        async with self._time_limit():
            await self._change(own, join.DELETE, join.KeyRequest(own.secret, key))

    async def get_prefix(self, prefix: str) -> Mapping[str, bytes]:
        self._check_open()
        content: dict[str, bytes] = await self._call_server(join.GET, prefix)
        return dict(sorted(content.items()))

    def watch_prefix(self, prefix: str) -> AsyncIterator[WatchEvent]:
        if self._closed:
            closed = Mirror(prefix)
            closed.close()
            return closed.watch()
        self._stop_idle_mirrors(prefix)
        mirror = self._mirrors.get(prefix)
        if mirror is None:
            mirror = self._mirrors[prefix] = Mirror(prefix)
            self._mirror_tasks[prefix] = self._task_group.start(self._run_mirror(mirror), f"follow {prefix}")
        return mirror.watch()

    async def revoke(self, lease: LeaseId) -> None:
        if self._drop_lease(lease):
            await self._call_server(join.REVOKE, lease)

    async def close(self) -> None:
        if self._closed:
            return
        self._end_watches()
        try:
            # One time-out for all leases: without the server they expire by themselves.
            async with asyncio.timeout(self._timeout_s):
                for lease in list(self._leases):
                    with suppress(DiscoveryLost):
                        await self.revoke(lease)
        except TimeoutError:
            pass
        finally:
            await self._task_group.close()

    async def abandon(self) -> None:
        """Stop without revoking, like a crash. For tests."""
        self._end_watches()
        self._leases.clear()
        await self._task_group.close()

    # -- owning

    async def _keep_alive(self, own: _OwnLease) -> None:
        """Hold the lease; whenever the hold breaks, hold it again and resynchronise its keys."""
        backoff = Backoff(self._rng, self._retry_max_s)
        while True:
            try:
                await self._hold_lease(own, backoff)
            except KvoltError as error:
                if not own.needs_resync:
                    own.last_error = str(error.fields.get("reason", error.message))
                    self._state.mark_failed(own.task_name, error.message)
            own.is_held.clear()
            own.hold_stream, own.needs_resync = None, False
            await backoff.pause()

    async def _hold_lease(self, own: _OwnLease, backoff: Backoff) -> None:
        async with AsyncExitStack() as stack:
            async with own.lock:
                request = join.HoldRequest(own.secret, own.ttl_s)
                stream = await stack.enter_async_context(
                    self._open(join.HOLD, request, self._stream_deadlines, _decode_hold)
                )
                held = await self._next(stream)
                await self._resync_keys(own, held.keys)
                own.hold_stream = stream
            backoff.reset()
            self._state.mark_working(own.task_name)
            own.is_held.set()
            while True:
                self._on_key_lost(own, (await self._next(stream)).key)

    async def _resync_keys(self, own: _OwnLease, server_keys: tuple[str, ...]) -> None:
        """Make the server's keys equal to ours, except keys that another lease has acquired."""
        for key in server_keys:
            if key not in own.keys:
                await self._call_server(join.DELETE, join.KeyRequest(own.secret, key))
        for key in list(own.keys):
            value = own.keys.get(key)
            if value is not None:
                try:
                    await self._call_server(join.PUT, join.PutRequest(own.secret, key, value))
                except KeyConflict:
                    self._on_key_lost(own, key)

    @staticmethod
    def _on_key_lost(own: _OwnLease, key: str) -> None:
        own.keys.pop(key, None)
        on_lost = own.on_lost.pop(key, None)
        if on_lost is not None:
            on_lost()

    async def _try_put(self, own: _OwnLease, key: str, value: bytes) -> bool:
        """False if the server does not know the lease (it was restarted) and the hold must come first."""
        try:
            await self._change(own, join.PUT, join.PutRequest(own.secret, key, value))
        except NotFound:
            if self._leases.get(own.secret) is not own:
                raise
            return False
        own.keys[key] = value
        return True

    async def _change(self, own: _OwnLease, endpoint: str, request: Any) -> None:
        needs_resync = True
        try:
            async with own.lock:
                await self._call_server(endpoint, request)
            needs_resync = False
        except _OWN_MISTAKES:
            needs_resync = False
            raise
        finally:
            if needs_resync:
                self._restart_hold(own)

    def _restart_hold(self, own: _OwnLease) -> None:
        """Cancel the hold to resynchronise: a change may or may not have been made, or may be made late."""
        own.is_held.clear()
        if own.hold_stream is not None:
            own.needs_resync = True
            own.hold_stream.call.cancel()

    def _drop_lease(self, lease: LeaseId) -> bool:
        own = self._leases.pop(lease, None)
        if own is None:
            return False
        if own.keepalive is not None:
            own.keepalive.cancel()
        self._state.remove_task(own.task_name)
        return True

    # -- reading

    async def _run_mirror(self, mirror: Mirror) -> None:
        backoff = Backoff(self._rng, self._retry_max_s)
        name = f"watch {mirror.prefix}"
        while True:
            try:
                async with self._open(
                    join.WATCH, mirror.prefix, self._stream_deadlines, _decode_watch
                ) as stream:
                    start = await self._next(stream)
                    backoff.reset()
                    grace_s = max(start.settles_in_s, self._grace_s)
                    await mirror.apply_stream(stream, grace_s, lambda: self._state.mark_working(name))
                    raise self._lost_error("ended our watch")
            except KvoltError as error:
                self._state.mark_failed(name, error.message)
            await backoff.pause()

    def _stop_idle_mirrors(self, requested: str) -> None:
        idle = [mirror.prefix for mirror in self._mirrors.values() if not mirror.is_watched]
        for prefix in idle:
            if prefix == requested:
                continue
            del self._mirrors[prefix]
            self._mirror_tasks.pop(prefix).cancel()
            self._state.remove_task(f"watch {prefix}")

    def _on_silent(self, address: str, is_silent: bool) -> None:
        if is_silent and address == self._address:
            for stream in list(self._streams):
                stream.call.cancel(WorkerLost(f"{address} is silent", address=address, reason="heartbeat"))

    def _end_watches(self) -> None:
        self._closed = True
        self._plane.remove_listeners(self._on_silent)
        for mirror in self._mirrors.values():
            mirror.close()

    # -- both

    async def _call_server(self, endpoint: str, request: Any) -> Any:
        async with self._open(endpoint, request, self._call_deadlines, _decode_any) as stream:
            return await self._next(stream)

    @asynccontextmanager
    async def _open(
        self, endpoint: str, request: Any, deadlines: Deadlines, decode: Decode
    ) -> AsyncIterator[ResponseStream]:
        to = Destination(self._address, endpoint)
        try:
            stream = await open_stream(self._plane, to, request, deadlines, decode)
        except KvoltError as error:
            raise self._to_port_error(error) from error
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
            raise self._lost_error("ended the stream") from None
        except KvoltError as error:
            raise self._to_port_error(error) from error

    def _to_port_error(self, error: KvoltError) -> KvoltError:
        """Map errors for callers of the port: their own mistakes unchanged, everything else to DiscoveryLost."""
        unknown_lease = isinstance(error, NotFound) and error.fields.get("kind") == "lease"
        own_mistake = unknown_lease or isinstance(error, _OWN_MISTAKES)
        return error if own_mistake else self._lost_error(error.message, error.fields.get("remedy"))

    @asynccontextmanager
    async def _time_limit(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except TimeoutError:
            raise self._lost_error(f"no answer within {self._timeout_s:g} s") from None

    def _lost_error(self, reason: str, remedy: FieldValue = None) -> DiscoveryLost:
        message = f"join server {self._address}: {reason}"
        if remedy is None:
            return DiscoveryLost(message, address=self._address, reason=reason)
        return DiscoveryLost(message, address=self._address, reason=reason, remedy=remedy)

    def _check_open(self) -> None:
        if self._closed:
            raise self._lost_error("this client is closed")
