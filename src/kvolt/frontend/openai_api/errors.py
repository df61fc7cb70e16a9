"""Maps errors to OpenAI's format: status, body, headers, the error event of a stream, the metrics label.

A client gets details only of errors that it can act on. Other errors are reduced to their kind: addresses, type names
and engine messages are only logged, under the request id.

`type` is one of the three values of OpenAI's API: `invalid_request_error`, `rate_limit_error`, `server_error`; `code`
is more specific. OpenAI does not use 502: a lost worker is a retryable 503.
"""

from __future__ import annotations

import math

from kvolt.core import errors
from kvolt.core.errors import KvoltError
from kvolt.runtime.http.server import Response, json_error

CANCELLED_STATUS = 499
"""Status for metrics only: the client disconnected before its response was complete."""


_MAX_RETRY_AFTER_S = 3600

_HEADER_OF = {"gpu_work": "x-kvolt-gpu-work"}


class UnsupportedMediaType(errors.InvalidRequest):
    """The content type is not JSON. Fields: content_type."""

    code = "unsupported_media_type"


class InvalidApiKey(KvoltError):
    """The API key is missing, unknown or expired."""

    code = "invalid_api_key"
    fault = errors.Fault.CALLER


class InsufficientPermissions(KvoltError):
    """The API key does not allow the request. Fields: code, param."""

    code = "insufficient_permissions"
    fault = errors.Fault.CALLER


class RateLimited(errors.Overloaded):
    """A limit of the tenant is reached. Fields: limit, retry_after_s, and response headers by name."""

    code = "rate_limit_exceeded"


_STATUS_OF: dict[type[KvoltError], int] = {
    errors.InvalidRequest: 400,
    InvalidApiKey: 401,
    InsufficientPermissions: 403,
    errors.NotFound: 404,
    errors.PayloadTooLarge: 413,
    UnsupportedMediaType: 415,
    errors.Overloaded: 429,
    errors.Cancelled: CANCELLED_STATUS,
    errors.Unsupported: 501,
    errors.NetworkFault: 503,
    errors.EngineDied: 503,
    errors.ProtocolError: 500,
    errors.Unavailable: 503,
    errors.DeadlineExceeded: 504,
    KvoltError: 500,
}

_LABEL_OF = {
    400: "validation",
    401: "unauthorized",
    403: "forbidden",
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

_SAFE_MESSAGES = (errors.Overloaded, errors.Unavailable, errors.DeadlineExceeded)
"""Server-side errors whose messages are meant for clients: a queue, a model, a retry delay."""

_REPLACEMENTS: dict[type[KvoltError], tuple[str, str]] = {
    errors.NetworkFault: ("a worker could not be reached; try again", "worker_unreachable"),
    errors.ProtocolError: ("internal error", "internal"),
    errors.EngineDied: ("the engine died before the response was complete; try again", "engine_died"),
    errors.EngineFailed: ("the engine failed to process the request", "engine_failed"),
    errors.Cancelled: ("the request was cancelled before it was complete; try again", "cancelled"),
    errors.ConfigError: ("internal error", "internal"),
    errors.AccessDenied: ("internal error", "internal"),
    KvoltError: ("internal error", "internal"),
}
"""(message, code) that replace messages meant for operators."""


def status_of(error: BaseException) -> int:
    """HTTP status for metrics; 499 if the client disconnected or the process cancelled the request."""
    if isinstance(error, KvoltError):
        return next(_STATUS_OF[kind] for kind in type(error).__mro__ if kind in _STATUS_OF)
    return 500 if isinstance(error, Exception) else CANCELLED_STATUS  # CancelledError, GeneratorExit


def error_type_label(error: BaseException) -> str:
    """Value of the `error_type` label, from Dynamo's vocabulary."""
    return _LABEL_OF[status_of(error)]


def openai_error(error: BaseException) -> Response:
    """Response for an error; unexpected exceptions become an anonymous 500."""
    if not isinstance(error, KvoltError):
        error = KvoltError("internal error")
    status = status_of(error)
    if status == CANCELLED_STATUS:
        status = 503  # the client is still connected, so it did not cancel
    info = errors.to_info(error)
    message, code = _message_and_code(error, info)
    param = info.fields.get("param")
    details = _details(error, status)
    headers = _headers(error, status) | {_HEADER_OF[name]: value for name, value in details.items()}
    return json_error(status, message, code, str(param) if param is not None else None, headers, details)


def error_event(error: BaseException) -> bytes:
    """Error as the last event of a stream whose headers are already sent."""
    return b"data: " + openai_error(error).body + b"\n\n"


def _message_and_code(error: KvoltError, info: errors.ErrorInfo) -> tuple[str, str]:
    is_callers = error.fault is errors.Fault.CALLER and not isinstance(error, errors.AccessDenied)
    if not is_callers and not isinstance(error, _SAFE_MESSAGES):  # AccessDenied: this process was the caller
        return next(_REPLACEMENTS[kind] for kind in type(error).__mro__ if kind in _REPLACEMENTS)
    return info.message, _code(error, info)


def _code(error: KvoltError, info: errors.ErrorInfo) -> str:
    """OpenAI's error code if there is one; the error's `code` field overrides it."""
    own = info.fields.get("code")
    if isinstance(own, str) and own:
        return own
    if isinstance(error, errors.NotFound) and error.fields.get("kind") == "model":
        return "model_not_found"
    if isinstance(error, errors.DeadlineExceeded):
        return "timeout"
    return error.code


def _details(error: KvoltError, status: int) -> dict[str, str]:
    """`gpu_work`: whether a retry would repeat GPU work."""
    gpu_work = error.fields.get("gpu_work")
    return {"gpu_work": gpu_work} if isinstance(gpu_work, str) and (status == 429 or status >= 500) else {}


def _headers(error: KvoltError, status: int) -> dict[str, str]:
    if status in (429, 503):
        wait = {"retry-after": str(_wait_s(error.fields.get("retry_after_s")))}
        return wait | _ratelimit_headers(error) if isinstance(error, RateLimited) else wait
    if status == 401:
        return {"www-authenticate": "Bearer"}
    if status >= 500 and not error.retryable:
        return {"x-should-retry": "false"}  # otherwise OpenAI's SDKs retry every 5xx twice
    return {}


def _ratelimit_headers(error: RateLimited) -> dict[str, str]:
    return {name: str(value) for name, value in error.fields.items() if name.startswith("x-")}


def _wait_s(retry_after_s: errors.FieldValue) -> int:
    if isinstance(retry_after_s, int | float) and 1 <= retry_after_s < math.inf:
        return math.ceil(min(retry_after_s, _MAX_RETRY_AFTER_S))
    return 1
