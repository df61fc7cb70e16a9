"""Blocking file operations of `file` discovery.

    <directory>/
        leases/
            5d1c0a9be7f2a340          {"ttl_s": 10.0, "pid": 4711}; its mtime is the last renewal
            90cc1e6f0b5a7d12.ended    revoked: its keys are invisible at once
        keys/
            instances%2Fns%2Fa        msgpack [key, lease, value]; value nil is a tombstone
            instances%2F...@6f1d...   a long key: the name is truncated and ends with a hash
        tmp/                          files being written or removed

Files are written in `tmp/` and renamed, so readers never see a partial file. Nothing is synced to disk, since no lease
survives a power failure. The mtime has random low digits, so that inode, mtime and size together change with every
write even if the kernel's clock is coarse.

Owns file names, formats and a cache of parsed files; single-threaded. Raises OSError. Must not depend on the loop,
expiry or watches.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import msgspec

from kvolt.core.errors import MALFORMED, KeyConflict
from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.view import LeaseObservation, Record, Snapshot
from kvolt.runtime.host.private_directory import make_private

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 16 * 1024 * 1024
_MAX_FILE_BYTES = MAX_VALUE_BYTES + 64 * 1024
_MAX_NAME_CHARS = 200
_TEMP_FILE_MAX_AGE_S = 600.0
_ENDED = ".ended"
_LEASE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Signature = tuple[int, int, int]
"""Inode, mtime and size: equal while the file is not rewritten."""


class LeaseFile(msgspec.Struct, frozen=True):
    ttl_s: float
    pid: int
    """For diagnosis only."""


class OwnedKey(msgspec.Struct, frozen=True):
    """A key's value as its owner set it, and the file last written for it."""

    value: bytes
    signature: Signature


class Renewal(msgspec.Struct, frozen=True):
    """Result of renewing a lease: rewritten and lost keys."""

    keys: dict[str, OwnedKey]
    lost: list[str]
    """Keys that another lease has acquired."""


class _KeyFile(msgspec.Struct, frozen=True):
    signature: Signature
    record: Record | None
    """None when the file is not a discovery key."""


_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_lease = msgspec.json.Decoder(LeaseFile).decode


def file_name(key: str) -> str:
    """Map a key to a unique file name."""
    # quote() keeps dots, and '.' and '..' are no valid file names; it always escapes '@'.
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{name[: _MAX_NAME_CHARS - 33]}@{digest}"


