"""HTTP/1.x as bytes: request bytes in, `HttpRequest` out; `Response` in, response bytes out.

Owns the message types, their limits, and the parser that turns bytes into requests or into a refusal.
Knows nothing of sockets, tasks, timers or routes, so all of it runs without an event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from enum import IntEnum
from http import HTTPStatus
from typing import NoReturn, Protocol
from urllib.parse import parse_qsl

import httptools
import msgspec

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_NO_HEADERS: Mapping[str, str] = {}
BODILESS = frozenset({204, 304})

NO_CONNECTION_LINE = ""
CLOSE_LINE = "connection: close\r\n"
KEEP_ALIVE_LINE = "connection: keep-alive\r\n"
CHUNKED_LINE = "transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_MANY_CHUNKS = 16_384
_SMALL_CHUNK_BYTES = 64
"""On average. A body of millions of tiny chunks would hold up everybody else for seconds."""


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client may cost."""

    max_connections: int = 4096
    max_body_bytes: int = 32 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024 * 1024
    """Of all clients together: bodies that are still coming, or wait behind the request being answered."""
    max_header_bytes: int = 32 * 1024
    max_pipelined: int = 16
    """Requests read ahead of the one being answered; reading pauses there."""
    header_timeout_s: float = 10.0
    """From the first byte of a request to the end of its headers."""
    body_timeout_s: float = 60.0
    """From the end of the headers to the end of the body: a total, so that dripping does not help."""
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    """How long a client may leave a full write buffer unread."""
    write_buffer_bytes: int = 64 * 1024


class HttpRequest:
    """One request, complete with its body.

    `path` is as sent, still percent-encoded; `params` (from the route) and `query` are decoded. Header
    names are lower-case; repeated ones are joined by a comma.
    """

    __slots__ = (
        "_disconnect_callbacks",
        "_disconnected",
        "_query",
        "body",
        "headers",
        "id",
        "keep_alive",
        "method",
        "params",
        "path",
        "peer",
        "query_string",
        "version",
    )

    def __init__(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes = b"",
        peer: str = "",
        version: str = "1.1",
    ) -> None:
        self.method = method
        self.path, _, self.query_string = target.partition("?")
        self.headers = headers
        self.body = body
        self.peer = peer
        self.version = version
        self.id = ""
        """`x-request-id` of the response: the client's own, or one that the server has made."""
        self.keep_alive = True
        self.params: Mapping[str, str] = _NO_HEADERS
        self._query: dict[str, str] | None = None
        self._disconnected = False
        self._disconnect_callbacks: list[Callable[[], None]] | None = None

    @property
    def query(self) -> Mapping[str, str]:
        """Decoded query parameters; of a repeated one, the last."""
        if self._query is None:
            self._query = dict(parse_qsl(self.query_string, keep_blank_values=True))
        return self._query

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client hangs up before its response is complete."""
        if self._disconnected:
            callback()
        elif self._disconnect_callbacks is None:
            self._disconnect_callbacks = [callback]
        else:
            self._disconnect_callbacks.append(callback)

    def answered(self) -> None:
        """Told by the connection: nobody need hear of a client that hangs up now. What the callbacks held is
        freed at once, which they would keep in a circle if they know the request."""
        self._disconnect_callbacks = None

    def disconnected(self) -> None:
        """Told by the connection; runs the callbacks in the order they were added."""
        self._disconnected = True
        callbacks, self._disconnect_callbacks = self._disconnect_callbacks, None
        for callback in callbacks or ():
            callback()


class Response(msgspec.Struct, frozen=True):
    """A whole response. Framing headers (length, encoding, connection, date) are the server's to add."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


class StreamingResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response written as it is produced.

    The head leaves with the first chunk, so that a failure before it still gets its own status; an empty
    first chunk sends the head alone. `body.aclose()` is awaited however the response ends.
    """

    body: AsyncIterator[bytes]
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = "text/event-stream"


AnyResponse = Response | StreamingResponse


def json_error(
    status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] = _NO_HEADERS
) -> Response:
    """An error in the shape that OpenAI clients read."""
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": param, "code": code}
    return Response(status, msgspec.json.encode({"error": error}), headers)


def has_body(request_method: str, status: int) -> bool:
    return request_method != "HEAD" and status not in BODILESS


class Head(Protocol):
    """What of a response goes before its body."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content_type(self) -> str: ...


