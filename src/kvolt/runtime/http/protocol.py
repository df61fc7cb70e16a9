"""HTTP/1.x messages and limits, and encoding of responses. Needs no event loop; `reader` parses requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Protocol
from urllib.parse import parse_qsl

import msgspec

from kvolt.runtime.security.identity import Identity

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_NO_HEADERS: Mapping[str, str] = {}
BODILESS = frozenset({204, 304})

CLOSE_LINE = "connection: close\r\n"
KEEP_ALIVE_LINE = "connection: keep-alive\r\n"
CHUNKED_LINE = "transfer-encoding: chunked\r\n"
LAST_CHUNK = b"0\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of an HTTP server."""

    max_connections: int = 4096
    max_body_bytes: int = 32 * 1024 * 1024
    max_buffered_bytes: int = 256 * 1024 * 1024
    """Total of all clients: bodies that are being received, or queued behind a request in progress."""
    max_header_bytes: int = 32 * 1024
    max_pipelined: int = 16
    """Requests read ahead of the current one; reading pauses at this limit."""
    header_timeout_s: float = 10.0
    """From the first byte of a request to the end of its headers."""
    body_timeout_s: float = 60.0
    """From the end of the headers to the end of the body, however slowly bytes arrive."""
    idle_timeout_s: float = 75.0
    write_timeout_s: float = 60.0
    """How long a client may leave the write buffer full."""
    write_buffer_bytes: int = 64 * 1024


class HttpRequest:
    """A complete request.

    `path` is still percent-encoded; `params` (from the route) and `query` are decoded. Header names are in lower
    case; repeated headers are joined by commas.
    """

    __slots__ = (
        "_disconnect_callbacks",
        "_disconnected",
        "_query",
        "body",
        "caller",
        "headers",
        "id",
        "identity",
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
        self.identity: Identity | None = None
        """From the client's certificate of the cluster; None without one."""
        self.version = version
        self.id = ""
        """Request id for `x-request-id` of the response: sent by the client, or generated."""
        self.caller: Any = None
        """Authenticated sender, set by a guard in front of the handler."""
        self.keep_alive = True
        self.params: Mapping[str, str] = _NO_HEADERS
        self._query: dict[str, str] | None = None
        self._disconnected = False
        self._disconnect_callbacks: list[Callable[[], None]] | None = None

    @property
    def query(self) -> Mapping[str, str]:
        """Decoded query parameters; the last one wins."""
        if self._query is None:
            self._query = dict(parse_qsl(self.query_string, keep_blank_values=True))
        return self._query

    def on_disconnect(self, callback: Callable[[], None]) -> None:
        """Call `callback` once if the client disconnects before its response is complete."""
        if self._disconnected:
            callback()
        elif self._disconnect_callbacks is None:
            self._disconnect_callbacks = [callback]
        else:
            self._disconnect_callbacks.append(callback)

    def response_sent(self) -> None:
        """Drop the callbacks. Called by the connection after the response; breaks reference cycles."""
        self._disconnect_callbacks = None

    def on_disconnected(self) -> None:
        """Run the callbacks in the order they were added. Called by the connection."""
        self._disconnected = True
        callbacks, self._disconnect_callbacks = self._disconnect_callbacks, None
        for callback in callbacks or ():
            callback()


class Response(msgspec.Struct, frozen=True):
    """A whole response. The server adds framing headers (length, encoding, connection, date)."""

    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


def json_error(
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    details: Mapping[str, str] = _NO_HEADERS,
) -> Response:
    """Error response in OpenAI's format; `details` are additional fields, which clients ignore."""
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": param, "code": code, **details}
    return Response(status, msgspec.json.encode({"error": error}), headers)


def has_body(request_method: str, status: int) -> bool:
    return request_method != "HEAD" and status not in BODILESS


class Head(Protocol):
    """Status and headers of a response."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]: ...

    @property
    def content_type(self) -> str: ...


def connection_line(request: HttpRequest, keep_alive: bool) -> str:
    """Header line about the connection in the response to `request`."""
    if not keep_alive:
        return CLOSE_LINE
    return KEEP_ALIVE_LINE if request.version == "1.0" else ""


def encode_head(response: Head, framing: str, connection: str, common: str) -> bytes:
    """Encode status line and headers, including the empty line; `common` are the server's header lines.

    Raises ValueError if a header contains a line break.
    """
    lines = "".join([f"{name}: {value}\r\n" for name, value in response.headers.items()])
    if response.content_type:
        lines = f"content-type: {response.content_type}\r\n{lines}"
    num_lines = len(response.headers) + bool(response.content_type)
    if lines.count("\n") != num_lines or lines.count("\r") != num_lines or "\0" in lines:
        raise ValueError("a response header contains a line break")
    phrase = _PHRASES.get(response.status, "Unknown")
    return f"HTTP/1.1 {response.status} {phrase}\r\n{common}{lines}{framing}{connection}\r\n".encode(
        "latin-1"
    )


def encode_whole(response: Response, method: str, connection: str, common: str) -> tuple[bytes, bytes]:
    """Encode head and body of a whole response; the body is empty where the protocol forbids one."""
    framing = "" if response.status in BODILESS else f"content-length: {len(response.body)}\r\n"
    head = encode_head(response, framing, connection, common)
    return head, response.body if has_body(method, response.status) else b""
