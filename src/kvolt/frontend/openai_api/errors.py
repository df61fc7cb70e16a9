"""Errors as OpenAI's clients read them: status, body, headers, the event in a stream, the metrics label.

Owns the mapping from the error tree to HTTP. A client is told what it can act on: what it did wrong, in
full, and of our own troubles only what kind they are. Addresses, type names and engine messages stay in
the log, where the request id finds them.

The `type`s are the three that OpenAI's API uses: `invalid_request_error`, `rate_limit_error`,
`server_error`; `code` says more. OpenAI has no 502: a worker that was lost is a 503, to be tried again.
"""

from __future__ import annotations

import math

from kvolt.core.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    EngineDied,
    EngineFailed,
    ErrorInfo,
    Fault,
    FieldValue,
    InvalidRequest,
    KvoltError,
    NetworkFault,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    Unavailable,
    Unsupported,
    to_info,
)
from kvolt.runtime.http.server import Response, json_error

CANCELLED_STATUS = 499
"""Counted, never sent: the client left before its answer was complete."""


_MAX_RETRY_AFTER_S = 3600

_HEADER_OF = {"gpu_work": "x-kvolt-gpu-work"}


class UnsupportedMediaType(InvalidRequest):
    """The body is not declared as JSON. Fields: content_type."""

    code = "unsupported_media_type"


_STATUS_OF: dict[type[KvoltError], int] = {
    InvalidRequest: 400,
    NotFound: 404,
    PayloadTooLarge: 413,
    UnsupportedMediaType: 415,
    Overloaded: 429,
    Cancelled: CANCELLED_STATUS,
    Unsupported: 501,
    NetworkFault: 503,
    EngineDied: 503,
    ProtocolError: 500,
    Unavailable: 503,
    DeadlineExceeded: 504,
    KvoltError: 500,
}

_LABEL_OF = {
    400: "validation",
    404: "not_found",
    413: "validation",
    415: "validation",
    429: "overload",
    CANCELLED_STATUS: "cancelled",
    500: "internal",
    501: "not_implemented",
    503: "unavailable",
    504: "response_timeout",
}

_TELLABLE = (Overloaded, Unavailable, DeadlineExceeded)
"""Not the caller's fault, but their words are for the caller: a queue, a model, a number of seconds."""

_PLAIN_WORDS: dict[type[KvoltError], tuple[str, str]] = {
    NetworkFault: ("a worker could not be reached; try again", "worker_unreachable"),
    ProtocolError: ("internal error", "internal"),
    EngineDied: ("the engine ended before the answer was complete; try again", "engine_died"),
    EngineFailed: ("the engine failed on this request", "engine_failed"),
    Cancelled: ("the request was cancelled before it was complete; try again", "cancelled"),
    ConfigError: ("internal error", "internal"),
    KvoltError: ("internal error", "internal"),
}
"""(message, code) in place of words that were meant for an operator."""


def status_of(error: BaseException) -> int:
    """The HTTP status that metrics count; 499 when the client, or the process, gave up."""
    if isinstance(error, KvoltError):
        return next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
    return 500 if isinstance(error, Exception) else CANCELLED_STATUS  # CancelledError, GeneratorExit


def error_type_label(error: BaseException) -> str:
    """The value of the `error_type` label, from Dynamo's vocabulary."""
    return _LABEL_OF[status_of(error)]


def openai_error(error: BaseException) -> Response:
    """The response for `error`; anything that is not ours is an anonymous 500."""
    if not isinstance(error, KvoltError):
        error = KvoltError("internal error")
    status = status_of(error)
    if status == CANCELLED_STATUS:
        status = 503  # someone is here to be answered, so it was not the client that left
    info = to_info(error)
    message, code = _words(error, info)
    param = info.fields.get("param")
    details = _details(error, status)
    headers = _headers(error, status) | {_HEADER_OF[name]: value for name, value in details.items()}
    return json_error(status, message, code, str(param) if param is not None else None, headers, details)


def error_event(error: BaseException) -> bytes:
    """The same error as the last event of a stream whose status is already out."""
    return b"data: " + openai_error(error).body + b"\n\n"


def _words(error: KvoltError, info: ErrorInfo) -> tuple[str, str]:
    if error.fault is not Fault.CALLER and not isinstance(error, _TELLABLE):
        return next(_PLAIN_WORDS[kind] for kind in type(error).__mro__ if kind in _PLAIN_WORDS)
    return info.message, _code(error, info)


def _code(error: KvoltError, info: ErrorInfo) -> str:
    """A code that OpenAI's clients know, where there is one; a validator may set its own by a field."""
    own = info.fields.get("code")
    if isinstance(own, str) and own:
        return own
    if isinstance(error, NotFound) and error.fields.get("kind") == "model":
        return "model_not_found"
    if isinstance(error, DeadlineExceeded):
        return "timeout"
    return error.code


def _details(error: KvoltError, status: int) -> dict[str, str]:
    """Whether trying again would be the second time that it is computed."""
    spent = error.fields.get("gpu_work")
    return {"gpu_work": spent} if isinstance(spent, str) and (status == 429 or status >= 500) else {}


def _headers(error: KvoltError, status: int) -> dict[str, str]:
    if status in (429, 503):
        return {"retry-after": str(_wait_s(error.fields.get("retry_after_s")))}
    if status >= 500 and not error.retryable:
        return {"x-should-retry": "false"}  # else the SDKs repeat every 5xx, twice, in vain
    return {}


def _wait_s(asked: FieldValue) -> int:
    if isinstance(asked, int | float) and 1 <= asked < math.inf:
        return math.ceil(min(asked, _MAX_RETRY_AFTER_S))
    return 1
