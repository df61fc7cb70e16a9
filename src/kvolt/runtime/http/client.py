"""A client of one HTTP server: connections that are used again, answers as they come, no task per answer.

Owns connections, framing and time-outs. Must not know what is asked: each call has a Receiver that is told what comes.
Giving a call up closes its connection, which is how a server learns of it.

A call whose kept-alive connection turns out to be closed before a byte of the answer came is sent once more, as
browsers do. Bounded by its user: there are as many connections as calls.
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
from kvolt.runtime.tasks import Crew

_MOST_IDLE = 64
_MAX_FETCHED_BYTES = 32 << 20
_MAX_HEADERS = 256


class ServerUrl(msgspec.Struct, frozen=True):
    """Where a server is. `text` is how people are told."""

    text: str
    host: str
    port: int
    path: str
    is_secure: bool

    @classmethod
    def parse(cls, text: str) -> ServerUrl:
        """ConfigError for what is no http address. An API's /v1 at its end is left out: not all is below it."""
        plain = text.strip().rstrip("/").removesuffix("/v1")
        try:
            parts = urlsplit(plain)
            port = parts.port
        except ValueError as error:
            raise _no_url(text) from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise _no_url(text)
        is_secure = parts.scheme == "https"
        return cls(plain, parts.hostname, port or (443 if is_secure else 80), parts.path, is_secure)

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def _no_url(text: str) -> ConfigError:
    return ConfigError(f"{text!r} is no address of a server", key="url", remedy="write http://HOST:PORT")


class Receiver(Protocol):
    """Who made a call. `end` or `fail` is the last thing it is told; neither after it was given up."""

    def head(self, status: int) -> None: ...

    def data(self, piece: bytes) -> None:
        """A KvoltError that it raises ends the call: it is what `fail` is told."""
        ...

    def end(self) -> None: ...

    def fail(self, error: KvoltError) -> None: ...


class Timeouts(msgspec.Struct, frozen=True):
    first_s: float
    """From the call to the first byte of a body."""
    between_s: float


@dataclass(slots=True, eq=False)
class Call:
    """One request under way."""

    request: bytes
    receiver: Receiver
    timeouts: Timeouts
    client: HttpClient
    timer: LazyTimer | None = None
    connection: _Connection | None = None
    num_sent: int = 0
    is_over: bool = False
    last_byte_at: float = 0.0
    """By the loop's clock."""

    def give_up(self) -> None:
        """Nobody wants it any more; its receiver is told nothing."""
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
            self.give_up()
            self.receiver.fail(error)

    def expired(self) -> None:
        limit_s = self.timeouts.between_s if self.last_byte_at else self.timeouts.first_s
        self.fail(self.client.broken(f"was silent for {limit_s:g} s"))


