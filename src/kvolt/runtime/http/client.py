"""HTTP/1.1 client of one server: reuses connections, streams responses, needs no task per response.

Every call has a Receiver, which is called as the response arrives; coroutines use `open` and `fetch` instead.
Abandoning a call closes its connection, which notifies the server.

When `max_connections` are in use, calls wait in order. If a kept-alive connection turns out to be closed before the
first byte of a response, the call is sent once more, as browsers do.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, Self, cast

import httptools

from kvolt.core.errors import (
    ConnectFailed,
    DeadlineExceeded,
    KvoltError,
    ProtocolError,
    WorkerLost,
)
from kvolt.runtime.http.client_call import HttpCall, Receiver, Timeouts
from kvolt.runtime.http.server_url import ServerUrl
from kvolt.runtime.http.streamed_response import Fetched, StreamedResponse
from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.runtime.network import ProtocolFactory, SocketNetwork, tune_socket
from kvolt.runtime.tasks import TaskGroup
from kvolt.version import __version__

_MAX_CONNECTIONS = 10_000
_MAX_CONNECTING = 128
"""Maximum concurrent connects, about the length of a server's accept queue."""
_MAX_IDLE = 64
_MAX_FETCHED_BYTES = 32 << 20
_MAX_HEADERS = 256
_MAX_HEAD_BYTES = 64 << 10


class Connector(Protocol):
    """The client part of the Network port."""

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol: ...


