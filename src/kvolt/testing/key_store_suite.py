"""Conformance suite of the KeyStore port, for the store of a plugin too.

A case is an async function of a `Harness`; it raises AssertionError when the store violates the port. With pytest:

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
    async def test_conformance(case):
        await case(MyHarness())
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvolt.core.errors import NotFound
from kvolt.frontend.tenants.records import (
    ApiKey,
    KeyRecords,
    KeyTable,
    Scope,
    Tenant,
    new_secret,
    secret_hash,
)
from kvolt.frontend.tenants.store import KeyStore
from kvolt.testing.cases import cases_in, expect


class Harness(Protocol):
    """One store, empty at first."""

    def open(self) -> KeyStore:
        """Open the store once more, as another process would."""
        ...


def _key(key_id: str, tenant: str = "acme", secret: str | None = None) -> ApiKey:
    return ApiKey(id=key_id, tenant=tenant, sha256=secret_hash(secret or new_secret()), created=1)


def _read(store: KeyStore) -> KeyRecords:
    records = store.read(None)
    if records is None:
        raise AssertionError("read(None) returned no records")
    return records


async def records_are_read_back(harness: Harness) -> None:
    store = harness.open()
    tenant = Tenant(
        name="acme",
        requests_per_second=0.5,
        input_tokens_per_minute=10,
        output_tokens_per_minute=20,
        concurrency=3,
        models=("a/b", "ü"),
        max_priority=-1,
        cache_salt="shared",
    )
    key = ApiKey(
        id="k1",
        tenant="acme",
        sha256=secret_hash("s"),
        created=5,
        expires=9,
        scopes=(Scope.INFERENCE, Scope.ADMIN),
    )
    store.put_tenant(tenant)
    store.put_key(key)
    records = _read(store)
    expect(records.tenants == (tenant,), f"tenants {records.tenants}")
    expect(records.keys == (key,), f"keys {records.keys}")
    store.close()


async def changes_reach_other_processes(harness: Harness) -> None:
    writer = harness.open()
    writer.put_tenant(Tenant(name="acme"))
    reader = harness.open()
    before = _read(reader).version
    writer.put_key(_key("k1", secret="secret"))
    records = reader.read(before)
    expect(records is not None and records.version != before, "a change gives another version")
    assert records is not None
    caller = KeyTable(records).find("secret")
    expect(caller is not None and caller.tenant.name == "acme", "the new key is found")
    writer.close()
    reader.close()


async def an_unchanged_store_is_not_read_again(harness: Harness) -> None:
    store = harness.open()
    store.put_tenant(Tenant(name="acme"))
    version = _read(store).version
    expect(store.read(version) is None, "read of the current version returns None")
    expect(store.read("another") is not None, "read of an unknown version returns the records")
    store.close()


async def records_with_the_same_name_are_replaced(harness: Harness) -> None:
    store = harness.open()
    store.put_tenant(Tenant(name="acme", concurrency=1))
    store.put_tenant(Tenant(name="other"))
    store.put_tenant(Tenant(name="acme", concurrency=2))
    store.put_key(_key("k1"))
    replacement = _key("k1", "other")
    store.put_key(replacement)
    records = _read(store)
    concurrency = {tenant.name: tenant.concurrency for tenant in records.tenants}
    expect(concurrency == {"acme": 2, "other": None}, f"tenants {concurrency}")
    expect(records.keys == (replacement,), f"keys {records.keys}")
    store.close()


async def a_removed_key_is_gone(harness: Harness) -> None:
    store = harness.open()
    store.put_tenant(Tenant(name="acme"))
    store.put_key(_key("k1"))
    store.put_key(_key("k2"))
    store.remove_key("k1")
    expect([key.id for key in _read(store).keys] == ["k2"], "only the other key is left")
    store.close()


async def unknown_names_are_refused(harness: Harness) -> None:
    store = harness.open()
    store.put_tenant(Tenant(name="acme"))
    changes: tuple[Callable[[], None], ...] = (
        lambda: store.remove_key("k1"),
        lambda: store.put_key(_key("k1", "nameless")),
    )
    for change in changes:
        try:
            change()
        except NotFound:
            continue
        raise AssertionError("a change of an unknown record must raise NotFound")
    expect(_read(store).keys == (), "a refused change leaves the store as it was")
    store.close()


CASES = cases_in(__name__)
