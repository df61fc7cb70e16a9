"""FileKeyStore: keys and tenants in a file, one JSON object per line.

The file has hashes only, but decides who is let in: it is written with mode 0600, replaced atomically, and refused if
other users can change it. Writers of one file exclude each other by a lock file beside it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.frontend.tenants.records import ApiKey, KeyRecords, KeyTable, Tenant
from kvolt.frontend.tenants.store import MemoryKeyStore
from kvolt.runtime.host.safe_files import locked, open_regular, read_bounded, replace_file

_MAX_FILE_BYTES = 64 << 20

_encode = msgspec.json.Encoder().encode
_decode_record = msgspec.json.Decoder(Tenant | ApiKey).decode


class FileKeyStore:
    """Store in a file. `read` raises ConfigError if the file is missing; changes create it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, version: str | None) -> KeyRecords | None:
        try:
            with open_regular(self._path) as file:
                status = os.fstat(file.fileno())
                current = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"
                if current == version:
                    return None
                self._check(status)
                data = read_bounded(file, _MAX_FILE_BYTES)
        except OSError as error:
            raise self._error((error.strerror or str(error)).lower()) from error
        return self._parse(data, current)

    def put_tenant(self, tenant: Tenant) -> None:
        self._change(lambda records: records.put_tenant(tenant))

    def put_key(self, key: ApiKey) -> None:
        self._change(lambda records: records.put_key(key))

    def remove_key(self, key_id: str) -> None:
        self._change(lambda records: records.remove_key(key_id))

    def close(self) -> None:
        pass

    # ---

    def _check(self, status: os.stat_result) -> None:
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise self._error("other users can change it", f"chmod 600 {self._path}")

    def _parse(self, data: bytes, version: str) -> KeyRecords:
        tenants: list[Tenant] = []
        keys: list[ApiKey] = []
        for number, line in enumerate(data.splitlines(), 1):
            if not line.strip():
                continue
            try:
                record = _decode_record(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._error(f"line {number}: {error}") from error
            if isinstance(record, Tenant):
                tenants.append(record)
            else:
                keys.append(record)
        records = KeyRecords(version, tuple(tenants), tuple(keys))
        KeyTable(records)  # raises ConfigError for records that contradict each other
        return records

    def _change(self, change: Callable[[MemoryKeyStore], None]) -> None:
        path = self._path.resolve()  # replace the file itself, not a link to it
        try:
            with locked(path):
                records = MemoryKeyStore()
                content = self.read(None) if path.exists() else None
                for tenant in content.tenants if content is not None else ():
                    records.put_tenant(tenant)
                for key in content.keys if content is not None else ():
                    records.put_key(key)
                change(records)
                replace_file(path, _lines(records))
        except OSError as error:
            raise self._error((error.strerror or str(error)).lower()) from error

    def _error(self, problem: str, remedy: str = "") -> ConfigError:
        return ConfigError(
            f"API keys in {self._path}: {problem}",
            key="frontend.api_keys",
            remedy=remedy or "`kvolt key create` writes such a file",
        )


def _lines(store: MemoryKeyStore) -> bytes:
    records = store.read(None)
    assert records is not None
    return b"".join(_encode(record) + b"\n" for record in (*records.tenants, *records.keys))