class HttpClient:
    """HTTP client of one server, for one event loop; `close` closes its connections."""

    def __init__(
        self,
        url: ServerUrl,
        *,
        connect_s: float = 10.0,
        max_connections: int = _MAX_CONNECTIONS,
        max_idle: int = _MAX_IDLE,
        network: Connector | None = None,
        now: Callable[[], float] | None = None,
    ) -> None:
        """`now` is the clock of the times that receivers get."""
        self.url = url
        self._connect_s = connect_s
        self._max_connections = max_connections
        self._max_idle = max_idle
        self._loop = asyncio.get_running_loop()
        self.now = now or self._loop.time
        self._network = network or SocketNetwork(tls=ssl.create_default_context() if url.is_secure else None)
        self._task_group = TaskGroup("http-connect")
        self._waiting: deque[HttpCall] = deque()
        self._idle: list[_Connection] = []
        """Unused connections, most recently used last, so that surplus ones reach the server's idle timeout."""
        self._open: dict[_Connection, None] = {}
        self._num_connecting = 0
        self._headers = f"host: {url.address}\r\nuser-agent: kvolt/{__version__}\r\naccept: */*\r\n" + (
            f"authorization: Bearer {url.api_key}\r\n" if url.api_key else ""
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def send(
        self, path: str, body: bytes | None, receiver: Receiver, timeouts: Timeouts | None = None
    ) -> HttpCall:
        """Send a POST with a JSON body, or a GET without one."""
        method = "GET" if body is None else "POST"
        content = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._headers}{content}\r\n"
        call = HttpCall(
            head.encode("latin-1") + (body or b""), receiver, timeouts, self.url.text, self._withdraw
        )
        if timeouts is not None:
            call.timer = LazyTimer(self._loop, call.on_timeout)
            call.arm()
        self._waiting.append(call)
        self.assign()
        return call

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes | None, timeouts: Timeouts
    ) -> AsyncIterator[StreamedResponse]:
        """Send a request and wait for the head of its response. The call is abandoned at the end of the context."""
        response = StreamedResponse()
        call = self.send(path, body, response, timeouts)
        try:
            await response.wait_head()
            yield response
        finally:
            call.abandon()

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> Fetched:
        """Fetch a whole response, whatever its status. Raises the errors of `Receiver.fail`."""
        try:
            async with (
                asyncio.timeout(timeout_s),
                self.open(path, body, Timeouts(timeout_s, timeout_s)) as response,
            ):
                return Fetched(response.status, await response.read(_MAX_FETCHED_BYTES))
        except TimeoutError:
            message = f"no response from {self.url.text}{path} within {timeout_s:g} s"
            raise DeadlineExceeded(message, stage="total", after_s=timeout_s) from None

    async def close(self) -> None:
        """Drop all connections and abandon calls in progress."""
        await self._task_group.close()
        for call in list(self._waiting):
            call.abandon()
        for connection in list(self._open):
            connection.drop()

    # --- for Call and _Connection

    def assign(self) -> None:
        """Assign waiting calls to idle connections, and open new connections for the rest."""
        if self._task_group.closed:
            return
        while self._waiting and self._idle:
            self._idle.pop().start(self._waiting.popleft())
        num_new = min(
            len(self._waiting) - self._num_connecting,
            self._max_connections - len(self._open) - self._num_connecting,
            _MAX_CONNECTING - self._num_connecting,
        )
        for _ in range(num_new):
            self._num_connecting += 1
            self._task_group.start(self._connect(), "connect")

    def resend(self, call: HttpCall) -> None:
        """Send a call on a new connection: the server had closed an idle one, and so probably the others."""
        for connection in list(self._idle):
            connection.drop()
        self._waiting.appendleft(call)

    def _withdraw(self, call: HttpCall) -> None:
        if call.connection is not None:
            call.connection.drop()
            self.assign()
        elif call in self._waiting:
            self._waiting.remove(call)

    def add_connection(self, connection: _Connection) -> None:
        self._open[connection] = None

    def release(self, connection: _Connection) -> None:
        if self._task_group.closed or (len(self._idle) >= self._max_idle and not self._waiting):
            connection.drop()
        else:
            self._idle.append(connection)
            self.assign()

    def remove_connection(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> None:
        address = self.url.address
        try:
            connection = cast(
                _Connection,
                await self._network.connect(address, lambda: _Connection(self), self._connect_s),
            )
            if connection not in self._open:
                raise ConnectFailed(f"{address} closed the connection at once", address=address)
            if connection.is_self_connected:
                connection.drop()
                raise ConnectFailed(f"cannot connect to {address}: connection refused", address=address)
            self._idle.append(connection)
        except ConnectFailed as error:
            if self._waiting:
                self._fail_connect(self._waiting.popleft(), error)
        finally:
            self._num_connecting -= 1
        self.assign()

    def _fail_connect(self, call: HttpCall, error: ConnectFailed) -> None:
        if call.num_sent:  # sent over a connection that the server then closed
            message = f"{self.url.text} closed the connection and is unreachable: {error.message}"
            call.fail(WorkerLost(message, address=self.url.address, reason="unreachable"))
        else:
            call.fail(error)


class _Connection(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._call: HttpCall | None = None
        self._num_calls = 0
        self._status = 0
        """0 before the response head."""
        self._headers: dict[str, str] = {}
        self._num_headers = 0
        self._pieces: list[bytes] = []
        """Parts of the body in the bytes being parsed."""
        self._num_unparsed_bytes = 0
        """Bytes received since the last part of a body; the parser buffers an incomplete header."""
        self._has_response_bytes = False
        self._is_complete = self._is_reusable = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        tune_socket(transport)
        self._client.add_connection(self)

    @property
    def is_self_connected(self) -> bool:
        """Whether the connection is connected to itself, which the kernel allows for a local port without a
        listener."""
        transport = self._transport
        if transport is None or transport.get_extra_info("socket") is None:
            return False
        return bool(transport.get_extra_info("sockname") == transport.get_extra_info("peername"))

    def start(self, call: HttpCall) -> None:
        assert self._transport is not None
        self._call, call.connection = call, self
        call.num_sent += 1
        self._num_calls += 1
        self._status = self._num_headers = self._num_unparsed_bytes = 0
        self._has_response_bytes = self._is_complete = False
        self._headers = {}
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(call.request)
        call.sent_at = self._client.now()

    def drop(self) -> None:
        """Close immediately without callbacks."""
        call, self._call = self._call, None
        if call is not None:
            call.connection = None
        self._parser = None
        self._client.remove_connection(self)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # --- asyncio's callbacks

    def data_received(self, data: bytes) -> None:
        call, parser = self._call, self._parser
        if call is None or parser is None:
            self.drop()  # unsolicited bytes: the server is about to close
            return
        now = self._client.now()
        self._has_response_bytes = True
        failure: KvoltError | None = None
        try:
            parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            cause = error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else None
            failure = cause if isinstance(cause, KvoltError) else _invalid_response(error)
        pieces, self._pieces = self._pieces, []
        if call.is_over:  # abandoned by its receiver
            return
        if pieces:
            self._num_unparsed_bytes = 0
            call.last_byte_at = now
            call.arm()
            try:
                call.receiver.data(pieces, now)
            except KvoltError as error:
                call.fail(error)
        elif not self._is_complete:
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > _MAX_HEAD_BYTES:
                failure = ProtocolError(f"a response head exceeds {_MAX_HEAD_BYTES} bytes", rule="http head")
        if call.is_over:
            return
        if self._is_complete:
            self._end(call, now, failure is None)
        elif failure is not None:
            call.fail(failure)

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._transport = self._parser = None
        self._client.remove_connection(self)
        if call is not None and not call.is_over:
            call.connection = None
            self._lose(call, error)
        self._client.assign()

    def _lose(self, call: HttpCall, error: Exception | None) -> None:
        client = self._client
        if self._status and error is None and self._ends_at_close():
            call.finish()
            call.receiver.end(client.now())
        elif self._num_calls > 1 and not self._has_response_bytes and call.num_sent == 1:
            client.resend(call)
        else:
            suffix = f": {error}" if error is not None else ""
            message = f"{client.url.text} closed the connection before the response was complete{suffix}"
            call.fail(WorkerLost(message, address=client.url.address, reason="closed"))

    def _ends_at_close(self) -> bool:
        """Whether the end of the connection ends the body."""
        return "content-length" not in self._headers and "transfer-encoding" not in self._headers

    def _end(self, call: HttpCall, now: float, is_clean: bool) -> None:
        self._call = self._parser = call.connection = None
        call.finish()
        if self._is_reusable and is_clean:
            self._client.release(self)
        else:
            self.drop()
            self._client.assign()
        call.receiver.end(now)

    # --- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > _MAX_HEADERS:
            raise ProtocolError("the response has too many headers", rule="http head")
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1").strip()

    def on_headers_complete(self) -> None:
        call, parser = self._call, self._parser
        if call is None or parser is None or self._is_complete:
            return
        status = parser.get_status_code()
        if status < 200:  # interim response
            self._headers = {}
            return
        self._status = status
        call.receiver.head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if not self._is_complete:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        if self._status and not self._is_complete and self._parser is not None:
            self._is_complete = True
            self._is_reusable = self._parser.should_keep_alive()


def _invalid_response(error: Exception) -> ProtocolError:
    return ProtocolError(f"invalid HTTP response ({type(error).__name__})", rule="http")