class HttpClient:
    """See the module. Close it, or its connections stay."""

    def __init__(
        self,
        url: ServerUrl,
        api_key: str | None,
        connect_timeout_s: float,
        broken: Callable[[str], KvoltError],
    ) -> None:
        """`broken`: what it means to the caller that the server did not keep to HTTP, or broke off, by how it did."""
        self.url = url
        self.broken = broken
        self._connect_timeout_s = connect_timeout_s
        self._loop = asyncio.get_running_loop()
        self._crew = Crew("http-connect")
        self._idle: list[_Connection] = []
        """The last used last: the others may be closed by the server, where there are too many."""
        self._open: dict[_Connection, None] = {}
        self._tls = ssl.create_default_context() if url.is_secure else None
        key = (api_key or "").strip()
        if not (key.isascii() and (key.isprintable() or not key)):
            raise ConfigError("the API key has characters that no key has", key="api_key")
        self._headers = f"host: {url.authority}\r\nuser-agent: kvolt\r\n" + (
            f"authorization: Bearer {key}\r\n" if key else ""
        )

    @property
    def num_connections(self) -> int:
        return len(self._open)

    def send(self, path: str, body: bytes | None, receiver: Receiver, timeouts: Timeouts) -> Call:
        """POST with a body, GET without one."""
        method = "GET" if body is None else "POST"
        content = "" if body is None else f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        head = f"{method} {self.url.path}{path} HTTP/1.1\r\n{self._headers}accept: */*\r\n{content}\r\n"
        call = Call(head.encode("latin-1") + (body or b""), receiver, timeouts, self)
        call.timer = LazyTimer(self._loop, call.expired)
        call.timer.arm(timeouts.first_s)
        self.dispatch(call)
        return call

    async def fetch(self, path: str, timeout_s: float, body: bytes | None = None) -> Fetched:
        """A whole answer, whatever its status. ConnectFailed, DeadlineExceeded, or what `broken` says."""
        receiver = _Whole(self._loop.create_future())
        call = self.send(path, body, receiver, Timeouts(timeout_s, timeout_s))
        try:
            async with asyncio.timeout(timeout_s):
                return await receiver.done
        except TimeoutError:
            message = f"{self.url.text}{path} did not answer within {timeout_s:g} s"
            raise DeadlineExceeded(message, stage="total", after_s=timeout_s) from None
        finally:
            call.give_up()

    async def close(self) -> None:
        """Drop all connections; calls under way are given up."""
        await self._crew.close()
        for connection in list(self._open):
            connection.drop()

    # --- for calls and connections

    def dispatch(self, call: Call) -> None:
        if self._idle and not call.num_sent:
            self._idle.pop().start(call)
        elif not self._crew.closed:
            self._crew.start(self._connect(call), "connect")

    def opened(self, connection: _Connection) -> None:
        self._open[connection] = None

    def release(self, connection: _Connection) -> None:
        if self._crew.closed or len(self._idle) >= _MOST_IDLE:
            connection.drop()
        else:
            self._idle.append(connection)

    def forget(self, connection: _Connection) -> None:
        self._open.pop(connection, None)
        if connection in self._idle:
            self._idle.remove(connection)

    def now(self) -> float:
        return self._loop.time()

    async def _connect(self, call: Call) -> None:
        where = self.url
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self), where.host, where.port, ssl=self._tls
                )
        except TimeoutError:
            self._unreachable(call, f"no connection within {self._connect_timeout_s:g} s")
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that DNS cannot hold
            self._unreachable(call, getattr(error, "strerror", None) or str(error))
        else:
            if connection.is_to_itself:
                connection.drop()
                self._unreachable(call, "nobody listens there")
            elif call.is_over:
                self.release(connection)
            else:
                connection.start(call)

    def _unreachable(self, call: Call, reason: str) -> None:
        if call.num_sent:  # the server had it, and is gone
            call.fail(self.broken(f"closed the connection, and cannot be reached again: {reason}"))
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
        self._has_begun = False
        """Whether a byte of the present answer has come."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is not one by name
        tune_socket(transport)
        self._client.opened(self)

    @property
    def is_to_itself(self) -> bool:
        """As it may be at a port of this host that nobody has: the kernel gives it to who connects, and who should
        listen there cannot."""
        transport = self._transport
        if transport is None:
            return False
        return bool(transport.get_extra_info("sockname") == transport.get_extra_info("peername"))

    def start(self, call: Call) -> None:
        if self._transport is None:  # lost between the dial and now
            call.num_sent += 1
            self._lost(call, None)
            return
        self._call, call.connection = call, self
        call.num_sent += 1
        self._num_calls += 1
        self._num_headers = 0
        self._has_begun = False
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(call.request)

    def drop(self) -> None:
        """Close at once, telling nobody."""
        call, self._call = self._call, None
        if call is not None:
            call.connection = None
        self._parser = None
        self._client.forget(self)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()

    # --- asyncio's callbacks

    def data_received(self, data: bytes) -> None:
        call, parser = self._call, self._parser
        if call is None or parser is None:
            self.drop()  # a server that speaks unasked is about to hang up
            return
        self._has_begun = True
        try:
            parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            call.fail(cause if isinstance(cause, KvoltError) else self._nonsense(error))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            call.fail(self._nonsense(error))

    def _nonsense(self, error: Exception) -> KvoltError:
        return self._client.broken(f"does not answer in HTTP ({type(error).__name__})")

    def connection_lost(self, error: Exception | None) -> None:
        call, self._call = self._call, None
        self._transport = self._parser = None
        self._client.forget(self)
        if call is not None and not call.is_over:
            call.connection = None
            self._lost(call, error)

    def _lost(self, call: Call, error: Exception | None) -> None:
        is_stale = self._num_calls > 1 and not self._has_begun and call.num_sent == 1
        if is_stale:
            self._client.dispatch(call)
        else:
            why = f": {error}" if error is not None else ""
            call.fail(self._client.broken(f"closed the connection in the middle of an answer{why}"))

    # --- httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > _MAX_HEADERS:
            raise ProtocolError("an answer has too many headers", rule="http head")

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


class _Whole:
    """A Receiver of one short answer."""

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
            raise ProtocolError(f"an answer is over {_MAX_FETCHED_BYTES} bytes", rule="http body")
        self._parts.append(piece)

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(Fetched(self._status, b"".join(self._parts)))

    def fail(self, error: KvoltError) -> None:
        if not self.done.done():
            self.done.set_exception(error)
