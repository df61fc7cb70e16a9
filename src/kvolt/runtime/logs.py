"""Structured logs over the standard `logging`, with the request and trace ids of the current task.

Two formats: lines for people and JSON lines for machines. Modules log `"event: key=%s", value` with
`logging.getLogger(__name__)`; in JSON such pairs are keys of their own, with the type of the value. Only the entry
point of a process calls `setup_logs`. HTTP and the request plane bind the ids that they receive and forward
`current_context()`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import lru_cache
from math import isfinite
from types import TracebackType
from typing import IO, Any, Literal, Self

import msgspec

from kvolt.runtime.clock import Clock

LogFormat = Literal["auto", "human", "json"]

_STANDARD_FIELDS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_BARE = re.compile(r"[\w.:/@+-]+")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_COLOURS = {"DEBUG": "\x1b[2m", "WARNING": "\x1b[33m", "ERROR": "\x1b[31m", "CRITICAL": "\x1b[1;31m"}
_PLAIN = "\x1b[0m"
_CONVERSION = re.compile(
    r"(?:(?<!\S)([A-Za-z_]\w*)=)?%[#0\- +]*(?:\*|\d*)(?:\.(?:\*|\d*))?([A-Za-z%])([A-Za-z]*(?:[,;:)]*(?=\s|$)))?"
)
"""A %-conversion: the key before it, its type, and a match of the rest if the value ends there, perhaps with a unit."""
_MAX_FIELD_CHARS = 1024
_MAX_FORMAT_CHARS = 1024


class Trace(msgspec.Struct, frozen=True):
    """W3C trace context: trace id and the caller's span id."""

    trace_id: str
    span_id: str
    flags: str = "01"


