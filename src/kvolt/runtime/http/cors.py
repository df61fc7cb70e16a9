"""CORS: which web pages of other origins may call the server from a browser (https://fetch.spec.whatwg.org).

Without a policy a browser refuses such pages, as it should: a page could use servers that only its visitor reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import overload

import msgspec

from kvolt.runtime.http.protocol import HttpRequest, Response, json_error
from kvolt.runtime.http.writer import AnyResponse

ANY = "*"
_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,4096}")
_METHODS = "GET, HEAD, POST"
_MAX_AGE_S = 600
_SHOWN_CHARS = 100


class CorsPolicy:
    """Allowed origins. Cookies and other credentials are allowed for origins that are named, never for `*`."""

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.lower() for origin in origins)
        self._allows_any = ANY in self._origins

    def preflight(self, request: HttpRequest) -> Response | None:
        """Answer to a preflight request; None if it is another request."""
        if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
            return None
        origin_headers = self._origin_headers(request)
        if origin_headers is None:
            origin = request.headers.get("origin", "")[:_SHOWN_CHARS]
            return json_error(403, f"the origin {origin!r} is not one of frontend.cors_origins", "forbidden")
        headers = {
            **origin_headers,
            "access-control-allow-methods": _METHODS,
            "access-control-max-age": str(_MAX_AGE_S),
        }
        names = request.headers.get("access-control-request-headers", "")
        if _NAMES.fullmatch(names):
            headers["access-control-allow-headers"] = names
        return Response(204, headers=headers, content_type="")

    @overload
    def with_headers(self, request: HttpRequest, response: Response) -> Response: ...

    @overload
    def with_headers(self, request: HttpRequest, response: AnyResponse) -> AnyResponse: ...

    def with_headers(self, request: HttpRequest, response: AnyResponse) -> AnyResponse:
        """The response, readable by a page of an allowed origin."""
        origin_headers = self._origin_headers(request)
        if origin_headers is None:
            return response
        readable = ", ".join(["x-request-id", *response.headers])
        headers = {**response.headers, **origin_headers, "access-control-expose-headers": readable}
        if isinstance(response, Response):
            return msgspec.structs.replace(response, headers=headers)
        return response._replace(headers=headers)

    def _origin_headers(self, request: HttpRequest) -> Mapping[str, str] | None:
        origin = request.headers.get("origin")
        if origin is None:
            return None
        if origin.lower() in self._origins and origin != ANY:
            return {
                "access-control-allow-origin": origin,
                "access-control-allow-credentials": "true",
                "vary": "origin",
            }
        return {"access-control-allow-origin": ANY} if self._allows_any else None