class Directory:
    """A process's access to the directory. `tag` distinguishes this object's temporary files."""

    def __init__(self, root: Path, tag: str) -> None:
        self._leases = root / "leases"
        self._keys = root / "keys"
        self._temp = root / "tmp"
        self._tag = tag
        self._num_temps = 0
        self._lease_files: dict[str, tuple[Signature, LeaseFile | None]] = {}
        self._key_files: dict[str, _KeyFile] = {}
        self._records: Mapping[str, Record] = {}
        self._keys_folder_id: tuple[int, int] | None = None

    def ensure(self, wall_s: float) -> None:
        """Create missing folders, and delete stale temporary files of crashed writers."""
        for folder in (self._leases, self._keys, self._temp):
            make_private(folder)
        for entry in _entries(self._temp):
            with suppress(OSError):
                if wall_s - entry.stat(follow_symlinks=False).st_mtime > _TEMP_FILE_MAX_AGE_S:
                    os.unlink(entry.path)

    # -- reading

    def scan(self, relist: bool) -> Snapshot:
        """Read all leases and keys. Without `relist`, keys are listed only if the folder's mtime changed."""
        # Keys first: a lease is written before its keys, so the lease of each key read is found too.
        folder = os.stat(self._keys)
        folder_id = (folder.st_ino, folder.st_mtime_ns)
        if relist or folder_id != self._keys_folder_id:
            self._list_keys()
            self._keys_folder_id = folder_id
        return Snapshot(self._list_leases(), self._records)

    def _list_keys(self) -> None:
        files: dict[str, _KeyFile] = {}
        for entry in _entries(self._keys):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                cached = self._key_files.get(entry.name)
                if cached is None or cached.signature != _signature(info):
                    record = _read_record(Path(entry.path), info)
                    if record is None and (cached is None or cached.record is not None):
                        log.warning("file ignored: path=%s reason=not a discovery key", entry.path)
                    cached = _KeyFile(_signature(info), record)
                files[entry.name] = cached
        if files != self._key_files:
            self._key_files = files
            records = [file.record for file in files.values() if file.record is not None]
            self._records = {record.key: record for record in sorted(records, key=lambda record: record.key)}

    def _list_leases(self) -> dict[LeaseId, LeaseObservation]:
        files: dict[str, tuple[Signature, LeaseFile | None]] = {}
        leases: dict[LeaseId, LeaseObservation] = {}
        for entry in sorted(_entries(self._leases), key=lambda entry: entry.name):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                identity = (info.st_ino, 0, info.st_size)  # a renewal changes the mtime, not the content
                cached = self._lease_files.get(entry.name)
                if cached is None or cached[0] != identity:
                    content = _read_lease(Path(entry.path), info)
                    if content is None and (cached is None or cached[1] is not None):
                        log.warning("file ignored: path=%s reason=not a discovery lease", entry.path)
                    cached = (identity, content)
                files[entry.name] = cached
                if cached[1] is not None:
                    # `x.ended` sorts after `x` and wins.
                    name = LeaseId(entry.name.removesuffix(_ENDED))
                    leases[name] = LeaseObservation(
                        cached[1].ttl_s, info.st_mtime_ns, entry.name.endswith(_ENDED)
                    )
        self._lease_files = files
        return leases

    # -- writing

    def write_lease(self, lease: LeaseId, ttl_s: float, stamp_ns: int) -> None:
        with suppress(FileNotFoundError):  # the same lease, continued after its end
            os.unlink(self._leases / f"{lease}{_ENDED}")
        content = msgspec.json.encode(LeaseFile(ttl_s, os.getpid()))
        self._write(self._leases / lease, content, stamp_ns)

    def claim(
        self, record: Record, stamp_ns: int, is_alive: Callable[[LeaseId, LeaseObservation], bool]
    ) -> Signature:
        """Write a record; raises KeyConflict if another live lease owns the key.

        If two leases claim a free key at the same time, the later write wins, and the other lease detects the loss
        at its next renewal.
        """
        current = _record_at(self._keys / file_name(record.key))
        if current is not None and current.lease != record.lease and current.value is not None:
            owner = self._lease_at(current.lease)
            if owner is not None and is_alive(current.lease, owner):
                raise KeyConflict(f"another live lease owns {record.key}", key=record.key)
        return self.write_record(record, stamp_ns)

    def _lease_at(self, lease: LeaseId) -> LeaseObservation | None:
        """Read a lease's file; None if it is missing or malformed, as after the end of a lease."""
        if not _LEASE_NAME.fullmatch(lease):
            return None
        path = self._leases / lease
        try:
            info = os.lstat(path)
            content = _read_lease(path, info)
        except FileNotFoundError:
            return None
        return None if content is None else LeaseObservation(content.ttl_s, info.st_mtime_ns, ended=False)

    def write_record(self, record: Record, stamp_ns: int) -> Signature:
        return self._write(self._keys / file_name(record.key), msgspec.msgpack.encode(record), stamp_ns)

    def renew(
        self, lease: LeaseId, ttl_s: float, keys: Mapping[str, OwnedKey], stamp_ns: int, rewrite: bool
    ) -> Renewal:
        """Renew a lease and restore keys whose files are missing or damaged.

        `rewrite` (after a loss): also verify that writing works, and remove keys left by late writes.
        """
        path = self._leases / lease
        try:
            os.utime(path, ns=(stamp_ns, stamp_ns), follow_symlinks=False)
        except FileNotFoundError:
            rewrite = True
        if rewrite:
            self.write_lease(lease, ttl_s, stamp_ns)
            self._remove_stray_keys(lease, keys)
        renewed: dict[str, OwnedKey] = {}
        lost: list[str] = []
        for key, own in keys.items():
            path = self._keys / file_name(key)
            if _signature_of(path) == own.signature:
                continue
            current = _record_at(path)
            if current is not None and current.lease != lease:
                lost.append(key)
            else:
                renewed[key] = OwnedKey(own.value, self.write_record(Record(key, lease, own.value), stamp_ns))
        return Renewal(renewed, lost)

    def end_lease(self, lease: LeaseId, keys: list[str]) -> None:
        """Revoke a lease: one rename hides all its keys from readers, then the files are removed."""
        with suppress(FileNotFoundError):
            os.rename(self._leases / lease, self._leases / f"{lease}{_ENDED}")
        for key in keys:
            self.remove_key(key, lease)

    def remove_key(self, key: str, lease: LeaseId) -> None:
        """Remove a key's file if it still belongs to the lease."""
        self._remove_if(self._keys / file_name(key), lambda path: _lease_of(path) == lease)

    def remove_dead(self, leases: Mapping[LeaseId, int | None]) -> None:
        """Remove files of dead leases, given with their last known mtime (None: no file).

        Safe if several readers do it concurrently, or if an owner becomes active again.
        """
        dead = {lease: mtime_ns for lease, mtime_ns in leases.items() if self._mtime_of(lease) == mtime_ns}
        for file in list(self._key_files.values()):
            if file.record is not None and file.record.lease in dead:
                with suppress(OSError):
                    self.remove_key(file.record.key, file.record.lease)
        for lease, mtime_ns in dead.items():
            for name in (lease, f"{lease}{_ENDED}"):
                with suppress(OSError):
                    self._remove_if(self._leases / name, partial(_has_mtime, mtime_ns))

    def _mtime_of(self, lease: LeaseId) -> int | None:
        for name in (lease, f"{lease}{_ENDED}"):
            with suppress(FileNotFoundError):
                return (self._leases / name).lstat().st_mtime_ns
        return None

    def _remove_stray_keys(self, lease: LeaseId, keys: Mapping[str, OwnedKey]) -> None:
        self._list_keys()
        for record in self._records.values():
            if record.lease == lease and record.value is not None and record.key not in keys:
                self.remove_key(record.key, lease)

    def _write(self, path: Path, content: bytes, stamp_ns: int) -> Signature:
        temp = self._temp_path()
        try:
            temp.write_bytes(content)
            os.utime(temp, ns=(stamp_ns, stamp_ns))
            signature = _signature(os.stat(temp))
            os.rename(temp, path)
        except OSError:
            with suppress(OSError):
                os.unlink(temp)
            raise
        return signature

    def _remove_if(self, path: Path, should_remove: Callable[[Path], bool]) -> None:
        """Unlink a file, but never one that was replaced after the check.

        The file is moved aside and checked again there; on a mismatch it is linked back unless a newer one exists.
        """
        aside = self._temp_path()
        try:
            if not should_remove(path):
                return
            os.rename(path, aside)
        except FileNotFoundError:
            return
        try:
            if not should_remove(aside):
                with suppress(FileExistsError):
                    os.link(aside, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(aside)

    def _temp_path(self) -> Path:
        self._num_temps += 1
        return self._temp / f"{self._tag}-{self._num_temps}"


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        yield from entries


def _signature(info: os.stat_result) -> Signature:
    return info.st_ino, info.st_mtime_ns, info.st_size


def _has_mtime(mtime_ns: int | None, path: Path) -> bool:
    return path.lstat().st_mtime_ns == mtime_ns


def _signature_of(path: Path) -> Signature | None:
    try:
        return _signature(os.lstat(path))
    except FileNotFoundError:
        return None


def _record_at(path: Path) -> Record | None:
    try:
        return _read_record(path, os.lstat(path))
    except FileNotFoundError:
        return None


def _lease_of(path: Path) -> LeaseId | None:
    """The lease named in a record file, whatever the file's name."""
    try:
        return _decode_record(path.read_bytes()).lease
    except MALFORMED:
        return None


def _read_record(path: Path, info: os.stat_result) -> Record | None:
    content = _read(path, info)
    if content is None:
        return None
    try:
        record = _decode_record(content)
    except MALFORMED:
        return None
    return record if file_name(record.key) == path.name else None


def _read_lease(path: Path, info: os.stat_result) -> LeaseFile | None:
    content = _read(path, info)
    if content is None or not _LEASE_NAME.fullmatch(path.name.removesuffix(_ENDED)):
        return None
    try:
        lease = _decode_lease(content)
    except MALFORMED:
        return None
    return lease if lease.ttl_s > 0 and math.isfinite(lease.ttl_s) else None


def _read(path: Path, info: os.stat_result) -> bytes | None:
    # Regular files only: opening a named pipe would block.
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_FILE_BYTES:
        return None
    try:
        return path.read_bytes()
    except PermissionError:
        return None
