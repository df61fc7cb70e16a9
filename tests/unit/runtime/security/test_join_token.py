"""Join tokens: what they contain, and which are accepted."""

from __future__ import annotations

import msgspec
import pytest

from kvolt.core.errors import AccessDenied, ConfigError
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import ProcessRole
from kvolt.runtime.security.join_token import (
    CLOCK_SKEW_S,
    MAX_TTL_S,
    JoinToken,
    check_token,
    create_token,
    parse_token,
)

NOW = 1_780_000_000.0
AUTHORITY = ClusterAuthority.create(NOW)


def token(ttl_s: float = 600.0, role: ProcessRole = ProcessRole.WORKER) -> JoinToken:
    return create_token(AUTHORITY, role, NOW, ttl_s)


def test_a_token_survives_its_text() -> None:
    created = token()
    text = created.text
    assert text.startswith("kvolt-join-")
    assert text.isascii()
    assert len(text) < 200
    assert not set(text) & set(" \n=+/")
    assert parse_token(f" {text}\n") == created
    check_token(AUTHORITY, parse_token(text), NOW)


def test_two_tokens_differ() -> None:
    assert token().id != token().id


@pytest.mark.parametrize(
    "text",
    [
        "",
        "kvolt-join-",
        "kvolt-join-AAAA",
        "token",
        token().text[:-20],
        token().text[11:],
        "kvolt-join-" + "A" * 9999,
    ],
)
def test_other_texts_are_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match="is not one of this version") as caught:
        parse_token(text)
    assert len(text) < 12 or text not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"role": ProcessRole.FRONTEND},
        {"expires_at": int(NOW) + 10_000},
        {"id": bytes(16)},
        {"fingerprint": bytes(32)},
        {"mac": b""},
        {"mac": bytes(32)},
    ],
    ids="-".join,
)
def test_a_changed_token_is_refused(changes: dict[str, object]) -> None:
    changed = msgspec.structs.replace(token(), **changes)
    with pytest.raises(AccessDenied, match="was changed"):
        check_token(AUTHORITY, changed, NOW)


def test_a_token_of_another_cluster_or_of_the_previous_key_is_refused() -> None:
    for other in (ClusterAuthority.create(NOW), AUTHORITY.rotate(NOW)):
        with pytest.raises(AccessDenied, match="not of this cluster key"):
            check_token(other, token(), NOW)


def test_expiry_allows_for_clock_skew() -> None:
    created = token(ttl_s=600)
    check_token(AUTHORITY, created, NOW - 3600)
    check_token(AUTHORITY, created, NOW + 600 + CLOCK_SKEW_S - 1)
    with pytest.raises(AccessDenied, match="expired"):
        check_token(AUTHORITY, created, NOW + 600 + CLOCK_SKEW_S + 1)


def test_a_token_cannot_be_valid_for_longer_than_the_server_remembers() -> None:
    with pytest.raises(AccessDenied, match="a clock is wrong"):
        check_token(AUTHORITY, token(ttl_s=MAX_TTL_S + 3600), NOW)
