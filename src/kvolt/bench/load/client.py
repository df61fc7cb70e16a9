"""Low-overhead HTTP client: protocols on the Network port, without a task or object per token.

Owns connections (keep-alive, pooled, bounded) and timeouts. Must not know requests or measurements: each call has a
Handler that receives the response.

When all connections are in use, calls wait in order until their timeouts. A call on a reused connection that closes
before the first response byte is sent once more, as browsers do.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Protocol, cast

import msgspec

from kvolt.bench.load.http_reader import BodyReader, ResponseReader
from kvolt.bench.load.sample import Failure
from kvolt.core.errors import ConnectFailed, ProtocolError
from kvolt.runtime.clock import Clock
from kvolt.runtime.network import ProtocolFactory, tune_socket
from kvolt.runtime.tasks import TaskGroup


class Dialer(Protocol):
    """The client part of the Network port."""

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol: ...


class Handler(Protocol):
    """Receives the response of a call; ends with exactly one call of `end` or `fail`."""

    @property
    def has_started(self) -> bool:
        """Whether the first token arrived, which ends the first-token timeout."""
        ...

    def sent(self, now: float) -> None: ...

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> BodyReader:
        """Return the reader of the body. Its ProtocolError ends the call."""
        ...

    def end(self, now: float) -> None: ...

    def fail(self, kind: str, message: str, now: float) -> None: ...


class ClientLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts and maximum numbers of connections."""

    connect_s: float = 10.0
    first_token_s: float = 300.0
    total_s: float = 1800.0
    max_connections: int = 10_000
    max_connecting: int = 128
    """Maximum concurrent connects, about the length of a server's accept queue."""


class Call:
    """One running request."""

    __slots__ = ("connection", "handler", "is_over", "request", "timer", "was_sent_twice")

    def __init__(self, request: bytes, handler: Handler) -> None:
        self.request = request
        self.handler = handler
        self.connection: _Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.was_sent_twice = False
        self.is_over = False


class HttpClient:
    """Calls to one server; `close` ends its connections."""

    def __init__(self, dialer: Dialer, clock: Clock, address: str, limits: ClientLimits) -> None:
        self._dialer = dialer
        self._address = address
        self._limits = limits
        self.now = clock.monotonic
        self._loop = asyncio.get_running_loop()
        self._task_group = TaskGroup("bench-connect")
        self._waiting: deque[Call] = deque()
        self._idle: list[_Connection] = []
        """Idle connections, last used first, so that surplus ones reach the server's idle timeout."""
        self._open: dict[_Connection, None] = {}
        self._num_connecting = 0
        self._closed = False

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def submit(self, request: bytes, handler: Handler) -> Call:
        call = Call(request, handler)
        first_s = min(self._limits.first_token_s, self._limits.total_s)
        call.timer = self._loop.call_later(first_s, self._first_token_due, call)
        self._waiting.append(call)
        self._assign()
        return call

    def give_up(self, call: Call, kind: str, message: str) -> None:
        """Fail a call now, unless it has ended."""
        if call.is_over:
            return
        connection = call.connection
        if connection is None:
            self._waiting.remove(call)
        else:
            connection.drop()
        self.finish(call).fail(kind, message, self.now())
        self._assign()

    async def close(self) -> None:
        """Close all connections; running calls fail."""
        self._closed = True
        await self._task_group.close()
        for call in list(self._waiting):
            self.give_up(call, Failure.CUT, "the client was closed")
        for connection in list(self._open):
            if connection.call is not None:
                self.give_up(connection.call, Failure.CUT, "the client was closed")
            else:
                connection.drop()

    # -- for connections

    def finish(self, call: Call) -> Handler:
        """Mark a call as ended and return its handler, which the caller notifies."""
        call.is_over = True
        call.connection = None
        if call.timer is not None:
            call.timer.cancel()
            call.timer = None
        return call.handler

    def opened(self, connection: _Connection) -> None:
        self._open[connection] = None

    def release(self, connection: _Connection) -> None:
        """Return a connection to the pool."""
        self._idle.append(connection)
        self._assign()

    def forget(self, connection: _Connection) -> None:
        """Remove a connection that is closed or closing."""
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def lost(self, call: Call, was_reused: bool, reason: str) -> None:
        """Handle the loss of a connection with an incomplete response."""
        call.connection = None
        if was_reused and not call.was_sent_twice and not self._closed:
            call.was_sent_twice = True
            self._waiting.appendleft(call)
        else:
            self.finish(call).fail(Failure.HANG_UP, reason, self.now())
        self._assign()

    def failed(self, call: Call, error: ProtocolError) -> None:
        self.finish(call).fail(Failure.PROTOCOL, error.message, self.now())
        self._assign()

    # -- inside

    def _assign(self) -> None:
        """Assign waiting calls to idle connections and open new ones for the rest."""
        if self._closed:
            return
        while self._waiting and self._idle:
            self._idle.pop().start(self._waiting.popleft())
        limits = self._limits
        num_wanted = min(
            len(self._waiting) - self._num_connecting,
            limits.max_connections - len(self._open) - self._num_connecting,
            limits.max_connecting - self._num_connecting,
        )
        for _ in range(num_wanted):
            self._num_connecting += 1
            self._task_group.start(self._connect(), "connect")

    async def _connect(self) -> None:
        failure: str | None = None
        try:
            made = await self._dialer.connect(
                self._address, lambda: _Connection(self), self._limits.connect_s
            )
            connection = cast(_Connection, made)
            if connection in self._open:
                self._idle.append(connection)
            else:
                failure = f"{self._address} closed the connection at once"
        except (ConnectFailed, UnicodeError) as error:  # UnicodeError: invalid host name
            failure = str(error)
        finally:
            self._num_connecting -= 1
        if failure is not None and self._waiting:
            call = self._waiting.popleft()
            self.finish(call).fail(Failure.CONNECT, failure, self.now())
        self._assign()

    def _first_token_due(self, call: Call) -> None:
        limits = self._limits
        if not call.handler.has_started:
            message = f"no token within {limits.first_token_s:g} s"
            self.give_up(call, Failure.FIRST_TOKEN_TIMEOUT, message)
            return
        left_s = max(0.0, limits.total_s - limits.first_token_s)
        call.timer = self._loop.call_later(left_s, self._answer_due, call)

    def _answer_due(self, call: Call) -> None:
        self.give_up(call, Failure.TOTAL_TIMEOUT, f"not complete within {self._limits.total_s:g} s")


