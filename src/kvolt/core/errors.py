"""The one error tree.

A type says whose fault it is and whether trying again can help; details are fields, not prose to be
parsed. Errors cross processes as `ErrorInfo` and come back as the same type. HTTP status codes are
not known here: the edge maps them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import ClassVar

import msgspec

FieldValue = str | int | float | bool | None


class Fault(StrEnum):
    """Who has to change something for the call to succeed."""

    CALLER = "caller"
    OPERATOR = "operator"
    SERVER = "server"
    NETWORK = "network"
    NOBODY = "nobody"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error as it crosses a process boundary."""

    code: str
    message: str
    fields: dict[str, FieldValue] = {}


class KvoltError(Exception):
    """Base of all errors that kvolt raises on purpose."""

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
    """The request itself is wrong. Fields: param."""

    code = "invalid_request"
    fault = Fault.CALLER


class PayloadTooLarge(InvalidRequest):
    """A body, message or frame is over its limit. Fields: limit_bytes, size_bytes."""

    code = "payload_too_large"


class NotFound(KvoltError):
    """Nothing of that name is known. Fields: kind, name."""

    code = "not_found"
    fault = Fault.CALLER


class Unsupported(KvoltError):
    """Valid, but this engine or version has no mechanism for it. Fields: feature."""

    code = "unsupported"
    fault = Fault.CALLER


class Cancelled(KvoltError):
    """The caller gave up."""

    code = "cancelled"
    fault = Fault.NOBODY


class ConfigError(KvoltError):
    """A setting, address or port is wrong at start. Fields: key, remedy. The process exits with 2."""

    code = "config"
    fault = Fault.OPERATOR


class Overloaded(KvoltError):
    """A bounded queue is full. Fields: queue, limit, retry_after_s, gpu_work (none, unknown, some)."""

    code = "overloaded"
    retryable = True


class Unavailable(KvoltError):
    """No instance can take the call now (none registered, cordoned, draining). Fields: endpoint, reason."""

    code = "unavailable"
    retryable = True


class DeadlineExceeded(KvoltError):
    """A wait ended at its deadline. Fields: stage (route, connect, first, between, total), after_s."""

    code = "deadline_exceeded"
    fault = Fault.SERVER
    retryable = False


class EngineFailed(KvoltError):
    """The engine gave up on a request. Fields: engine."""

    code = "engine_failed"


class EngineDied(EngineFailed):
    """The engine ended with the request in it, as a lost worker does: another one may take it. Fields: engine."""

    code = "engine_died"
    retryable = True


class TransferFailed(KvoltError):
    """Bytes did not arrive as they left: as good as never sent. Fields: path, reason (checksum)."""

    code = "transfer_failed"
    retryable = True


class NetworkFault(KvoltError):
    """Base: the other process could not be reached, or stopped answering."""

    code = "network"
    fault = Fault.NETWORK
    retryable = True


class ConnectFailed(NetworkFault):
    """No connection could be opened; nothing was sent. Fields: address."""

    code = "connect_failed"


class WorkerLost(NetworkFault):
    """The peer vanished with the call in flight. Fields: address, reason."""

    code = "worker_lost"


class DiscoveryLost(NetworkFault):
    """Discovery did not answer; the last known state stays in use. Fields: address."""

    code = "discovery_lost"


class KeyConflict(KvoltError):
    """Another live lease owns the discovery key; it is free once that lease ends. Fields: key."""

    code = "key_conflict"
    fault = Fault.OPERATOR
    retryable = True


class ProtocolError(NetworkFault):
    """The peer sent bytes that break the protocol; the connection is closed. Fields: rule."""

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
    """What may be told to a peer: our own errors whole, anything else only by type name.

    Whatever was put into it, the result encodes, is short and decodes at the other end.
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
    """Cut to length, and without the surrogates that a file name may bring and UTF-8 cannot hold."""
    text = str(value)
    if len(text) > max_chars:
        text = f"{text[: max_chars - 1]}…"
    return text.encode("utf-8", "replace").decode()


def with_fields(error: KvoltError, **fields: FieldValue) -> KvoltError:
    """The same error with more said of it, where it does not say so itself; one error may be several requests' end."""
    told = type(error)(error.message, **{**fields, **error.fields})
    told.__cause__ = error.__cause__
    return told


def reworded(error: KvoltError, message: str) -> KvoltError:
    """The same error in other words."""
    told = type(error)(message, **error.fields)
    told.__cause__ = error.__cause__
    return told


def from_info(info: ErrorInfo) -> KvoltError:
    """The same error on this side; an unknown code (a newer peer) becomes the base type."""
    kind = _BY_CODE.get(info.code)
    if kind is None:
        return KvoltError(info.message, **{"code": info.code, **info.fields})
    return kind(info.message, **info.fields)
