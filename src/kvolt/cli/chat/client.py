"""A small client of any OpenAI-compatible server, on the standard library. Blocking.

Owns addresses, connections, TLS, and what a refusal means. Must not know terminals or conversations. An
error whose remedy is known carries it as a field.
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
_START = "start one with `kvolt serve`, or name another with --url"
_GIVE_KEY = "give a key with --api-key or OPENAI_API_KEY"


class ChatClient:
    """One server. Each request has a connection of its own, so giving up an answer is closing it."""

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
            raise ConfigError("the API key has characters that no key has", key="api_key", remedy=_GIVE_KEY)
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """The names of what is served there."""
        with self._request("GET", "/models") as response:
            listed = read_json(response.read(EVENT_LIMIT_BYTES))
        data = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(data, list):
            raise self._no_openai("its list of models is none")
        return [str(model["id"]) for model in data if isinstance(model, dict) and "id" in model]

    def stream(self, body: dict[str, Any]) -> Generator[Piece, None, None]:
        """An answer as it comes. Closing the iterator ends the request."""
        with self._request("POST", "/chat/completions", body) as response:
            reader = ChunkReader()
            if response.headers.get_content_type() != "text/event-stream":
                yield reader.read(response.read(ANSWER_LIMIT_BYTES))  # a server that does not stream
                return
            for event in _events(response):
                if event == b"[DONE]":
                    return
                yield reader.read(event)
            if not reader.finished:
                raise WorkerLost("the answer broke off: the stream ended early", address=self.url)

    @contextmanager
    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[http.client.HTTPResponse]:
        connection = self._connect()
        try:
            # Not msgspec: whatever was typed must be sent, half a surrogate pair too.
            payload = None if body is None else json.dumps(body).encode()
            with suppress(BrokenPipeError):  # who refuses a long body early has said why
                connection.request(method, self._path + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise _refusal(response)
            yield response
        except TimeoutError as error:
            message = f"{self.url} was silent for {self._timeout_s:g} s"
            raise DeadlineExceeded(message, stage="between", after_s=self._timeout_s) from error
        except (http.client.RemoteDisconnected, http.client.IncompleteRead, OSError) as error:
            message = f"the answer broke off: {_reason(error)}"
            raise WorkerLost(message, address=self.url, reason=type(error).__name__) from error
        except http.client.HTTPException as error:
            raise self._no_openai(f"its answer is no HTTP ({type(error).__name__})") from error
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
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that DNS cannot hold
            connection.close()
            raise self._unreachable(error) from error
        except BaseException:
            connection.close()
            raise
        return connection

    def _unreachable(self, error: OSError | UnicodeError) -> ConnectFailed:
        if isinstance(error, ssl.SSLCertVerificationError):
            message = f"the certificate of {self.url} is not trusted: {error.verify_message}"
            remedy = "set SSL_CERT_FILE to a file with the authority that signed it"
        elif isinstance(error, ssl.SSLError):
            message, remedy = f"{self.url} does not speak TLS: {_reason(error)}", "try http://"
        else:
            message, remedy = f"nothing answers at {self.url}: {_reason(error)}", _START
        return ConnectFailed(message, address=self.url, remedy=remedy)

    def _no_openai(self, why: str) -> ProtocolError:
        return ProtocolError(f"{self.url} is no OpenAI-compatible server: {why}", rule="openai")


def _split(url: str) -> SplitResult:
    text = url.strip()
    remedy = "write it as http://HOST:PORT"
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise ConfigError(f"{text!r} is no URL", key="url", remedy=remedy)
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text} is no URL: {error}", key="url", remedy=remedy) from error
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"{text} is no URL of a server", key="url", remedy=remedy)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            "the URL has more than host, port and path", key="url", remedy=f"{remedy}; {_GIVE_KEY}"
        )
    return parts


def _api_path(path: str) -> str:
    """Where the API begins: below a version if the path names one anywhere, else below /v1."""
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


def _refusal(response: http.client.HTTPResponse) -> KvoltError:
    """The error that an answer other than 200 stands for."""
    status = response.status
    body = response.read(_REFUSAL_LIMIT_BYTES)
    try:
        said = error_message(read_json(body), body)
    except ProtocolError:
        said = one_line(body.decode(errors="replace"))
    message = f"the server answers {status}: {said or response.reason}"
    match status:
        case 401 | 403:
            return InvalidRequest(message, remedy=_GIVE_KEY)
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
            return InvalidRequest(
                f"the server sends us on to {one_line(response.getheader('location', '?'))}"
            )
        case _ if 400 <= status < 500:
            return InvalidRequest(message)
        case _:
            return KvoltError(message)


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "it does not take connections"
    if isinstance(error, http.client.RemoteDisconnected | http.client.IncompleteRead):
        return "the server closed the connection"
    strerror = getattr(error, "strerror", None)
    return one_line(str(strerror or error)).lower()
