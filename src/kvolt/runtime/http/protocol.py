"""HTTP/1.x messages: requests, responses and what they may cost; `Response` in, bytes out.

Knows nothing of sockets, tasks, timers or routes, so all of it runs without an event loop. Bytes become
requests in `http_reader`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qsl

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
    status: int,
    message: str,
    code: str,
    param: str | None = None,
    headers: Mapping[str, str] = _NO_HEADERS,
    details: Mapping[str, str] = _NO_HEADERS,
) -> Response:
    """An error in the shape that OpenAI clients read; details are ours, which they pass over."""
    kind = (
        "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    )
    error = {"message": message, "type": kind, "param": param, "code": code, **details}
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
