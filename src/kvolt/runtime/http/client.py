"""HTTP/1.1 client of one server: reuses connections, streams responses, needs no task per response.

Every call has a Receiver, which is called as the response arrives. Abandoning a call closes its connection, which
notifies the server.

If a kept-alive connection turns out to be closed before the first byte of a response, the call is sent once more, as
browsers do. There are as many connections as concurrent calls; the caller bounds these.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from kvolt.core.errors import ConfigError, ConnectFailed, DeadlineExceeded, KvoltError, ProtocolError
from kvolt.runtime.lazy_timer import LazyTimer
from kvolt.runtime.network import tune_socket
from kvolt.runtime.tasks import TaskGroup

_MAX_IDLE = 64
_MAX_FETCHED_BYTES = 32 << 20
_MAX_HEADERS = 256


class ServerUrl(msgspec.Struct, frozen=True):
    """URL of a server. `text` is the form shown to users."""

    text: str
    host: str
    port: int
    path: str
    is_secure: bool

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """Parse an http or https URL; raises ConfigError. A final `/v1` is removed, since not all paths are below
        it."""
        base_url = text.strip().rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(base_url)
            port = parts.port
        except ValueError as error:
            raise _url_error(text) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise _url_error(text)
        is_secure = parts.scheme == "https"
        return cls(base_url, parts.hostname, port or (443 if is_secure else 80), parts.path, is_secure)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _url_error(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is not a server URL", key="url", remedy="write http://HOST:PORT")


class Receiver(Protocol):
    """Receives the response of a call. `end` or `fail` is the last callback; abandoned calls get neither."""

    def head(self, status: int) -> None: ...

    def data(self, piece: bytes) -> None:
        """Receive a part of the body. Raising a KvoltError ends the call; it is then passed to `fail`."""
        ...

    def end(self) -> None: ...

    def fail(self, error: KvoltError) -> None: ...


class Timeouts(msgspec.Struct, frozen=True):
    first_s: float
    """From the start of the call to the first byte of the body."""
    between_s: float


@dataclass(slots=True, eq=False)
class Call:
    """One request in progress."""

    request: bytes
    receiver: Receiver
    timeouts: Timeouts
    client: HttpClient
    timer: LazyTimer | None = None
    connection: _Connection | None = None
    num_sent: int = 0
    is_over: bool = False
    last_byte_at: float = 0.0
    """Loop time of the last body bytes; 0 before the first."""

    def abandon(self) -> None:
        """Cancel the call without notifying its receiver."""
        if not self.is_over:
            self.finish()
            if self.connection is not None:
                self.connection.drop()

    def finish(self) -> None:
        self.is_over = True
        if self.timer is not None:
            self.timer.close()

    def fail(self, error: KvoltError) -> None:
        if not self.is_over:
            self.abandon()
            self.receiver.fail(error)

    def on_timeout(self) -> None:
        limit_s = self.timeouts.between_s if self.last_byte_at else self.timeouts.first_s
        self.fail(self.client.new_error(f"was silent for {limit_s:g} s"))


class HttpClient:
    """HTTP client of one server; `close` closes its connections."""

    def __init__(
        self,
        url: ServerUrl,
        api_key: str | None,
        connect_timeout_s: float,
        new_error: Callable[[str], KvoltError],
    ) -> None:
        """`new_error` builds the error for a server that violates HTTP or closes early, from a description."""
        self.url = url
        self.new_error = new_error
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._task_group = TaskGroup("http-connect")
        self._idle: list[_Connection] = []
        """Unused connections, most recently used last: a server that has too many may close the others."""
        self._open: dict[_Connection, None] = {}
        self._tls = ssl.create_default_context() if url.is_secure else None
        key = (api_key or "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError("the API key contains invalid characters", key="api_key")
        self._headers = f"host: {url.authority}\r\nuser-agent: kvolt\r\n" + (
            f"authorization: Bearer {key}\r\n" if key else ""
        )

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def send(self, path: str, body: bytes | None, receiver: Receiver, timeouts: Timeouts) -> Call:
        """Send a POST with a body, or a GET without one."""
        method = "GET" if body is None else "POST"
        content = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._headers}accept: */*\r\n{content}\r\n"
        call = Call(head.encode("latin-1") + (body or b""), receiver, timeouts, self)
        call.timer = LazyTimer(self._loop, call.on_timeout)
        call.timer.arm(timeouts.first_s)
        self.dispatch(call)
        return call

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> Fetched:
        """Fetch a whole response, whatever its status. Raises ConnectFailed, DeadlineExceeded or `new_error`'s
        error."""
        receiver = _FetchReceiver(self._loop.create_future())
        call = self.send(path, body, receiver, Timeouts(timeout_s, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                return await receiver.done
        except TimeoutError:
            message = f"no response from {self.url.text}{path} within {timeout_s:g} s"
            raise DeadlineExceeded(message, stage="total", after_s=timeout_s) from None
        finally:
            call.abandon()

    async def close(self) -> None:
        """Drop all connections and abandon calls in progress."""
        await self._task_group.close()
        for connection in list(self._open):
            connection.drop()

    # --- for Call and _Connection

    def dispatch(self, call: Call) -> None:
        if self._idle and not call.num_sent:
            self._idle.pop().start(call)
        elif not self._task_group.closed:
            self._task_group.start(self._connect(call), "connect")

    def add_connection(self, connection: _Connection) -> None:
        self._open[connection] = None

    def release(self, connection: _Connection) -> None:
        if self._task_group.closed or len(self._idle) >= _MAX_IDLE:
            connection.drop()
        else:
            self._idle.append(connection)

    def remove_connection(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def now(self) -> float:
        return self._loop.time()

    async def _connect(self, call: Call) -> None:
        url = self.url
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), url.host, url.port, ssl=self._tls
                )
        except TimeoutError:
            self._fail_connect(call, f"no connection within {self._connect_timeout_s:g} s")
        except (OSError, UnicodeError) as error:  # UnicodeError: not a valid DNS name
            self._fail_connect(call, getattr(error, "strerror", None) or str(error))
        else:
            if connection.is_self_connected:
                connection.drop()
                self._fail_connect(call, "connection refused")
            elif call.is_over:
                self.release(connection)
            else:
                connection.start(call)

    def _fail_connect(self, call: Call, reason: str) -> None:
        if call.num_sent:  # sent over a connection that the server then closed
            call.fail(self.new_error(f"closed the connection and is unreachable: {reason}"))
        else:
            message = f"cannot connect to {self.url.text}: {reason}"
            call.fail(ConnectFailed(message, address=self.url.authority))


class _Connection(asyncio.Protocol):
    """One connection, one call at a time."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._call: Call | None = None
        self._num_calls = 0
        self._num_headers = 0
        self._has_response_bytes = False
        """Bytes of the current response have arrived."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is not a subclass
        tune_socket(transport)
        self._client.add_connection(self)

    @property
    def is_self_connected(self) -> bool:
        """Whether the connection is connected to itself, which the kernel allows for a local port without a
        listener."""
        transport = self._transport
        if transport is None:
            return False
        return bool(transport.get_extra_info("sockname") == transport.get_extra_info("peername"))

    def start(self, call: Call) -> None:
        if self._transport is None:  # lost since it was opened
            call.num_sent += 1
            self._lost(call, None)
            return
        self._call, call.connection = call, self
        call.num_sent += 1
        self._num_calls += 1
        self._num_headers = 0
        self._has_response_bytes = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(call.request)

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
        self._has_response_bytes = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            call.fail(cause if isinstance(cause, KvoltError) else self._protocol_error(error))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            call.fail(self._protocol_error(error))

    def _protocol_error(self, error: Exception) -> KvoltError:
        return self._client.new_error(f"sent an invalid HTTP response ({type(error).__name__})")

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._transport = self._parser = None
        self._client.remove_connection(self)
        if call is not None and not call.is_over:
            call.connection = None
            self._lost(call, error)

    def _lost(self, call: Call, error: Exception | None) -> None:
        is_stale = self._num_calls > 1 and not self._has_response_bytes and call.num_sent == 1
        if is_stale:
            self._client.dispatch(call)
        else:
            suffix = f": {error}" if error is not None else ""
            call.fail(
                self._client.new_error(f"closed the connection before the response was complete{suffix}")
            )

    # --- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > _MAX_HEADERS:
            raise ProtocolError("the response has too many headers", rule="http head")

    def on_headers_complete(self) -> None:
        if self._call is not None and self._parser is not None:
            self._call.receiver.head(self._parser.get_status_code())

    def on_body(self, body: bytes) -> None:
        call = self._call
        if call is None or call.is_over:
            return
        call.last_byte_at = self._client.now()
        if call.timer is not None:
            call.timer.arm(call.timeouts.between_s)
        call.receiver.data(body)

    def on_message_complete(self) -> None:
        call, parser = self._call, self._parser
        if call is None or parser is None or call.is_over:
            return
        self._call, call.connection = None, None
        call.finish()
        if parser.should_keep_alive():
            self._parser = None
            self._client.release(self)
        else:
            self.drop()
        call.receiver.end()


class Fetched(msgspec.Struct, frozen=True):
    status: int
    body: bytes


class _FetchReceiver:
    """Collects one short response."""

    def __init__(self, done: asyncio.Future[Fetched]) -> None:
        self.done = done
        self._status = 0
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def head(self, status: int) -> None:
        self._status = status

    def data(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > _MAX_FETCHED_BYTES:
            raise ProtocolError(f"the response exceeds {_MAX_FETCHED_BYTES} bytes", rule="http body")
        self._parts.append(piece)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(Fetched(self._status, b"".join(self._parts)))

    def fail(self, error: KvoltError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
