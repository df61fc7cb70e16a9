"""Key stores: the conformance suite, and what only the file has."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvolt.core.errors import ConfigError
from kvolt.frontend.tenants import store as store_module
from kvolt.frontend.tenants.key_file import FileKeyStore
from kvolt.frontend.tenants.live_keys import LiveKeys
from kvolt.frontend.tenants.records import (
    KEY_PREFIX,
    MAX_KEY_CHARS,
    ApiKey,
    KeyRecords,
    KeyTable,
    Tenant,
    new_secret,
    secret_hash,
)
from kvolt.frontend.tenants.store import KeyStore, MemoryKeyStore, open_plugin_store
from kvolt.runtime.clock import ThreadBlocking
from kvolt.testing.key_store_suite import CASES


class MemoryHarness:
    def __init__(self) -> None:
        self._store = MemoryKeyStore()

    def open(self) -> KeyStore:
        return self._store


class FileHarness:
    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> KeyStore:
        return FileKeyStore(self._path)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_store_in_memory_conforms(case: Any) -> None:
    await case(MemoryHarness())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_file_conforms(case: Any, tmp_path: Path) -> None:
    await case(FileHarness(tmp_path / "keys.jsonl"))


def test_file_has_hashes_only_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    store, secret = FileKeyStore(path), new_secret()
    store.put_tenant(Tenant(name="acme"))
    store.put_key(ApiKey(id="k1", tenant="acme", sha256=secret_hash(secret), created=1))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert secret not in path.read_text()
    assert secret.startswith(KEY_PREFIX)
    assert len(secret) == len(KEY_PREFIX) + 43
    assert secret != new_secret()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"type":"tenant","name":"acme"', "line 1"),
        ('\n{"type":"tenant","name":"acme","limit":3}', "line 2"),
        ('{"type":"tenant","name":"a b"}', "name"),
        ('{"type":"tenant","name":"a","cache_salt":"a\\nb"}', "cache_salt"),
        ('{"type":"tenant","name":"a"}\n{"type":"tenant","name":"a"}', "occurs twice"),
        ('{"type":"key","id":"k","tenant":"a","sha256":"' + "0" * 64 + '","created":1}', "unknown tenant"),
        ("\xff\xfe", "line 1"),
    ],
)
def test_damaged_file_is_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=problem):
        FileKeyStore(path).read(None)
    with pytest.raises(ConfigError, match=problem):
        FileKeyStore(path).put_tenant(Tenant(name="b"))
    assert path.read_bytes() == text.encode("latin-1")


def test_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    path.write_text("")
    path.chmod(0o666)
    with pytest.raises(ConfigError, match="other users"):
        FileKeyStore(path).read(None)


def test_file_must_be_a_regular_one(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    os.mkfifo(path, 0o600)  # a read would wait for its writer for ever
    with pytest.raises(ConfigError, match="not a regular file"):
        FileKeyStore(path).read(None)


def test_concurrent_changes_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"

    def add(number: int) -> None:
        FileKeyStore(path).put_tenant(Tenant(name=f"t{number}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = FileKeyStore(path).read(None)
    assert records is not None
    assert len(records.tenants) == 16
    assert sorted(os.listdir(tmp_path)) == [".keys.jsonl.lock", "keys.jsonl"]


def test_a_link_to_the_file_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.jsonl", tmp_path / "keys.jsonl"
    FileKeyStore(target).put_tenant(Tenant(name="a"))
    link.symlink_to(target)
    FileKeyStore(link).put_tenant(Tenant(name="b"))
    assert link.is_symlink()
    assert "b" in target.read_text()


@pytest.mark.parametrize("secret", ["", "x", "ü" * 9, "\udcff", "k" * MAX_KEY_CHARS, "k" * 10_000_000])
def test_unknown_secrets_are_not_found(secret: str) -> None:
    assert KeyTable(KeyRecords("1")).find(secret) is None


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.02)


async def test_broken_new_file_keeps_the_old_keys_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, secret = tmp_path / "keys.jsonl", new_secret()
    store = FileKeyStore(path)
    store.put_tenant(Tenant(name="acme"))
    store.put_key(ApiKey(id="k1", tenant="acme", sha256=secret_hash(secret), created=1))
    blocking = ThreadBlocking()
    live = LiveKeys(store, blocking)
    await live.start()
    good = path.read_bytes()
    path.write_text("{broken")
    await eventually(lambda: "not read again" in caplog.text)
    await asyncio.sleep(1.2)
    assert caplog.text.count("not read again") == 1
    assert live.table.find(secret) is not None
    path.write_bytes(good.splitlines()[0])
    await eventually(lambda: live.table.find(secret) is None)
    await live.close()
    blocking.close()


def test_missing_file_is_an_error_that_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        FileKeyStore(tmp_path / "none").read(None)
    assert "kvolt key create" in str(caught.value.fields["remedy"])


def test_plugin_store_is_opened_with_its_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    class Point:
        name = "vault"

        def load(self) -> Callable[[str], KeyStore]:
            return lambda argument: opened.append(argument) or MemoryKeyStore()  # type: ignore[func-returns-value]

    def entry_points(group: str, name: str | None = None) -> list[Any]:
        assert group == "kvolt.key_stores"
        return [Point()] if name in (None, "vault") else []

    monkeypatch.setattr(store_module, "entry_points", entry_points)
    assert isinstance(open_plugin_store("vault:https://vault:8200/keys"), MemoryKeyStore)
    assert opened == ["https://vault:8200/keys"]
    with pytest.raises(ConfigError, match="known: vault"):
        open_plugin_store("other")


def test_plugin_that_cannot_be_imported_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("vault", "no_such_module:open", "kvolt.key_stores")
    monkeypatch.setattr(store_module, "entry_points", lambda group, name=None: [point])
    with pytest.raises(ConfigError, match="cannot be loaded"):
        open_plugin_store("vault")
