"""Parses bytes into requests, or into a refusal, within limits. Needs no event loop."""

from __future__ import annotations

from collections import deque
from enum import IntEnum
from typing import NoReturn

import httptools

from kvolt.runtime.http.protocol import HttpLimits, HttpRequest, Response, json_error

_MANY_CHUNKS = 16_384
_SMALL_CHUNK_BYTES = 64
"""Minimum mean chunk size. A body of millions of tiny chunks would delay all other requests for seconds."""


class ReadPhase(IntEnum):
    """Part of a request that the next byte belongs to."""

    IDLE = 0
    HEAD = 1
    BODY = 2


class _Stop(Exception):
    """Leaves the parser from a callback; `RequestReader.refusal` has the reason."""


class BodyBudget:
    """Bytes that request bodies of all connections of a server may still use."""

    __slots__ = ("available_bytes",)

    def __init__(self, num_bytes: int) -> None:
        self.available_bytes = num_bytes


_TOO_MANY_BODIES = json_error(
    503, "too many request bodies in progress; try again", "overloaded", headers={"retry-after": "1"}
)


class RequestReader:
    """Feeds bytes to llhttp and collects complete requests in `requests`, oldest first.

    After a refusal, or after the last request of a connection, `done` is set and input is ignored. `mark` changes
    whenever `phase` may have changed, so that a caller notices a new request in the same phase.
    """

    def __init__(self, limits: HttpLimits, peer: str, budget: BodyBudget | None = None) -> None:
        self._limits = limits
        self._peer = peer
        self._budget = budget if budget is not None else BodyBudget(limits.max_buffered_bytes)
        self._num_receiving_bytes = 0
        """Bytes of the body being read."""
        self._num_queued_bytes = 0
        """Bytes of the bodies in `requests`."""
        self._num_chunks = 0
        self._parser = httptools.HttpRequestParser(self)
        self._target = b""
        self._headers: dict[str, str] = {}
        self._body: bytes | bytearray = b""
        self._head_bytes = 0
        self._unparsed_bytes = 0
        self._had_callback = False
        self._upgrading = False
        self.requests: deque[HttpRequest] = deque()
        self.phase = ReadPhase.IDLE
        self.mark = 0
        self.done = False
        self.refusal: Response | None = None
        self.wants_continue = False

    def feed(self, data: bytes | memoryview) -> None:
        if self.done:
            return
        self._had_callback = False
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
        # The parser buffers an incomplete header line or trailer without a callback until its end.
        self._unparsed_bytes = 0 if self._had_callback else self._unparsed_bytes + len(data)
        if self._unparsed_bytes > self._limits.max_header_bytes and not self.done:
            self._refuse_headers()

    def refuse(self, status: int, message: str, code: str) -> None:
        self._end(json_error(status, message, code))

    def _end(self, refusal: Response) -> None:
        self.refusal = refusal
        self.done = True
        self._drop_body()

    def _drop_body(self) -> None:
        self._budget.available_bytes += self._num_receiving_bytes
        self._num_receiving_bytes = 0
        self._body = b""

    def next_request(self) -> HttpRequest:
        """Remove and return the oldest request."""
        request = self.requests.popleft()
        self._budget.available_bytes += len(request.body)
        self._num_queued_bytes -= len(request.body)
        return request

    def stop(self) -> None:
        """Accept no further requests, and drop those that are queued."""
        self.done = True
        self.requests.clear()
        self._budget.available_bytes += self._num_queued_bytes
        self._num_queued_bytes = 0
        self._drop_body()

    def release(self) -> None:
        """Break the reference cycle between reader and parser, so that a closed connection is freed immediately."""
        self.stop()
        del self._parser

    def _refuse_headers(self) -> None:
        self.refuse(431, f"headers exceed {self._limits.max_header_bytes} bytes", "headers_too_large")

    def _read_as_plain_request(self, rest: bytes | memoryview) -> None:
        # A server may ignore an upgrade (RFC 9110, 7.8), and some HTTP/2-capable clients offer one with every
        # plain-text request. llhttp would skip the body then, so the head is parsed again without the offer.
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.refuse(501, "CONNECT is not supported", "unsupported")
            return
        removed = {"upgrade", "http2-settings"}
        options = [option.strip().lower() for option in self._headers.pop("connection", "").split(",")]
        connection = "connection: close\r\n" if "close" in options else ""
        lines = "".join(
            [f"{name}: {value}\r\n" for name, value in self._headers.items() if name not in removed]
        )
        head = f"{connection}{lines}\r\n".encode("latin-1")
        line = b"%b %b HTTP/%b\r\n" % (method, self._target, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        self.feed(line + head)
        if rest:
            self.feed(rest)

    # llhttp's callbacks

    def on_message_begin(self) -> None:
        self._had_callback = True
        self._target = b""
        self._headers = {}
        self._body = b""
        self._head_bytes = 0
        self._num_chunks = 0
        self._upgrading = False
        self.wants_continue = False
        self.phase = ReadPhase.HEAD
        self.mark += 1

    def on_url(self, url: bytes) -> None:
        self._target = self._target + url if self._target else url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self.phase is ReadPhase.BODY:
            return  # trailers are ignored
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").rstrip(" \t")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def _count_head(self, num_bytes: int) -> None:
        self._had_callback = True
        self._head_bytes += num_bytes
        if self._head_bytes > self._limits.max_header_bytes:
            self._refuse_headers()
            raise _Stop

    def on_headers_complete(self) -> None:
        self._had_callback = True
        if self._parser.should_upgrade():
            self._upgrading = True
            return
        self.phase = ReadPhase.BODY
        self.mark += 1
        headers = self._headers
        if "content-length" in headers:
            # The parser has checked that the value fits in 64 bits, but allows any number of leading zeros.
            if int(headers["content-length"].lstrip("0") or "0") > self._limits.max_body_bytes:
                self._refuse_body()
        elif headers.get("transfer-encoding", "chunked").lower() != "chunked":
            self._refuse_request(501, "the only supported transfer encoding is chunked", "unsupported")
        if "," in headers.get("host", ""):
            self._refuse_request(400, "more than one Host header", "malformed_request")
        if "expect" in headers and self._parser.get_http_version() == "1.1":
            self.wants_continue = headers["expect"].lower() == "100-continue"

    def on_chunk_header(self) -> None:
        self._had_callback = True
        if (
            self._num_chunks > _MANY_CHUNKS
            and self._num_receiving_bytes < _SMALL_CHUNK_BYTES * self._num_chunks
        ):
            self._refuse_request(400, "the body has too many small chunks", "malformed_request")
        self._num_chunks += 1

    def on_body(self, part: bytes) -> None:
        self._had_callback = True
        size = len(part)
        self._num_receiving_bytes += size
        self._budget.available_bytes -= size
        if self._num_receiving_bytes > self._limits.max_body_bytes:
            self._refuse_body()
        if self._budget.available_bytes < 0:
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
        message = f"the body exceeds {self._limits.max_body_bytes} bytes"
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
            self._refuse_request(505, "only HTTP/1.1 and HTTP/1.0 are supported", "http_version")
        target = (
            self._target.decode("latin-1") if self._target.startswith(b"/") else self._target_without_host()
        )
        request = HttpRequest(
            parser.get_method().decode("ascii"), target, self._headers, bytes(self._body), self._peer, version
        )
        request.keep_alive = parser.should_keep_alive()
        self._body = b""
        self._num_queued_bytes += self._num_receiving_bytes
        self._num_receiving_bytes = 0
        self.requests.append(request)
        self.done = not request.keep_alive
        self.wants_continue = False
        self.phase = ReadPhase.IDLE
        self.mark += 1

    def _target_without_host(self) -> str:
        """Path of an absolute target, as sent to a proxy; `*` is returned unchanged."""
        if self._target == b"*":
            return "*"
        try:
            url = httptools.parse_url(self._target)
        except httptools.HttpParserError:
            self.refuse(400, "invalid request target", "malformed_request")
            raise _Stop from None
        path = (url.path or b"/").decode("latin-1")
        return f"{path}?{url.query.decode('latin-1')}" if url.query else path
