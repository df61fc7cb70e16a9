"""What a server's refusal means to us: whose fault it is, and whether another server could do better.

What a server breaks off, or fails at by itself, is told as EngineDied: another one may take the request, but not a
third, since it may be the request that kills them.
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
    """The error that an answer with another status than 200 stands for."""
    said = message_of(body) or f"status {status}"
    if status in _OF_THE_REQUEST:
        return InvalidRequest(said)
    if status in (401, 403):
        return Unavailable(f"{url} does not take our key: {said}", reason="unauthorized")
    if status == 404:  # of the model or of the path: the server is not the one that was attached
        return Unavailable(f"{url} does not know what was asked for: {said}", reason="not_found")
    if status in _BUSY:
        return Overloaded(f"{url} is busy: {said}", queue="server")
    if status == 501:
        return Unsupported(said, feature="server")
    return broken(url, f"failed: {said}")


def error_in_stream(url: str, error: Any) -> KvoltError:
    """What a server says in the place of a chunk, when its answer has begun with 200 already."""
    fields = error if isinstance(error, dict) else {}
    code = fields.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return refusal(url, status, msgspec.json.encode({"error": error}))


def message_of(body: bytes) -> str:
    """The words in an error's body, whichever server's shape it has; empty where there are none."""
    try:
        said: Any = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return " ".join(body[:_MAX_CHARS].decode(errors="replace").split())
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return str(said)[:_MAX_CHARS]
