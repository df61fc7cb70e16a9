"""HTTP/1.1 client of one server: reuses connections, streams responses, needs no task per response.

Every call has a Receiver, which is called as the response arrives; coroutines use `open` and `fetch` instead.
Abandoning a call closes its connection, which notifies the server.

When `max_connections` are in use, calls wait in order. If a kept-alive connection turns out to be closed before the
first byte of a response, the call is sent once more, as browsers do.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol, Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec
from msgspec.structs import replace

from kvolt import __version__
from kvolt.core.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    KvoltError,
    ProtocolError,
    WorkerLost,
)
from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.runtime.network import ProtocolFactory, SocketNetwork, join_address, tune_socket
from kvolt.runtime.tasks import TaskGroup

_MAX_CONNECTIONS = 10_000
_MAX_CONNECTING = 128
"""Maximum concurrent connects, about the length of a server's accept queue."""
_MAX_IDLE = 64
_MAX_FETCHED_BYTES = 32 << 20
_MAX_HEADERS = 256
_MAX_HEAD_BYTES = 64 << 10


class ServerUrl(msgspec.Struct, frozen=True):
    """URL of a server, with its API key. `text` is the form shown to users."""

    text: str
    host: str
    port: int
    path: str
    is_secure: bool
    api_key: str = ""

    @classmethod
    def parse(cls, text: str, api_key: str | None = None) -> ServerUrl:
        """Parse an http or https URL; the scheme is optional. Raises ConfigError."""
        text = text.strip()
        remedy = "write it as http://HOST:PORT"
        if not text or not text.isascii() or not text.isprintable() or " " in text:
            raise ConfigError(f"invalid URL {text!r}", key="url", remedy=remedy)
        try:
            parts = urlsplit(text if "://" in text else f"http://{text}")
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"invalid URL {text}: {error}", key="url", remedy=remedy) from error
        if parts.username is not None or parts.query or parts.fragment:
            raise ConfigError(
                "the URL has user info, a query or a fragment",
                key="url",
                remedy=f"{remedy}; set the API key separately",
            )
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"invalid server URL {text}", key="url", remedy=remedy)
        key = (api_key or "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError("the API key contains invalid characters", key="api_key", remedy="check it")
        is_secure = parts.scheme == "https"
        path = parts.path.rstrip("/")
        shown = f"{parts.scheme}://{parts.netloc}{path}"
        return cls(shown, parts.hostname, port or (443 if is_secure else 80), path, is_secure, key)

    def of_api(self) -> ServerUrl:
        """URL of the OpenAI API: as given if it has a version, else with /v1."""
        path = re.sub(r"/(chat/)?completions$", "", self.path)
        return self._with_path(path if re.search(r"/v\d\w*(/|$)", path) else f"{path}/v1")

    def of_server(self) -> ServerUrl:
        """URL of the server without /v1, since not all its paths are below it."""
        return self._with_path(self.path.removesuffix("/v1"))

    def _with_path(self, path: str) -> ServerUrl:
        return replace(self, text=self.text.removesuffix(self.path) + path, path=path)

    @property
    def address(self) -> str:
        return join_address(self.host, self.port)


class Connector(Protocol):
    """The client part of the Network port."""

    async def connect(self, address: str, factory: ProtocolFactory, timeout_s: float) -> asyncio.Protocol: ...


class Receiver(Protocol):
    """Receives the response of a call. `end` or `fail` is the last callback; abandoned calls get neither."""

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        """Receive the status and the headers, with names in lower case."""
        ...

    def data(self, pieces: list[bytes], now: float) -> None:
        """Receive parts of the body that arrived together. Raising a KvoltError ends the call; it is then passed to
        `fail`."""
        ...

    def end(self, now: float) -> None: ...

    def fail(self, error: KvoltError) -> None:
        """ConnectFailed: nothing was sent. WorkerLost: the connection ended early. DeadlineExceeded: a timeout.
        ProtocolError: the response is not valid."""
        ...


class Timeouts(msgspec.Struct, frozen=True):
    first_s: float
    """From the start of the call to the first byte of the body."""
    between_s: float


@dataclass(slots=True, eq=False)
class Call:
    """One request in progress."""

    request: bytes
    receiver: Receiver
    timeouts: Timeouts | None
    client: HttpClient
    timer: LazyTimer | None = None
    connection: _Connection | None = None
    num_sent: int = 0
    sent_at: float | None = None
    """Time at which the request was written."""
    last_byte_at: float = 0.0
    """Time of the last body bytes; 0 before the first."""
    is_over: bool = False

    def abandon(self) -> None:
        """Cancel the call without notifying its receiver."""
        if not self.is_over:
            self.finish()
            self.client.remove_call(self)

    def finish(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.close()

    def fail(self, error: KvoltError) -> None:
        if not self.is_over:
            self.abandon()
            self.receiver.fail(error)

    def arm(self) -> None:
        """Restart the timeout."""
        if self.timer is not None and self.timeouts is not None:
            self.timer.arm(self.timeouts.between_s if self.last_byte_at else self.timeouts.first_s)

    def on_timeout(self) -> None:
        assert self.timeouts is not None
        stage, limit_s = (
            ("between", self.timeouts.between_s) if self.last_byte_at else ("first", self.timeouts.first_s)
        )
        message = f"{self.client.url.text} was silent for {limit_s:g} s"
        self.fail(DeadlineExceeded(message, stage=stage, after_s=limit_s))


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
        self._waiting: deque[Call] = deque()
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
    ) -> Call:
        """Send a POST with a JSON body, or a GET without one."""
        method = "GET" if body is None else "POST"
        content = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._headers}{content}\r\n"
        call = Call(head.encode("latin-1") + (body or b""), receiver, timeouts, self)
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

    def resend(self, call: Call) -> None:
        """Send a call on a new connection: the server had closed an idle one, and so probably the others."""
        for connection in list(self._idle):
            connection.drop()
        self._waiting.appendleft(call)

    def remove_call(self, call: Call) -> None:
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

    def _fail_connect(self, call: Call, error: ConnectFailed) -> None:
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
        self._call: Call | None = None
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

    def start(self, call: Call) -> None:
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
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self._num_unparsed_bytes = 0
            call.last_byte_at = now
            call.arm()
            try:
                call.receiver.data(pieces, now)
            except KvoltError as error:
                failure = error
        elif not self._is_complete:
            self._num_unparsed_bytes += len(data)
            if self._num_unparsed_bytes > _MAX_HEAD_BYTES:
                failure = ProtocolError(f"a response head exceeds {_MAX_HEAD_BYTES} bytes", rule="http head")
        if call.is_over:  # abandoned by its receiver
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

    def _lose(self, call: Call, error: Exception | None) -> None:
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

    def _end(self, call: Call, now: float, is_clean: bool) -> None:
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


