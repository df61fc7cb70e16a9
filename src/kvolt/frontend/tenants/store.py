"""KeyStore: port of the store of API keys and tenants, its in-memory implementation, and the stores of plugins.

Frontends only read a store; `kvolt key` changes it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Protocol

from kvolt.core.errors import ConfigError, NotFound
from kvolt.frontend.tenants.records import ApiKey, KeyRecords, Tenant

GROUP = "kvolt.key_stores"
"""Entry points of functions that open a store: `(argument: str) -> KeyStore`."""


class KeyStore(Protocol):
    """Store of keys and tenants. Calls may block: frontends make them in a thread, one at a time.

    Every change is atomic and durable when the call returns.
    """

    def read(self, version: str | None) -> KeyRecords | None:
        """All records, or None if `version` is still current. Raises KvoltError if they cannot be read; frontends
        then keep the records that they have."""
        ...

    def put_tenant(self, tenant: Tenant) -> None:
        """Add a tenant, or replace the one with its name."""
        ...

    def put_key(self, key: ApiKey) -> None:
        """Add a key, or replace the one with its id. Raises NotFound if its tenant does not exist."""
        ...

    def remove_key(self, key_id: str) -> None:
        """Remove a key. Raises NotFound if there is none with this id."""
        ...

    def close(self) -> None: ...


class MemoryKeyStore:
    """Store in memory, for tests and for embedding."""

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, ApiKey] = {}
        self._version = 0

    def read(self, version: str | None) -> KeyRecords | None:
        if version == str(self._version):
            return None
        return KeyRecords(str(self._version), tuple(self._tenants.values()), tuple(self._keys.values()))

    def put_tenant(self, tenant: Tenant) -> None:
        self._tenants[tenant.name] = tenant
        self._version += 1

    def put_key(self, key: ApiKey) -> None:
        if key.tenant not in self._tenants:
            raise unknown_tenant(key.tenant)
        self._keys[key.id] = key
        self._version += 1

    def remove_key(self, key_id: str) -> None:
        if self._keys.pop(key_id, None) is None:
            raise unknown_key(key_id)
        self._version += 1

    def close(self) -> None:
        pass


def unknown_tenant(name: str) -> NotFound:
    return NotFound(f"no tenant {name!r}; create it first", kind="tenant", name=name)


def unknown_key(key_id: str) -> NotFound:
    return NotFound(f"no key {key_id!r}; see `kvolt key list`", kind="key", name=key_id)


def open_plugin_store(text: str) -> KeyStore:
    """Open the store of a plugin, named NAME or NAME:ARGUMENT. Raises ConfigError for an unknown name."""
    name, _, argument = text.partition(":")
    for point in entry_points(group=GROUP, name=name):
        try:
            open_store: Callable[[str], KeyStore] = point.load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(
                f"key store {name!r} cannot be loaded: {error}",
                key="frontend.key_store",
                remedy="install its dependencies",
            ) from error
        return open_store(argument)
    known = ", ".join(sorted(point.name for point in entry_points(group=GROUP))) or "none is installed"
    raise ConfigError(
        f"unknown key store {name!r}; known: {known}",
        key="frontend.key_store",
        remedy="install its package, or set frontend.api_keys to a file",
    )