def parse_traceparent(text: str) -> Trace | None:
    """Parse a traceparent header; None if the W3C recommendation calls it invalid, which starts a new trace."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return Trace(trace_id, span_id, flags)


def format_traceparent(trace: Trace) -> str:
    return f"00-{trace.trace_id}-{trace.span_id}-{trace.flags}"


_request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
_trace: ContextVar[Trace | None] = ContextVar("trace", default=None)


class Binding:
    """Result of `bind`; as a `with` block it restores the previous ids on exit."""

    __slots__ = ("_request_id", "_trace")

    def __init__(self, previous_request_id: str | None, previous_trace: Trace | None) -> None:
        self._request_id = previous_request_id
        self._trace = previous_trace

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Set instead of reset by token: an async generator may be closed in another context than it started in.
        _request_id.set(self._request_id)
        _trace.set(self._trace)


def bind(*, request_id: str | None = None, traceparent: str | None = None) -> Binding:
    """Attach ids to all log records of the current task, or only within a `with` block.

    Both may come from a client: an id that is not 1 to 128 visible ASCII characters or an invalid traceparent is
    ignored.
    """
    binding = Binding(_request_id.get(), _trace.get())
    if request_id is not None and _REQUEST_ID.fullmatch(request_id):
        _request_id.set(request_id)
    parsed = parse_traceparent(traceparent) if traceparent is not None else None
    if parsed is not None:
        _trace.set(parsed)
    return binding


def unbind() -> Binding:
    """Detach the ids, for work that outlives the request that starts it."""
    binding = Binding(_request_id.get(), _trace.get())
    _request_id.set(None)
    _trace.set(None)
    return binding


def current_context() -> dict[str, str]:
    """The bound ids as sent by the request plane; empty if none are bound."""
    context: dict[str, str] = {}
    bound_id, bound_trace = _request_id.get(), _trace.get()
    if bound_id is not None:
        context["request_id"] = bound_id
    if bound_trace is not None:
        context["traceparent"] = format_traceparent(bound_trace)
    return context


def bind_context(context: Mapping[str, str]) -> Binding:
    """Bind the ids of a received `current_context`; unknown keys (of newer peers) are ignored."""
    return bind(request_id=context.get("request_id"), traceparent=context.get("traceparent"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line; an exception is one escaped string."""

    def __init__(self, process_name: str, clock: Clock) -> None:
        super().__init__()
        self._process_name = process_name
        self._clock = clock

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _rfc3339(self._clock.wall()),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process_name,
            "message": record.getMessage(),
        }
        fields = _message_fields(record)
        line |= _context_fields(fields)
        exception = _exception_text(self, record)
        if exception:
            line["exception"] = exception
        fields |= _extra(record)
        extra = {f"{name}_" if name in line else name: value for name, value in fields.items()}
        try:
            return json.dumps(line | extra, default=_plain_value, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            # Logging must not fail because of its values: a cycle, a NaN, a key that is not a string.
            return json.dumps(line | {name: repr(value) for name, value in extra.items()})


class HumanFormatter(logging.Formatter):
    """`12:00:00.000 INFO  worker  message key=value`, followed by the indented traceback."""

    def __init__(self, process_name: str, clock: Clock, colours: bool) -> None:
        super().__init__()
        self._process_name = process_name
        self._clock = clock
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(self._clock.wall(), UTC).strftime("%H:%M:%S.%f")[:-3]
        level = f"{record.levelname:<7}"
        if self._colours and record.levelname in _COLOURS:
            level = f"{_COLOURS[record.levelname]}{level}{_PLAIN}"
        parts = [time, level, _escape(self._process_name), _escape(record.getMessage())]
        fields = _context_fields(_message_fields(record)) | _extra(record)
        parts += [f"{_escape(name)}={_quoted(value)}" for name, value in fields.items()]
        text = " ".join(parts)
        exception = _exception_text(self, record)
        # Indented and escaped line by line, so that no part of it can be mistaken for a record.
        return "\n    ".join([text, *(_escape(line) for line in exception.split("\n") if line)])


class _KvoltHandler(logging.StreamHandler[IO[str]]):
    """Separate class, so that a second `setup_logs` replaces it and keeps handlers of other libraries."""


def setup_logs(
    level: str, format: LogFormat, process_name: str, stream: IO[str], clock: Clock
) -> logging.Handler:
    """Send all logs of the process to `stream`. `auto`: human on a terminal, JSON otherwise."""
    terminal = stream.isatty()
    handler = _KvoltHandler(stream)
    if format == "human" or (format == "auto" and terminal):
        handler.setFormatter(HumanFormatter(process_name, clock, colours=terminal))
    else:
        handler.setFormatter(JsonFormatter(process_name, clock))
    root = logging.getLogger()
    for existing in [existing for existing in root.handlers if isinstance(existing, _KvoltHandler)]:
        root.removeHandler(existing)
    root.addHandler(handler)
    root.setLevel(level.upper())
    return handler


def _context_fields(message_fields: Mapping[str, object]) -> dict[str, str]:
    """The bound ids. The message's own request id goes before: of one prompt of a batch it has a number."""
    fields: dict[str, str] = {}
    bound_id, bound_trace = _request_id.get(), _trace.get()
    if bound_id is not None and "request_id" not in message_fields:
        fields["request_id"] = bound_id
    if bound_trace is not None:
        fields["trace_id"] = bound_trace.trace_id
        fields["span_id"] = bound_trace.span_id
    return fields


def _message_fields(record: logging.LogRecord) -> dict[str, Any]:
    """Arguments of the `key=%s` pairs in the record's format string. JSON scalars keep their type."""
    args, template = record.args, record.msg
    if not args or not isinstance(args, tuple):
        return {}
    if not isinstance(template, str) or len(template) > _MAX_FORMAT_CHARS:
        return {}
    pairs = _format_keys(template)
    if len(pairs) != len(args):  # a width among the arguments
        return {}
    fields: dict[str, Any] = {}
    for (key, conversion), value in zip(pairs, args, strict=True):
        if key is not None and key not in fields:
            with contextlib.suppress(Exception):  # a `__str__` may fail
                field = value if _is_json_scalar(value) else conversion % (value,)
                fields[key] = field[:_MAX_FIELD_CHARS] if isinstance(field, str) else field
    return fields


def _is_json_scalar(value: object) -> bool:
    return value is None or isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))


@lru_cache(maxsize=1024)
def _format_keys(template: str) -> tuple[tuple[str | None, str], ...]:
    """Key, or None, and conversion of each argument of a format string."""
    return tuple(
        (None if ends is None else key, "%r" if kind in "ra" else "%s")
        for key, kind, ends in (match.groups() for match in _CONVERSION.finditer(template))
        if kind != "%"
    )


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in record.__dict__.items() if name not in _STANDARD_FIELDS}


def _exception_text(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    if record.exc_info and record.exc_info[0] is not None:
        return formatter.formatException(record.exc_info)
    return record.exc_text or ""


def _plain_value(value: object) -> object:
    return msgspec.to_builtins(value, enc_hook=repr)


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def _escape(text: str) -> str:
    return _UNSAFE.sub(
        lambda match: match.group().encode("unicode_escape", "surrogatepass").decode("ascii"), text
    )


def _quoted(value: object) -> str:
    text = str(value)
    return text if _BARE.fullmatch(text) else _escape(json.dumps(text, ensure_ascii=False))


def is_logged(count: int) -> bool:
    """Whether a repeated refusal is logged: the 1st, 2nd, 4th ... one. An attack must not fill the log."""
    return count & (count - 1) == 0
