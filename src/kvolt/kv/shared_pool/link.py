"""PoolLink: a worker's connection to the shared pool, opened on demand and closed if the pool does not respond."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from kvolt.core.errors import MALFORMED, KvoltError, NetworkFault, TransferFailed, from_info
from kvolt.core.ids import InstanceId
from kvolt.kv.shared_pool import wire
from kvolt.kv.tiers.slot_memory import BlockShape
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_MAX_TIMEOUTS = 3
"""Consecutive request timeouts after which the connection is closed."""
_RETRY_S = 2.0
"""Delay before a reconnect."""
_HELLO_S = 35.0
"""Deadline for the handshake, during which the pool may recover its disk tier."""

Expected = TypeVar("Expected", bound=wire.PoolResponse)


class PoolLink:
    """See the module."""

    def __init__(self, path: Path, shape: BlockShape | None, now: Callable[[], float]) -> None:
        """`shape`: block shape of the client; None for a client that only requests the status."""
        self._path = path
        self._shape = shape
        self._now = now
        self.on_lost: Callable[[], None] = lambda: None
        self.on_late: Callable[[wire.PoolResponse], None] = lambda _: None
        """Called with a response whose caller is gone."""
        self.pool: InstanceId | None = None
        """Instance id under which the connected pool publishes its blocks."""
        self.on_pool: Callable[[], None] = lambda: None
        """Called when `pool` changes."""
        self._is_lost = asyncio.Event()
        self._num_timeouts = 0
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._retry_at = float("-inf")
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[wire.PoolResponse]] = {}
        self._task_group = TaskGroup("kv pool link")

    async def connect(self) -> None:
        """Connect if necessary. NetworkFault if the pool is unreachable, ConfigError if its blocks have another
        shape."""
        async with self._connecting:
            if self._writer is not None:
                return
            if self._task_group.closed or self._now() < self._retry_at:
                raise NetworkFault(f"no pool is reachable at {self._path}")
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                self._retry_at = self._now() + _RETRY_S
                raise NetworkFault(
                    f"no pool is reachable at {self._path}: {error.strerror or error}",
                    remedy="start it with `kvolt cache serve`",
                ) from None
            self._writer = writer
            self._is_lost.clear()
            self._task_group.start(self._listen(reader, writer), "listen")
            if self._shape is None:
                return
            try:
                hello = await self._send_request(wire.Hello(self._shape), wire.HelloResult)
            except BaseException:
                self._disconnect(writer)
                raise
            if self._writer is writer:  # still connected
                self._set_pool(hello.pool)

    def keep_connected(self) -> None:
        """Keep reconnecting from now on, since routers send prompts for the pool's blocks."""
        self._task_group.start(self._reconnect(), "reconnect")

    async def _reconnect(self) -> None:
        reported = ""
        while True:
            try:
                async with asyncio.timeout(_HELLO_S):
                    await self.connect()
                reported = ""
                await self._is_lost.wait()
            except NetworkFault:
                pass  # not running
            except (KvoltError, TimeoutError) as error:
                reason = str(error) or "timeout"
                if reason != reported:
                    reported = reason
                    log.warning("shared pool unusable: path=%s error=%s", self._path, reason)
            await asyncio.sleep(_RETRY_S)

    def _set_pool(self, pool: InstanceId | None) -> None:
        if pool != self.pool:
            self.pool = pool
            self.on_pool()

    async def request(self, body: wire.PoolRequest, expected: type[Expected], timeout_s: float) -> Expected:
        """Send a request and return the response. KvoltError on a timeout, an error or an unexpected response."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.connect()
                response = await self._send_request(body, expected)
        except TimeoutError:
            self._num_timeouts += 1
            if self._num_timeouts >= _MAX_TIMEOUTS:
                self.disconnect("timeout")
            raise NetworkFault(f"no response from the pool within {timeout_s:g} s") from None
        self._num_timeouts = 0
        return response

    async def _send_request(self, request: wire.PoolRequest, expected: type[Expected]) -> Expected:
        writer = self._writer
        if writer is None:
            raise NetworkFault("connection to the pool lost")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(wire.frame(wire.RequestFrame(number, request)))
            await writer.drain()
            body = await future
        except OSError as error:
            raise NetworkFault(f"connection to the pool lost: {error}") from None
        finally:
            self._waiting.pop(number, None)
        if isinstance(body, wire.ErrorResponse):
            raise from_info(body.error)
        if not isinstance(body, expected):
            raise TransferFailed("unexpected response from the pool", path="pool", reason="answer")
        return body

    def disconnect(self, reason: str) -> None:
        """Close the connection; it is reopened after a delay."""
        if self._writer is not None:
            log.warning("shared pool disconnected: reason=%s retry_s=%g", reason, _RETRY_S)
            self._disconnect(self._writer)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                response = msgspec.msgpack.decode(await wire.read_frame(reader), type=wire.ResponseFrame)
                waiting = self._waiting.get(response.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(response.body)
                else:
                    self.on_late(response.body)
        except (KvoltError, *MALFORMED) as error:
            log.warning("shared pool lost: error=%s", error)
        finally:
            self._disconnect(writer)

    def _disconnect(self, writer: asyncio.StreamWriter) -> None:
        writer.close()
        if self._writer is not writer:
            return
        self._writer = None
        self._retry_at = self._now() + _RETRY_S
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(NetworkFault("connection to the pool lost"))
        self._is_lost.set()
        self._set_pool(None)
        self.on_lost()

    async def close(self) -> None:
        await self._task_group.close()
        if self._writer is not None:
            self._disconnect(self._writer)
