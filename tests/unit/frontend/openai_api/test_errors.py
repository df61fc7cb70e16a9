from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core import errors as tree
from kvolt.core.errors import (
    AccessDenied,
    Cancelled,
    ConfigError,
    ConnectFailed,
    DeadlineExceeded,
    DiscoveryLost,
    EngineDied,
    EngineFailed,
    ErrorInfo,
    InvalidRequest,
    KeyConflict,
    KvoltError,
    NotFound,
    Overloaded,
    PayloadTooLarge,
    ProtocolError,
    TransferFailed,
    Unavailable,
    Unsupported,
    VersionMismatch,
    WorkerLost,
    from_info,
)
from kvolt.frontend.openai_api.errors import (
    InsufficientPermissions,
    InvalidApiKey,
    RateLimited,
    UnsupportedMediaType,
    error_event,
    error_type_label,
    openai_error,
    status_of,
)
from kvolt.frontend.openai_api.responses import ErrorBody


def body(error: BaseException) -> dict[str, Any]:
    response = openai_error(error)
    msgspec.json.decode(response.body, type=ErrorBody)
    return dict(msgspec.json.decode(response.body)["error"])


TABLE: list[tuple[BaseException, int, str, str, str]] = [
    (InvalidRequest("bad"), 400, "invalid_request_error", "invalid_request", "validation"),
    (NotFound("no", kind="model"), 404, "invalid_request_error", "model_not_found", "not_found"),
    (NotFound("no", kind="path"), 404, "invalid_request_error", "not_found", "not_found"),
    (PayloadTooLarge("big"), 413, "invalid_request_error", "payload_too_large", "validation"),
    (UnsupportedMediaType("what"), 415, "invalid_request_error", "unsupported_media_type", "validation"),
    (InvalidApiKey("unknown"), 401, "invalid_request_error", "invalid_api_key", "unauthorized"),
    (InsufficientPermissions("no"), 403, "invalid_request_error", "insufficient_permissions", "forbidden"),
    (RateLimited("slow"), 429, "rate_limit_error", "rate_limit_exceeded", "overload"),
    (AccessDenied("a worker refused this frontend"), 500, "server_error", "internal", "internal"),
    (Overloaded("full"), 429, "rate_limit_error", "overloaded", "overload"),
    (Unsupported("not yet"), 501, "server_error", "unsupported", "not_implemented"),
    (WorkerLost("10.0.0.7:9000 vanished"), 503, "server_error", "worker_unreachable", "unavailable"),
    (ConnectFailed("10.0.0.7:9000 refused"), 503, "server_error", "worker_unreachable", "unavailable"),
    (DiscoveryLost("/srv/secret"), 503, "server_error", "worker_unreachable", "unavailable"),
    (Unavailable("no worker of 'm'"), 503, "server_error", "unavailable", "unavailable"),
    (DeadlineExceeded("5 s are over"), 504, "server_error", "timeout", "response_timeout"),
    (EngineFailed("no token was possible"), 500, "server_error", "engine_failed", "internal"),
    (EngineDied("the engine died (KeyError)"), 503, "server_error", "engine_died", "unavailable"),
    (KeyConflict("of another lease"), 500, "server_error", "internal", "internal"),
    (TransferFailed("block 3"), 500, "server_error", "internal", "internal"),
    (ProtocolError("a second hello"), 500, "server_error", "internal", "internal"),
    (VersionMismatch("2 and 3"), 500, "server_error", "internal", "internal"),
    (ConfigError("--secret is wrong"), 500, "server_error", "internal", "internal"),
    (KvoltError("internal error (KeyError)"), 500, "server_error", "internal", "internal"),
    (ValueError("/srv/secret"), 500, "server_error", "internal", "internal"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code", "label"), TABLE)
def test_status_type_code_and_label(
    error: BaseException, status: int, kind: str, code: str, label: str
) -> None:
    assert openai_error(error).status == status == status_of(error)
    assert (body(error)["type"], body(error)["code"]) == (kind, code)
    assert error_type_label(error) == label


def test_the_table_has_every_type_of_the_tree() -> None:
    kinds = {kind for kind in vars(tree).values() if isinstance(kind, type) and issubclass(kind, KvoltError)}
    covered = {type(error) for error, *_ in TABLE}
    assert kinds - covered == {tree.NetworkFault, Cancelled}


@pytest.mark.parametrize("error", [Cancelled("gone"), asyncio.CancelledError(), GeneratorExit()])
def test_who_left_is_counted_as_499(error: BaseException) -> None:
    assert status_of(error) == 499
    assert error_type_label(error) == "cancelled"


def test_499_is_never_sent() -> None:
    response = openai_error(Cancelled("this process is stopping"))
    assert response.status == 503
    assert response.headers["retry-after"] == "1"


# what is told


def test_the_caller_learns_what_it_did_wrong() -> None:
    error = InvalidRequest("temperature is 3; it must be 0 to 2", param="temperature")
    assert body(error) == {
        "message": "temperature is 3; it must be 0 to 2",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": "invalid_request",
    }
    assert body(InvalidRequest("x"))["param"] is None


def test_a_validator_may_choose_the_code_that_clients_know() -> None:
    error = InvalidRequest(
        "5000 tokens, the context has 4096", param="messages", code="context_length_exceeded"
    )
    assert body(error)["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "error",
    [
        WorkerLost("10.0.0.7:9000 vanished", address="10.0.0.7:9000"),
        ConnectFailed("cannot connect to 10.0.0.7:9000"),
        DiscoveryLost("10.0.0.7:9000: /srv/secret"),
        EngineFailed("10.0.0.7:9000 secret"),
        ConfigError("secret", param="secret"[:0]),
        ProtocolError("secret"),
        KvoltError("secret"),
        RuntimeError("secret 10.0.0.7:9000"),
        from_info(ErrorInfo("from_a_newer_peer", "secret 10.0.0.7:9000", {"code": "secret"})),
    ],
)
def test_what_is_ours_to_know_stays_with_us(error: BaseException) -> None:
    for text in (openai_error(error).body, error_event(error)):
        assert b"secret" not in text
        assert b"10.0.0.7" not in text


@given(
    st.sampled_from([InvalidRequest, Overloaded, NotFound, EngineFailed]),
    st.text(st.characters(), max_size=50),
    st.text(st.characters(), max_size=50) | st.integers() | st.floats() | st.none() | st.booleans(),
)
def test_any_message_and_any_field_encode(kind: type[KvoltError], message: str, value: Any) -> None:
    error = kind(message, param=value, code=value, retry_after_s=value, kind=value)
    response = openai_error(error)
    msgspec.json.decode(response.body, type=ErrorBody)
    assert all(text.isascii() and text.isprintable() for text in response.headers.values())


def test_lone_surrogates_and_long_messages_encode() -> None:
    assert len(openai_error(InvalidRequest("\ud800" * 100_000, param="\udfff" * 100_000)).body) < 30_000


# headers


@pytest.mark.parametrize(
    ("error", "wait"),
    [
        (Overloaded("full"), "1"),
        (Overloaded("full", retry_after_s=2.2), "3"),
        (Overloaded("full", retry_after_s=0), "1"),
        (Overloaded("full", retry_after_s=-5), "1"),
        (Overloaded("full", retry_after_s=float("nan")), "1"),
        (Overloaded("full", retry_after_s=float("inf")), "1"),
        (Overloaded("full", retry_after_s=1e300), "3600"),
        (Overloaded("full", retry_after_s="soon"), "1"),
        (Unavailable("none"), "1"),
        (WorkerLost("gone"), "1"),
    ],
)
def test_when_to_come_back(error: KvoltError, wait: str) -> None:
    assert openai_error(error).headers == {"retry-after": wait}


@pytest.mark.parametrize(
    "error", [Unsupported("x"), EngineFailed("x"), DeadlineExceeded("x"), ValueError("x")]
)
def test_the_retry_header_stops_useless_retries(error: BaseException) -> None:
    assert openai_error(error).headers == {"x-should-retry": "false"}


def test_a_clients_mistake_needs_no_header() -> None:
    assert openai_error(InvalidRequest("x")).headers == {}


def test_the_event_of_a_stream_says_the_same() -> None:
    error = DeadlineExceeded("30 s are over", stage="total")
    event = error_event(error)
    assert event == b"data: " + openai_error(error).body + b"\n\n"
    assert event.count(b"\n") == 2
    assert error_event(InvalidRequest("two\n\nlines")).count(b"\n") == 2


@pytest.mark.parametrize("spent", ["none", "unknown", "some"])
def test_gpu_work_is_reported_in_body_header_and_event(spent: str) -> None:
    for error in (Overloaded("full", gpu_work=spent), WorkerLost("10.0.0.7:9000 vanished", gpu_work=spent)):
        assert body(error)["gpu_work"] == spent
        assert openai_error(error).headers["x-kvolt-gpu-work"] == spent
        assert msgspec.json.decode(error_event(error)[6:])["error"]["gpu_work"] == spent
    for error in (InvalidRequest("bad", gpu_work=spent), Overloaded("full"), Overloaded("full", gpu_work=7)):
        assert "gpu_work" not in body(error)
        assert "x-kvolt-gpu-work" not in openai_error(error).headers
