"""Admin server of a process: health, metrics, and controls for operators.

Defines the paths and responses. `Controls` implements cordon, drain, resume and the commands.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.runtime.clock import Clock
from kvolt.runtime.health import Health
from kvolt.runtime.http.server import (
    AnyResponse,
    Handler,
    HttpLimits,
    HttpRequest,
    HttpServer,
    Response,
    Routes,
    json_error,
)
from kvolt.runtime.metrics import Metrics
from kvolt.runtime.network import Network
from kvolt.runtime.process_control import MAX_CONTROL_S, Controls
from kvolt.runtime.security.access import may_control

_LIMITS = HttpLimits(max_connections=64, max_body_bytes=64 * 1024, max_header_bytes=16 * 1024)

COMMANDS = {
    "/clear_kv_blocks": "clear_kv_blocks",
    "/kv_tiers/resize": "resize_kv_tiers",
    "/router/explain": "explain_route",
    "/sleep": "sleep",
    "/wake_up": "wake_up",
    "/v1/load_lora_adapter": "load_lora_adapter",
    "/v1/unload_lora_adapter": "unload_lora_adapter",
}
"""Path -> command; each process supports some of them. The paths for adapters and sleep are vLLM's. Fields of the body
can be query parameters instead, as vLLM's `level` is."""


class AdminServer:
    """HTTP server with `/health`, `/live`, `/ready`, `/metrics`, `/status`; POST `/cordon`, `/drain?timeout_s=`,
    `/resume` and COMMANDS."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        health: Health,
        metrics: Metrics,
        controls: Controls,
        default_drain_s: float = 30.0,
        requires_identity: bool = False,
    ) -> None:
        """`requires_identity`: only clients with a certificate of the cluster may do more than probe and scrape."""
        self._requires_identity = requires_identity
        self._health = health
        self._metrics = metrics
        self._controls = controls
        self._default_drain_s = default_drain_s
        observe = metrics.http_observer("admin")
        self._server = HttpServer(network, self._routes(), clock, _LIMITS, observe=observe)

    def _routes(self) -> Routes:
        routes = Routes()
        routes.add("GET", "/health", self._report(self._health.healthy))
        routes.add("GET", "/live", self._report(lambda: True))
        routes.add("GET", "/ready", self._report(self._health.ready))
        routes.add("GET", "/metrics", self._show_metrics)
        routes.add("GET", "/status", self._for_operators(self._show_status))
        routes.add("POST", "/cordon", self._for_operators(self._cordon))
        routes.add("POST", "/drain", self._for_operators(self._drain))
        routes.add("POST", "/resume", self._for_operators(self._resume))
        for path, name in COMMANDS.items():
            routes.add("POST", path, self._for_operators(self._command(name)))
        return routes

    def _for_operators(self, handler: Handler) -> Handler:
        # Loopback does not protect from a browser on the same machine: any page can post to it. Browsers send these
        # headers.
        async def guarded(request: HttpRequest) -> AnyResponse:
            if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") != "none":
                return _WEB_PAGE
            if self._requires_identity and not may_control(request.identity):
                return _NO_IDENTITY
            return await handler(request)

        return guarded

    async def start(self, address: str) -> str:
        return await self._server.start(address)

    async def close(self, drain_s: float = 0.0) -> None:
        await self._server.close(drain_s)

    def _report(self, is_ok: Callable[[], bool]) -> Handler:
        async def show(request: HttpRequest) -> Response:
            return Response(200 if is_ok() else 503, msgspec.json.encode(self._health.report()))

        return show

    async def _show_metrics(self, request: HttpRequest) -> Response:
        body, content_type = self._metrics.render()
        return Response(200, body, content_type=content_type)

    async def _show_status(self, request: HttpRequest) -> Response:
        return Response(200, msgspec.json.encode(await self._controls.status()))

    async def _cordon(self, request: HttpRequest) -> Response:
        await self._controls.cordon()
        return await self._show_status(request)

    async def _drain(self, request: HttpRequest) -> Response:
        await self._controls.drain(self._drain_timeout(request))
        return await self._show_status(request)

    async def _resume(self, request: HttpRequest) -> Response:
        await self._controls.resume()
        return await self._show_status(request)

    def _command(self, name: str) -> Handler:
        async def perform(request: HttpRequest) -> Response:
            body = request.body or (msgspec.json.encode(request.query) if request.query else b"")
            return Response(200, msgspec.json.encode(await self._controls.command(name, body)))

        return perform

    def _drain_timeout(self, request: HttpRequest) -> float:
        text = request.query.get("timeout_s")
        if text is None:
            return self._default_drain_s
        try:
            timeout_s = float(text)
        except ValueError:
            timeout_s = math.nan
        if not 0 <= timeout_s <= MAX_CONTROL_S:
            raise InvalidRequest(f"timeout_s must be a number from 0 to {MAX_CONTROL_S:g}", param="timeout_s")
        return timeout_s


_WEB_PAGE = json_error(403, "the admin API refuses requests from web pages", "forbidden")
_NO_IDENTITY = json_error(
    403,
    "this needs a certificate of the cluster; create one with `kvolt cluster issue --role client`",
    "access_denied",
)