class _Connection(asyncio.Protocol):
    """One connection with one call at a time."""

    __slots__ = ("_body", "_client", "_now", "_num_calls", "_reader", "_transport", "call")

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._now = client.now
        self._reader = ResponseReader()
        self._transport: asyncio.Transport | None = None
        self._body: BodyReader | None = None
        """None before the response head."""
        self._num_calls = 0
        self.call: Call | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        tune_socket(transport)
        self._client.opened(self)

    def start(self, call: Call) -> None:
        assert self._transport is not None
        self.call, call.connection = call, self
        self._num_calls += 1
        self._body = None
        self._reader.begin()
        self._transport.write(call.request)
        call.handler.sent(self._client.now())

    def data_received(self, data: bytes) -> None:
        call = self.call
        if call is None:
            self.drop()  # unsolicited data: the server is about to close
            return
        now = self._now()
        reader, body = self._reader, self._body
        try:
            pieces = reader.feed(data)
            if body is None:
                if reader.status is None:
                    return
                body = self._body = call.handler.head(reader.status, reader.headers)
            body(pieces, now)
        except ProtocolError as error:
            self.drop()
            self._client.failed(call, error)
            return
        if reader.done:
            self._end(call, now)

    def connection_lost(self, error: Exception | None) -> None:
        call, self.call = self.call, None
        self._transport = None
        self._client.forget(self)
        if call is None:
            return
        if self._body is not None:
            try:
                self._reader.end()  # the end of the connection may end the response
            except ProtocolError as broken:
                reason = str(error) if error is not None else broken.message
                self._client.lost(call, False, reason)
            else:
                self._client.finish(call).end(self._client.now())
            return
        reason = str(error) if error is not None else "the server closed the connection without a response"
        self._client.lost(call, self._num_calls > 1, reason)

    def drop(self) -> None:
        """Close immediately without notifying the handler."""
        self.call = None
        self._client.forget(self)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    def _end(self, call: Call, now: float) -> None:
        handler = self._client.finish(call)
        self.call = None
        if self._reader.reusable:
            self._client.release(self)
        else:
            self.drop()
        handler.end(now)
