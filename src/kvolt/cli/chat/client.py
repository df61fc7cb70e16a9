"""Blocking client for OpenAI-compatible servers, on the standard library.

Handles URLs, connections, TLS and the mapping of HTTP errors; knows nothing of terminals or conversations.
Errors carry their remedy as a field.
"""

from __future__ import annotations

import http.client
import json
import re
import ssl
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from kvolt import __version__
from kvolt.cli.chat.stream import (
    EVENT_LIMIT_BYTES,
    ChunkReader,
    Piece,
    SseParser,
    error_message,
    one_line,
    read_json,
)
from kvolt.core.errors import (
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    InvalidRequest,
    KvoltError,
    NotFound,
    Overloaded,
    ProtocolError,
    Unavailable,
    Unsupported,
    WorkerLost,
)

ANSWER_LIMIT_BYTES = 64 << 20
_REFUSAL_LIMIT_BYTES = 64 << 10
_READ_BYTES = 64 << 10
_START = "start a server with `kvolt serve`, or set --url"
_SET_KEY = "set --api-key or OPENAI_API_KEY"


class ChatClient:
    """Client of one server. Each request uses its own connection; closing it cancels the request."""

    def __init__(
        self, url: str, api_key: str | None = None, timeout_s: float = 300.0, connect_timeout_s: float = 10.0
    ) -> None:
        parts = _split(url)
        self._secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._path = _api_path(parts.path)
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._timeout_s = timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._headers = {"content-type": "application/json", "user-agent": f"kvolt/{__version__}"}
        api_key = (api_key or "").strip()
        if not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("the API key contains invalid characters", key="api_key", remedy=_SET_KEY)
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Names of the served models."""
        with self._request("GET", "/models") as response:
            listed = read_json(response.read(EVENT_LIMIT_BYTES))
        data = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(data, list):
            raise self._incompatible("invalid model list")
        return [str(model["id"]) for model in data if isinstance(model, dict) and "id" in model]

    def stream(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """Stream an answer. Closing the iterator cancels the request."""
        with self._request("POST", "/chat/completions", body) as response:
            reader = ChunkReader()
            if response.headers.get_content_type() != "text/event-stream":
                yield reader.read(response.read(ANSWER_LIMIT_BYTES))  # the server does not stream
                return
            for event in _events(response):
                if event == b"[DONE]":
                    return
                yield reader.read(event)
            if not reader.finished:
                raise WorkerLost("the answer was cut off: the stream ended early", address=self.url)

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            # json accepts lone surrogates, msgspec does not.
            payload = None if body is None else json.dumps(body).encode()
            with suppress(BrokenPipeError):  # the server rejected a long body early; its response says why
                connection.request(method, self._path + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _response_error(response)
            yield response
        except TimeoutError as error:
            message = f"no data from {self.url} for {self._timeout_s:g} s"
            raise DeadlineExceeded(message, stage="between", after_s=self._timeout_s) from error
        except (http.client.RemoteDisconnected, http.client.IncompleteRead, OSError) as error:
            message = f"the answer was cut off: {_reason(error)}"
            raise WorkerLost(message, address=self.url, reason=type(error).__name__) from error
        except http.client.HTTPException as error:
            raise self._incompatible(f"invalid HTTP response ({type(error).__name__})") from error
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        connection = (
            http.client.HTTPSConnection(
                self._host,
                self._port,
                timeout=self._connect_timeout_s,
                context=ssl.create_default_context(),
            )
            if self._secure
            else http.client.HTTPConnection(self._host, self._port, timeout=self._connect_timeout_s)
        )
        try:
            connection.connect()
            connection.sock.settimeout(self._timeout_s)
        except (OSError, UnicodeError) as error:  # UnicodeError: invalid host name
            connection.close()
            raise self._unreachable(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _unreachable(self, error: OSError | UnicodeError) -> ConnectFailed:
        if isinstance(error, ssl.SSLCertVerificationError):
            message = f"the certificate of {self.url} is not trusted: {error.verify_message}"
            remedy = "set SSL_CERT_FILE to a file with its certificate authority"
        elif isinstance(error, ssl.SSLError):
            message, remedy = f"{self.url} does not speak TLS: {_reason(error)}", "try http://"
        else:
            message, remedy = f"cannot connect to {self.url}: {_reason(error)}", _START
        return ConnectFailed(message, address=self.url, remedy=remedy)

    def _incompatible(self, why: str) -> ProtocolError:
        return ProtocolError(f"{self.url} is not an OpenAI-compatible server: {why}", rule="openai")


def _split(url: str) -> SplitResult:
    text = url.strip()
    remedy = "write it as http://HOST:PORT"
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"invalid URL {text!r}", key="url", remedy=remedy)
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"invalid URL {text}: {error}", key="url", remedy=remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"invalid server URL {text}", key="url", remedy=remedy)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            "the URL has user info, a query or a fragment", key="url", remedy=f"{remedy}; {_SET_KEY}"
        )
    return parts


def _api_path(path: str) -> str:
    """Base path of the API: as given if it has a version, else with /v1."""
    path = path.rstrip("/").removesuffix("/chat/completions")
    return path if re.search(r"/v\d\w*(/|$)", path) else f"{path}/v1"


def _events(response: http.client.HTTPResponse) -> Iterator[bytes]:
    parser = SseParser()
    num_bytes = 0
    while data := response.read1(_READ_BYTES):
        num_bytes += len(data)
        if num_bytes > ANSWER_LIMIT_BYTES:
            raise ProtocolError(f"the answer is over {ANSWER_LIMIT_BYTES} bytes", rule="answer size")
        yield from parser.feed(data)


def _response_error(response: http.client.HTTPResponse) -> KvoltError:
    """Map a response other than 200 to an error."""
    status = response.status
    body = response.read(_REFUSAL_LIMIT_BYTES)
    try:
        text = error_message(read_json(body), body)
    except ProtocolError:
        text = one_line(body.decode(errors="replace"))
    message = f"the server responded {status}: {text or response.reason}"
    match status:
        case 401 | 403:
            return InvalidRequest(message, remedy=_SET_KEY)
        case 404:
            return NotFound(message, remedy="check --url and --model")
        case 408 | 504:
            return DeadlineExceeded(message, stage="total")
        case 429 | 503:
            wait_s = response.getheader("retry-after", "")
            if wait_s.isdecimal():
                message += f" (try again in {wait_s} s)"
            return Overloaded(message) if status == 429 else Unavailable(message)
        case 501:
            return Unsupported(message)
        case _ if 300 <= status < 400:
            return InvalidRequest(f"the server redirects to {one_line(response.getheader('location', '?'))}")
        case _ if 400 <= status < 500:
            return InvalidRequest(message)
        case _:
            return KvoltError(message)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "connection timed out"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "the server closed the connection"
    strerror = getattr(error, "strerror", None)
    return one_line(str(strerror or error)).lower()