class Fetched(msgspec.Struct, frozen=True):
    status: int
    body: bytes


@dataclass(slots=True, eq=False)
class StreamedResponse:
    """A response read by a coroutine: iterate over the parts of its body, or `read` it."""

    status: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)
    _pieces: deque[bytes] = field(default_factory=deque)
    _is_complete: bool = False
    _error: KvoltError | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_head(self) -> None:
        while not self.status:
            await self._wait()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        while not self._pieces:
            if self._is_complete:
                raise StopAsyncIteration
            await self._wait()
        return self._pieces.popleft()

    async def read(self, max_bytes: int) -> bytes:
        """Read the rest of the body. Raises ProtocolError if it is longer."""
        parts, num_bytes = [], 0
        async for piece in self:
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                raise ProtocolError(f"the response exceeds {max_bytes} bytes", rule="http body")
            parts.append(piece)
        return b"".join(parts)

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._changed.clear()
        await self._changed.wait()

    # --- Receiver

    def head(self, status: int, headers: Mapping[str, str]) -> None:
        self.status, self.headers = status, headers
        self._changed.set()

    def data(self, pieces: list[bytes], now: float) -> None:
        self._pieces += pieces
        self._changed.set()

    def end(self, now: float) -> None:
        self._is_complete = True
        self._changed.set()

    def fail(self, error: KvoltError) -> None:
        self._error = error
        self._changed.set()
