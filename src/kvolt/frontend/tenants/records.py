"""Records of a key store, and the table in which a frontend looks keys up.

A key is 256 random bits, so its SHA-256 cannot be inverted or guessed: a slow, salted hash would protect passwords,
which people choose, and would cost every request (docs/adr/0029). A lookup by hash does not compare secrets byte by
byte, so its time reveals nothing about valid keys.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvolt.core.errors import ConfigError
from kvolt.core.request import MAX_SHARE, MIN_SHARE

KEY_PREFIX = "kvolt-sk-"
"""Lets secret scanners recognize a key."""
MAX_KEY_CHARS = 256
"""Longer values are refused before they are hashed."""

Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
Rate = Annotated[float, Meta(gt=0, le=1e9)]
Count = Annotated[int, Meta(ge=1, le=10**12)]
Salt = Annotated[str, Meta(min_length=1, max_length=256, pattern=r"\A[\x21-\x7e]+\Z")]
ModelName = Annotated[str, Meta(min_length=1, max_length=1024)]


class Scope(StrEnum):
    """What a key allows."""

    INFERENCE = "inference"
    """Models, chat, completions, tokenization."""
    ADMIN = "admin"
    """Metrics and controls."""


_SCOPES = {
    "/tokenize": Scope.INFERENCE,
    "/detokenize": Scope.INFERENCE,
    "/metrics": Scope.ADMIN,
    "/busy_threshold": Scope.ADMIN,
}
"""Routes besides those below /v1 that need a key."""


def needed_scope(path: str) -> Scope | None:
    """Scope that a key needs for a route of the HTTP API; None: no key."""
    return Scope.INFERENCE if path.startswith("/v1/") else _SCOPES.get(path)


class Tenant(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="tenant"
):
    """A tenant with its limits. None and an empty list: unlimited."""

    name: Id
    requests_per_second: Rate | None = None
    input_tokens_per_minute: Count | None = None
    output_tokens_per_minute: Count | None = None
    concurrency: Count | None = None
    """Requests in progress at the same time."""
    models: tuple[ModelName, ...] = ()
    """Names of models, aliases and adapters."""
    max_priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    share: Annotated[float, Meta(ge=MIN_SHARE, le=MAX_SHARE)] = 1.0
    """Share of the router's queue, relative to other tenants."""
    cache_salt: Salt | None = None
    """KV namespace. None: the name, so that tenants share no cached prefixes."""

    @property
    def salt(self) -> str:
        return self.cache_salt or self.name

    @property
    def is_limited(self) -> bool:
        """Whether any limit needs a budget."""
        return not (
            self.requests_per_second
            is self.input_tokens_per_minute
            is self.output_tokens_per_minute
            is self.concurrency
            is None
        )

    @property
    def has_token_limit(self) -> bool:
        return not (self.input_tokens_per_minute is self.output_tokens_per_minute is None)


class ApiKey(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, tag="key"
):
    """A key without its secret. Times are seconds since 1970."""

    id: Id
    tenant: Id
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
    created: int
    expires: int | None = None
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,)


class KeyRecords(msgspec.Struct, frozen=True):
    """Content of a key store."""

    version: str
    """Changes with every change of the content."""
    tenants: tuple[Tenant, ...] = ()
    keys: tuple[ApiKey, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request."""

    key: ApiKey
    tenant: Tenant

    def allows(self, names: Iterable[str]) -> bool:
        """Whether the tenant may use a model with these names."""
        models = self.tenant.models
        return not models or any(name in models for name in names)


class KeyTable:
    """Callers by the hash of their key. Immutable; a changed store gives a new table."""

    def __init__(self, records: KeyRecords) -> None:
        """Raises ConfigError for duplicate records and keys without a tenant."""
        self.version = records.version
        self.tenants = _by_name(records.tenants)
        self._by_digest: dict[bytes, Caller] = {}
        ids: set[str] = set()
        for key in records.keys:
            tenant = self.tenants.get(key.tenant)
            digest = bytes.fromhex(key.sha256)
            if tenant is None:
                raise _invalid(f"key {key.id} is of an unknown tenant {key.tenant!r}")
            if key.id in ids or digest in self._by_digest:
                raise _invalid(f"key {key.id} occurs twice")
            ids.add(key.id)
            self._by_digest[digest] = Caller(key, tenant)

    def find(self, secret: str) -> Caller | None:
        """Caller with this key, expired or not."""
        if not 0 < len(secret) <= MAX_KEY_CHARS:
            return None
        return self._by_digest.get(_digest(secret).digest())


def new_secret() -> str:
    """Random key for a client."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()


def new_key_id() -> str:
    return secrets.token_hex(6)


def secret_hash(secret: str) -> str:
    return _digest(secret).hexdigest()


def _digest(secret: str) -> hashlib._Hash:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass"))


def _by_name(tenants: Iterable[Tenant]) -> Mapping[str, Tenant]:
    table: dict[str, Tenant] = {}
    for tenant in tenants:
        if tenant.name in table:
            raise _invalid(f"tenant {tenant.name} occurs twice")
        table[tenant.name] = tenant
    return table


def _invalid(problem: str) -> ConfigError:
    return ConfigError(f"API keys: {problem}", key="frontend.api_keys", remedy="correct the key store")
