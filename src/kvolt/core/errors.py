"""Error hierarchy.

The type determines the fault and whether a retry can help; details are fields. An error crosses processes as
`ErrorInfo` and is restored as the same type. The frontend maps types to HTTP status codes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions from decoding a peer's bytes; msgspec passes on bad UTF-8 and too deep nesting as they are."""

FieldValue = str | int | float | bool | None


class Fault(StrEnum):
    """Party that has to act for the call to succeed."""

    CALLER = "caller"
    OPERATOR = "operator"
    SERVER = "server"
    NETWORK = "network"
    NONE = "none"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Serialized error."""

    code: str
    message: str
    fields: dict[str, FieldValue] = {}


class KvoltError(Exception):
    """Base of all kvolt errors."""

    code: ClassVar[str] = "internal"
    fault: ClassVar[Fault] = Fault.SERVER
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, /, **fields: FieldValue) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __repr__(self) -> str:
        details = "".join(f", {name}={value!r}" for name, value in self.fields.items())
        return f"{type(self).__name__}({self.message!r}{details})"


class InvalidRequest(KvoltError):
    """The request is invalid. Fields: param."""

    code = "invalid_request"
    fault = Fault.CALLER


class PayloadTooLarge(InvalidRequest):
    """A body, message or frame exceeds its limit. Fields: limit_bytes, size_bytes."""

    code = "payload_too_large"


class NotFound(KvoltError):
    """Unknown name. Fields: kind, name."""

    code = "not_found"
    fault = Fault.CALLER


class Unsupported(KvoltError):
    """The request is valid, but this engine or version does not support it. Fields: feature."""

    code = "unsupported"
    fault = Fault.CALLER


class Cancelled(KvoltError):
    """The caller cancelled the call."""

    code = "cancelled"
    fault = Fault.NONE


class ConfigError(KvoltError):
    """Invalid setting, address or port at start. Fields: key, remedy. The process exits with status 2."""

    code = "config"
    fault = Fault.OPERATOR


class AccessDenied(KvoltError):
    """The caller is known but may not do this. Fields: role."""

    code = "access_denied"
    fault = Fault.CALLER


class Overloaded(KvoltError):
    """A bounded queue is full. Fields: queue, limit, retry_after_s, gpu_work (none, unknown, some)."""

    code = "overloaded"
    retryable = True


class Unavailable(KvoltError):
    """No instance can serve the call now (none registered, cordoned, draining). Fields: endpoint, reason."""

    code = "unavailable"
    retryable = True


class DeadlineExceeded(KvoltError):
    """A deadline expired. Fields: stage (route, connect, first, between, total), after_s."""

    code = "deadline_exceeded"


class EngineFailed(KvoltError):
    """The engine failed a request. Fields: engine."""

    code = "engine_failed"


class EngineDied(EngineFailed):
    """The engine died while it ran the request; another worker can continue it. Fields: engine."""

    code = "engine_died"
    retryable = True


class TransferFailed(KvoltError):
    """A transfer failed or its data is corrupt; the received bytes are discarded. Fields: path, reason (checksum)."""

    code = "transfer_failed"
    retryable = True


class NetworkFault(KvoltError):
    """Base of errors of an unreachable or unresponsive peer."""

    code = "network"
    fault = Fault.NETWORK
    retryable = True


class ConnectFailed(NetworkFault):
    """The connection could not be opened; nothing was sent. Fields: address."""

    code = "connect_failed"


class WorkerLost(NetworkFault):
    """The peer was lost with the call in flight. Fields: address, reason."""

    code = "worker_lost"


class DiscoveryLost(NetworkFault):
    """Discovery is unreachable; the last known state stays in use. Fields: address."""

    code = "discovery_lost"


class KeyConflict(KvoltError):
    """Another live lease owns the discovery key, until it ends. Fields: key."""

    code = "key_conflict"
    fault = Fault.OPERATOR
    retryable = True


class ProtocolError(NetworkFault):
    """The peer violated the protocol; the connection is closed. Fields: rule."""

    code = "protocol"
    retryable = False


class VersionMismatch(ProtocolError):
    """The peers share no protocol version. Fields: ours, theirs."""

    code = "version_mismatch"


def _tree(root: type[KvoltError]) -> list[type[KvoltError]]:
    return [root, *(kind for child in root.__subclasses__() for kind in _tree(child))]


_BY_CODE: dict[str, type[KvoltError]] = {kind.code: kind for kind in _tree(KvoltError)}


_MAX_MESSAGE_CHARS = 4096
_MAX_FIELD_CHARS = 1024
_MAX_INT = 2**63 - 1


def to_info(error: BaseException) -> ErrorInfo:
    """Serialize an error for a peer. Of an exception that is not a KvoltError only the type name is disclosed.

    The result always encodes and decodes, and its size is bounded.
    """
    if isinstance(error, KvoltError):
        fields = {name: _portable(value) for name, value in error.fields.items()}
        return ErrorInfo(error.code, _text(error.message, _MAX_MESSAGE_CHARS), fields)
    return ErrorInfo(KvoltError.code, f"internal error ({type(error).__name__})")


def _portable(value: object) -> FieldValue:
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int) and -_MAX_INT <= value <= _MAX_INT:
        return value
    return _text(value, _MAX_FIELD_CHARS)


def _text(value: object, max_chars: int) -> str:
    """Truncate to `max_chars`, and replace lone surrogates (from file names), which UTF-8 cannot encode."""
    text = str(value)
    if len(text) > max_chars:
        text = f"{text[: max_chars - 1]}…"
    return text.encode("utf-8", "replace").decode()


def with_fields(error: KvoltError, **fields: FieldValue) -> KvoltError:
    """Copy the error (several requests may share it) with additional fields; existing fields win."""
    copy = type(error)(error.message, **{**fields, **error.fields})
    copy.__cause__ = error.__cause__
    return copy


def with_message(error: KvoltError, message: str) -> KvoltError:
    """Copy the error with another message."""
    copy = type(error)(message, **error.fields)
    copy.__cause__ = error.__cause__
    return copy


def from_info(info: ErrorInfo) -> KvoltError:
    """Restore an error from its serialized form; an unknown code (of a newer peer) becomes a KvoltError."""
    kind = _BY_CODE.get(info.code)
    if kind is None:
        return KvoltError(info.message, **{"code": info.code, **info.fields})
    return kind(info.message, **info.fields)
