"""Maps error responses of a server to kvolt's errors: whose fault it is, and whether another worker may succeed.

Broken streams and internal errors become EngineDied: one other worker may take the request, but not a third, since the
request may be the cause.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.core.errors import EngineDied, InvalidRequest, KvoltError, Overloaded, Unavailable, Unsupported

ENGINE = "remote"

_MAX_CHARS = 500
_OF_THE_REQUEST = (400, 413, 422)
_BUSY = (408, 425, 429, 503)


def broken(url: str, what: str) -> EngineDied:
    return EngineDied(f"{url} {what}", engine=ENGINE)


def refusal(url: str, status: int, body: bytes) -> KvoltError:
    """Error of a response with a status other than 200."""
    message = message_of(body) or f"status {status}"
    if status in _OF_THE_REQUEST:
        return InvalidRequest(message)
    if status in (401, 403):
        return Unavailable(f"{url} rejected the API key: {message}", reason="unauthorized")
    if status == 404:  # model or path unknown: another server than the one attached
        return Unavailable(f"{url} does not know the model or path: {message}", reason="not_found")
    if status in _BUSY:
        return Overloaded(f"{url} is busy: {message}", queue="server")
    if status == 501:
        return Unsupported(message, feature="server")
    return broken(url, f"failed: {message}")


def error_in_stream(url: str, error: Any) -> KvoltError:
    """Error sent as an event, after the response started with status 200."""
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return refusal(url, status, msgspec.json.encode({"error": error}))


def message_of(body: bytes) -> str:
    """Error message in a response body of any server; empty if there is none."""
    try:
        error: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return " ".join(body[:_MAX_CHARS].decode(errors="replace").split())
    for name in ("error", "message", "detail"):
        if isinstance(error, dict) and name in error:
            error = error[name]
    return str(error)[:_MAX_CHARS]
