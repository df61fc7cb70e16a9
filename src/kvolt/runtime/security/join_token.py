"""Join tokens: one line that a process without the cluster key exchanges once for a certificate. Pure.

    fingerprint   SHA-256 of the authority's certificate, by which the process knows the join server
    role          of the process, for which the join server issues the certificate
    expires_at    wall-clock time
    id            random; the join server refuses its second use
    mac           of the above, with a secret that only holders of the cluster key can compute

A rotation of the cluster key ends the tokens of the previous key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import AccessDenied, ConfigError
from kvolt.runtime.security.authority import ClusterAuthority
from kvolt.runtime.security.identity import ProcessRole

MAX_TTL_S = 7 * 24 * 3600.0
CLOCK_SKEW_S = 60.0
"""Tokens are accepted for this much longer, for join servers whose clock is ahead."""
_PREFIX = "kvolt-join-"
_VERSION = 1
_MAX_CHARS = 512


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """A parsed token. Nothing in it can be relied on before `check_token`."""

    version: int
    fingerprint: Annotated[bytes, Meta(min_length=32, max_length=32)]
    role: ProcessRole
    expires_at: int
    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    mac: bytes = b""

    @property
    def text(self) -> str:
        return _PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")


def create_token(authority: ClusterAuthority, role: ProcessRole, now: float, ttl_s: float) -> JoinToken:
    fingerprint = hashlib.sha256(authority.certificate_der).digest()
    token = JoinToken(_VERSION, fingerprint, role, int(now + ttl_s), secrets.token_bytes(16))
    return msgspec.structs.replace(token, mac=_mac(authority, token))


def parse_token(text: str) -> JoinToken:
    """Raises ConfigError, without the text, if it is not a join token."""
    encoded = text.strip().removeprefix(_PREFIX)
    try:
        if len(encoded) > _MAX_CHARS or not text.strip().startswith(_PREFIX):
            raise ValueError("no token")
        data = base64.b64decode(encoded + "=" * (-len(encoded) % 4), altchars=b"-_", validate=True)
        token = msgspec.msgpack.decode(data, type=JoinToken)
        if token.version != _VERSION:
            raise ValueError("another version")
    except (ValueError, msgspec.MsgspecError):
        raise ConfigError(
            "the join token is not one of this version, or is incomplete",
            key="cluster.join_token",
            remedy="create one with `kvolt cluster token`, and copy the whole line",
        ) from None
    return token


def check_token(authority: ClusterAuthority, token: JoinToken, now: float) -> None:
    """Raises AccessDenied unless a holder of the cluster key has created the token and it has not expired."""
    if not hmac.compare_digest(token.mac, _mac(authority, token)):
        raise AccessDenied("the join token is not of this cluster key, or was changed")
    if now > token.expires_at + CLOCK_SKEW_S:
        raise AccessDenied("the join token has expired")
    if token.expires_at > now + MAX_TTL_S + CLOCK_SKEW_S:
        raise AccessDenied("the join token is valid for too long: a clock is wrong")


def _mac(authority: ClusterAuthority, token: JoinToken) -> bytes:
    unsigned = msgspec.msgpack.encode(msgspec.structs.replace(token, mac=b""))
    return hmac.digest(authority.derive("join tokens"), unsigned, "sha256")
