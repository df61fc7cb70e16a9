"""HTTP server of the frontend, the admin port and the router: routes, error mapping, start and stop.

`protocol` has the messages, `reader` parses requests, `connection` serves one client. Independent of API formats,
except for the shape of an error body.

    routes = Routes()
    routes.add("GET", "/v1/models/{model}", show_model)
    server = HttpServer(SocketNetwork(), routes, SystemClock())
    address = await server.start("127.0.0.1:0")
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
import random
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from email.utils import formatdate
from typing import Any
from urllib.parse import unquote

from kvolt.core.errors import (
    ConfigError,
    DeadlineExceeded,
    Fault,
    InvalidRequest,
    KvoltError,
    NetworkFault,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    Unavailable,
    Unsupported,
)
from kvolt.runtime.clock import Clock, new_id
from kvolt.runtime.http.connection import HttpConnection
from kvolt.runtime.http.cors import CorsPolicy
from kvolt.runtime.http.protocol import (
    HttpLimits,
    HttpRequest,
    Response,
    json_error,
)
from kvolt.runtime.http.reader import BodyBudget
from kvolt.runtime.http.writer import AnyResponse, TickWrites, WrittenResponse
from kvolt.runtime.network import Listener, Network
from kvolt.runtime.tasks import TaskGroup

__all__ = [
    "AnyResponse",
    "Handler",
    "HttpLimits",
    "HttpRequest",
    "HttpServer",
    "Response",
    "Routes",
    "WrittenResponse",
    "error_response",
    "json_error",
]

log = logging.getLogger(__name__)

Handler = Callable[[HttpRequest], Awaitable[AnyResponse]]
ErrorResponse = Callable[[KvoltError], Response]
Observe = Callable[[str, int, float], None]
"""Called with (method, status, seconds) at the end of every response."""

_FLUSH_S = 1.0
"""Time for final responses to be sent after the drain deadline, before connections are aborted."""

_STATUS_OF: dict[type[KvoltError], int] = {
    InvalidRequest: 400,
    NotFound: 404,
    PayloadTooLarge: 413,
    Overloaded: 429,
    Unsupported: 501,
    NetworkFault: 502,
    Unavailable: 503,
    DeadlineExceeded: 504,
}

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")

_SHOWN_CHARS = 200
"""Characters of an unknown path that are repeated in an error."""
_MAX_COMPARED_CHARS = 64
"""Longer unknown paths are not compared with the known ones."""

_INTERNAL = json_error(500, "internal error", "internal")


def error_response(error: KvoltError) -> Response:
    """Default mapping: the nearest mapped base type decides; other errors are a 500."""
    status = next((_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF), 500)
    param = error.fields.get("param")
    wait_s = error.fields.get("retry_after_s", 1 if status == 429 else None)
    headers = {"retry-after": str(max(1, math.ceil(wait_s)))} if isinstance(wait_s, int | float) else {}
    return json_error(status, error.message, error.code, str(param) if param is not None else None, headers)


class _Pattern:
    """A path with parameters: `{name}` matches one segment, a final `{name:path}` the rest of the path."""

    __slots__ = ("_rest_name", "_segments", "methods")

    def __init__(self, path: str) -> None:
        segments = path.split("/")
        self._rest_name = segments.pop()[1:-6] if segments[-1].endswith(":path}") else None
        self._segments = segments
        self.methods: dict[str, Handler] = {}

    def match(self, segments: list[str]) -> dict[str, str] | None:
        """Match and return the parameters, decoded after splitting so that an encoded slash stays in its value."""
        count = len(self._segments)
        if len(segments) <= count if self._rest_name is not None else len(segments) != count:
            return None
        params: dict[str, str] = {}
        for expected, segment in zip(self._segments, segments, strict=False):
            if expected.startswith("{"):
                if not segment:
                    return None
                params[expected[1:-1]] = unquote(segment)
            elif expected != segment:
                return None
        if self._rest_name is not None:
            params[self._rest_name] = unquote("/".join(segments[count:]))
        return params


class Routes:
    """Handlers by path and method. Exact paths take precedence; among patterns, the one added first."""

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: dict[str, _Pattern] = {}
        self.notes: dict[str, str] = {}
        """By unknown path: what its 404 says in place of similar paths."""

    def add(self, method: str, path: str, handler: Handler) -> None:
        if "{" in path:
            methods = self._patterns.setdefault(path, _Pattern(path)).methods
        else:
            methods = self._exact.setdefault(path, {})
        if method in methods:
            raise ConfigError(f"duplicate handler for {method} {path}", key=path, remedy="remove one")
        methods[method] = handler

    def resolve(self, request: HttpRequest) -> Handler | Response:
        """Return the handler and set `request.params`, or return a 404 or 405 response.

        A slash at the end of a path is ignored.
        """
        path = request.path
        methods = self._exact.get(path)
        if methods is None:
            path = path.rstrip("/") or "/"
            methods = self._exact.get(path) or self._resolve_pattern(request, path)
        if methods is None:
            hint = f"; {self.notes[path]}" if path in self.notes else self._suggest(path)
            message = f"unknown path {request.path[:_SHOWN_CHARS]}{hint}"
            return json_error(404, message, "not_found")
        handler = methods.get(request.method)
        if handler is None and request.method == "HEAD":
            handler = methods.get("GET")
        if handler is not None:
            return handler
        allowed = [*methods, "HEAD"] if "GET" in methods and "HEAD" not in methods else list(methods)
        message = f"{request.path[:_SHOWN_CHARS]} does not support {request.method}"
        return json_error(405, message, "method_not_allowed", headers={"allow": ", ".join(allowed)})

    def paths(self) -> list[str]:
        return [*self._exact, *self._patterns]

    def _suggest(self, path: str) -> str:
        """Known paths that are like an unknown one."""
        if len(path) > _MAX_COMPARED_CHARS:
            return ""
        known = [each for each in self._exact if each != "/"]
        close = [each for each in known if path != "/" and (each.endswith(path) or path.endswith(each))]
        close = close or difflib.get_close_matches(path, known, n=2, cutoff=0.7)
        return f"; did you mean {' or '.join(close[:2])}?" if close else ""

    def _resolve_pattern(self, request: HttpRequest, path: str) -> dict[str, Handler] | None:
        segments = path.split("/")
        for pattern in self._patterns.values():
            params = pattern.match(segments)
            if params is not None:
                request.params = params
                return pattern.methods
        return None


class HttpServer:
    """Serves `routes` on one address. On close: refuse new connections, drain until the deadline, cancel the rest."""

    def __init__(
        self,
        network: Network,
        routes: Routes,
        clock: Clock,
        limits: HttpLimits | None = None,
        error_response: ErrorResponse = error_response,
        observe: Observe | None = None,
        rng: random.Random | None = None,
        request_id_headers: Sequence[str] = ("x-request-id",),
        cors: CorsPolicy | None = None,
    ) -> None:
        self.limits = limits if limits is not None else HttpLimits()
        self.draining = False
        self.bodies = BodyBudget(self.limits.max_buffered_bytes)
        self.tick = TickWrites(asyncio.get_running_loop(), clock.monotonic)
        self._network = network
        self._routes = routes
        self._clock = clock
        self._error_response = error_response
        self._observe = observe
        self._request_id_headers = request_id_headers
        """Headers in which a client may send a request id; the first valid one is used."""
        self._cors = cors
        self._rng = rng if rng is not None else random.SystemRandom()
        self._task_group = TaskGroup("http")
        self._listener: Listener | None = None
        self._connections: dict[HttpConnection, None] = {}
        self._all_closed = asyncio.Event()
        self._date_line = ""
        self._date_second = -1

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def start(self, address: str) -> str:
        """Listen; returns the bound address, with the port chosen by the system."""
        self._listener = await self._network.listen(address, lambda: HttpConnection(self))
        return self._listener.address

    async def close(self, drain_s: float = 0.0) -> None:
        """Stop accepting, let running requests finish within `drain_s`, cancel the rest. Idempotent."""
        self.draining = True
        if self._listener is not None:
            await self._listener.close()
        for connection in list(self._connections):
            connection.finish()
        await self._wait_closed(drain_s)
        for connection in list(self._connections):
            connection.stop_reading()
        await self._task_group.close()
        for connection in list(self._connections):
            connection.close()
        await self._wait_closed(_FLUSH_S)
        for connection in list(self._connections):
            connection.abort()
        await self._wait_closed(_FLUSH_S)

    async def _wait_closed(self, timeout_s: float) -> None:
        if not self._connections:
            return
        self._all_closed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            pass

    # connection.Host

    def admit(self, connection: HttpConnection) -> bool:
        if self.draining or len(self._connections) >= self.limits.max_connections:
            return False
        self._connections[connection] = None
        return True

    def remove_connection(self, connection: HttpConnection) -> None:
        self._connections.pop(connection, None)
        if not self._connections:
            self._all_closed.set()

    def start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        return self._task_group.start(work, "request")

    async def respond(self, request: HttpRequest) -> AnyResponse:
        if self._cors is None or "origin" not in request.headers:
            return await self._handle(request)
        response = self._cors.preflight(request)
        if response is not None:
            return response
        return self._cors.with_headers(request, await self._handle(request))

    async def _handle(self, request: HttpRequest) -> AnyResponse:
        resolved = self._routes.resolve(request)
        if isinstance(resolved, Response):
            return resolved
        try:
            return await resolved(request)
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            return self._failure(error, request.id)  # something it awaited was cancelled, not the handler
        except Exception as error:
            return self._failure(error, request.id)

    def failure(self, error: BaseException, request: HttpRequest) -> Response:
        response = self._failure(error, request.id)
        return response if self._cors is None else self._cors.with_headers(request, response)

    def _failure(self, error: BaseException, request_id: str) -> Response:
        if isinstance(error, KvoltError):
            response = self._error_response(error)
            if response.status >= 500:
                level = logging.INFO if error.fault is Fault.CALLER else logging.WARNING
                log.log(
                    level,
                    "request failed: request_id=%s code=%s error=%s",
                    request_id,
                    error.code,
                    error.message,
                )
            return response
        log.error("request failed: request_id=%s", request_id, exc_info=error)
        return _INTERNAL

    def observe(self, method: str, status: int, started: float) -> None:
        if self._observe is not None:
            self._observe(method, status, self._clock.monotonic() - started)

    def now(self) -> float:
        return self._clock.monotonic()

    def identify(self, request: HttpRequest | None) -> str:
        for name in self._request_id_headers if request is not None else ():
            request_id = request.headers.get(name) if request is not None else None
            if request_id is not None and _REQUEST_ID.fullmatch(request_id):
                return request_id
        return new_id(self._rng)

    def date_line(self) -> str:
        second = int(self._clock.wall())
        if second != self._date_second:
            self._date_second = second
            self._date_line = f"date: {formatdate(second, usegmt=True)}\r\n"
        return self._date_line


def _is_being_cancelled() -> bool:
    # A separate function, so that no frame of the traceback refers to the task that will refer to the traceback.
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