def encode_head(response: Head, framing: str, connection: str, own: str) -> bytes:
    """Status line and headers, up to and with the empty line; `own` are lines of the server's.

    ValueError when a header would break out.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in response.headers.items()])
    if response.content_type:
        lines = f"content-type: {response.content_type}\r\n{lines}"
    num_lines = len(response.headers) + bool(response.content_type)
    if lines.count("\n") != num_lines or lines.count("\r") != num_lines or "\0" in lines:
        raise ValueError("a response header holds a line break")
    phrase = _PHRASES.get(response.status, "Unknown")
    return f"HTTP/1.1 {response.status} {phrase}\r\n{own}{lines}{framing}{connection}\r\n".encode("latin-1")


def encode_whole(response: Response, method: str, connection: str, own: str) -> tuple[bytes, bytes]:
    """Head and body of a whole response; the body is empty where the protocol forbids one."""
    framing = "" if response.status in BODILESS else f"content-length: {len(response.body)}\r\n"
    head = encode_head(response, framing, connection, own)
    return head, response.body if has_body(method, response.status) else b""


class Phase(IntEnum):
    """What the next byte belongs to."""

    IDLE = 0
    HEAD = 1
    BODY = 2


class _Stop(Exception):
    """Leaves the parser from inside a callback; the reason is in `RequestReader.refusal`."""


class BodyBudget:
    """What the bodies that all connections of a server hold may still take."""

    __slots__ = ("left",)

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes


_TOO_MANY_BODIES = json_error(
    503, "too many bodies are on their way; try again", "overloaded", headers={"retry-after": "1"}
)


class RequestReader:
    """Feeds bytes to llhttp and collects complete requests, oldest first, in `requests`.

    After a refusal, or after a request that ends its connection, `done` is set and input is ignored.
    `mark` changes whenever `phase` may have, so that a caller sees a new request in the same phase.
    """

    def __init__(self, limits: HttpLimits, peer: str, budget: BodyBudget | None = None) -> None:
        self._limits = limits
        self._peer = peer
        self._budget = budget if budget is not None else BodyBudget(limits.max_buffered_bytes)
        self._num_coming = 0
        """Bytes of the body being read."""
        self._num_waiting = 0
        """Bytes of the bodies in `requests`."""
        self._num_chunks = 0
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: bytes | bytearray = b""
        self._head_bytes = 0
        self._silent_bytes = 0
        self._stirred = False
        self._upgrading = False
        self.requests: deque[HttpRequest] = deque()
        self.phase = Phase.IDLE
        self.mark = 0
        self.done = False
        self.refusal: Response | None = None
        self.wants_continue = False

    def feed(self, data: bytes | memoryview) -> None:
        if self.done:
            return
        self._stirred = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_as_plain_request(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError:
            if self.refusal is None:
                raise
        except httptools.HttpParserError:
            if not self.done:
                self.refuse(400, "the request is not valid HTTP/1.1", "malformed_request")
        # The parser buffers an unfinished header line or trailer on its own and says nothing until its end.
        self._silent_bytes = 0 if self._stirred else self._silent_bytes + len(data)
        if self._silent_bytes > self._limits.max_header_bytes and not self.done:
            self._refuse_headers()

    def refuse(self, status: int, message: str, code: str) -> None:
        self._end(json_error(status, message, code))

    def _end(self, refusal: Response) -> None:
        self.refusal = refusal
        self.done = True
        self._drop_body()

    def _drop_body(self) -> None:
        self._budget.left += self._num_coming
        self._num_coming = 0
        self._body = b""

    def take(self) -> HttpRequest:
        """The oldest request."""
        request = self.requests.popleft()
        self._budget.left += len(request.body)
        self._num_waiting -= len(request.body)
        return request

    def stop(self) -> None:
        """No further request is wanted, not even those that are here."""
        self.done = True
        self.requests.clear()
        self._budget.left += self._num_waiting
        self._num_waiting = 0
        self._drop_body()

    def release(self) -> None:
        """Break the cycle between reader and parser, so that a closed connection is freed at once."""
        self.stop()
        del self._parser

    def _refuse_headers(self) -> None:
        self.refuse(431, f"headers are over {self._limits.max_header_bytes} bytes", "headers_too_large")

    def _read_as_plain_request(self, rest: bytes | memoryview) -> None:
        # An upgrade may be ignored (RFC 9110, 7.8), and some HTTP/2-capable clients offer one with every
        # plain-text request. llhttp would skip the body then, so the head is read again without the offer.
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse(501, "CONNECT is not supported", "unsupported")
            return
        dropped = {"upgrade", "http2-settings"}
        options = [option.strip().lower() for option in self._headers.pop("connection", "").split(",")]
        kept = "connection: close\r\n" if "close" in options else ""
        lines = "".join(
            [f"{name}: {value}\r\n" for name, value in self._headers.items() if name not in dropped]
        )
        head = f"{kept}{lines}\r\n".encode("latin-1")
        line = b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        self.feed(line + head)
        if rest:
            self.feed(rest)

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        self._stirred = True
        self._target = b""
        self._headers = {}
        self._body = b""
        self._head_bytes = 0
        self._num_chunks = 0
        self._upgrading = False
        self.wants_continue = False
        self.phase = Phase.HEAD
        self.mark += 1

    def on_url(self, url: bytes) -> None:
        self._target = self._target + url if self._target else url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self.phase is Phase.BODY:
            return  # a trailer: nothing here has a use for one
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").rstrip(" \t")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def _count_head(self, num_bytes: int) -> None:
        self._stirred = True
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
            raise _Stop

    def on_headers_complete(self) -> None:
        self._stirred = True
        if self._parser.should_upgrade():
            self._upgrading = True
            return
        self.phase = Phase.BODY
        self.mark += 1
        headers = self._headers
        if "content-length" in headers:
            # The parser has seen that it fits 64 bits, and lets any number of zeros stand before it.
            if int(headers["content-length"].lstrip("0") or "0") > self._limits.max_body_bytes:
                self._refuse_body()
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse_request(501, "only chunked is known as a transfer encoding", "unsupported")
        if "," in headers.get("host", ""):
            self._refuse_request(400, "there is more than one host", "malformed_request")
        if "expect" in headers and self._parser.get_http_version() == "1.1":
            self.wants_continue = headers["expect"].lower() == "100-continue"

    def on_chunk_header(self) -> None:
        self._stirred = True
        if self._num_chunks > _MANY_CHUNKS and self._num_coming < _SMALL_CHUNK_BYTES * self._num_chunks:
            self._refuse_request(400, "the body comes in very many very small chunks", "malformed_request")
        self._num_chunks += 1

    def on_body(self, part: bytes) -> None:
        self._stirred = True
        size = len(part)
        self._num_coming += size
        self._budget.left -= size
        if self._num_coming > self._limits.max_body_bytes:
            self._refuse_body()
        if self._budget.left < 0:
            self._end(_TOO_MANY_BODIES)
            raise _Stop
        if not self._body:
            self._body = part
        elif isinstance(self._body, bytes):
            self._body = bytearray(self._body)
            self._body += part
        else:
            self._body += part

    def _refuse_body(self) -> NoReturn:
        message = f"the body is over {self._limits.max_body_bytes} bytes"
        self._refuse_request(413, message, "payload_too_large")

    def _refuse_request(self, status: int, message: str, code: str) -> NoReturn:
        self.refuse(status, message, code)
        raise _Stop

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        parser = self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._refuse_request(505, "only HTTP/1.1 and HTTP/1.0 are spoken here", "http_version")
        target = (
            self._target.decode("latin-1") if self._target.startswith(b"/") else self._target_without_host()
        )
        request = HttpRequest(
            parser.get_method().decode("ascii"), target, self._headers, bytes(self._body), self._peer, version
        )
        request.keep_alive = parser.should_keep_alive()
        self._body = b""
        self._num_waiting += self._num_coming
        self._num_coming = 0
        self.requests.append(request)
        self.done = not request.keep_alive
        self.wants_continue = False
        self.phase = Phase.IDLE
        self.mark += 1

    def _target_without_host(self) -> str:
        """The path of an absolute target, as a client of a proxy sends it; `*` stays as it is."""
        if self._target == b"*":
            return "*"
        try:
            url = httptools.parse_url(self._target)
        except httptools.HttpParserError:
            self.refuse(400, "the request target is not valid", "malformed_request")
            raise _Stop from None
        path = (url.path or b"/").decode("latin-1")
        return f"{path}?{url.query.decode('latin-1')}" if url.query else path
