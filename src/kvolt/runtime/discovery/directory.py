"""The files of `file` discovery: reading, writing and removing them, all of it blocking.

    <directory>/
        leases/
            5d1c0a9be7f2a340          {"ttl_s": 10.0, "pid": 4711}; its mtime is the sign of life
            90cc1e6f0b5a7d12.ended    revoked: its keys are gone at once
        keys/
            instances%2Fns%2Fa        msgpack [key, lease, value]; value nil is a tombstone
            instances%2F...@6f1d...   a long key: the name is cut and ends with a hash
        tmp/                          files being written, or about to be removed

A file is written in `tmp/` and renamed, so a reader never sees half of one; nothing is synced to the
disk, since after a power failure no lease is alive anyway. Its mtime has random low digits, so that
inode, mtime and size together change with every write, however coarse the kernel's clock is.

Owns names, formats and its cache of what was read; it is called by one thread at a time. Raises
OSError. Must not know the loop, expiry or who watches.
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

from kvolt.core.errors import KeyConflict
from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.view import LeaseSeen, Record, Snapshot
from kvolt.runtime.host.private_directory import make_private
from kvolt.runtime.plane.wire import MALFORMED

log = logging.getLogger(__name__)

MAX_VALUE_BYTES = 16 * 1024 * 1024
_MAX_FILE_BYTES = MAX_VALUE_BYTES + 64 * 1024
_MAX_NAME_CHARS = 200
_TEMP_FILE_MAX_AGE_S = 600.0
_ENDED = ".ended"
_LEASE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

Signature = tuple[int, int, int]
"""Inode, mtime and size: equal as long as nobody wrote the file again."""


class LeaseFile(msgspec.Struct, frozen=True):
    ttl_s: float
    pid: int
    """For people."""


class OwnKey(msgspec.Struct, frozen=True):
    """What a lease's owner wants a key to be, and the file it last wrote for it."""

    value: bytes
    signature: Signature


class Renewal(msgspec.Struct, frozen=True):
    """What the owner of a lease learned when it looked after its files."""

    keys: dict[str, OwnKey]
    lost: list[str]
    """Keys that another lease has now."""


class _KeyFile(msgspec.Struct, frozen=True):
    signature: Signature
    record: Record | None
    """None when the file is not one of ours."""


_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_lease = msgspec.json.Decoder(LeaseFile).decode


def file_name(key: str) -> str:
    """A file name for any key; two keys never share one."""
    # quote() leaves dots alone, and '.' and '..' are no file names; it never leaves an '@'.
    name = quote(key, safe="").replace(".", "%2E")
    if len(name) <= _MAX_NAME_CHARS:
        return name
    digest = hashlib.blake2b(key.encode(), digest_size=16).hexdigest()
    return f"{name[: _MAX_NAME_CHARS - 33]}@{digest}"


class Directory:
    """One directory as one process sees it. `tag` tells this object's temporary files from all others'."""

    def __init__(self, root: Path, tag: str) -> None:
        self._leases = root / "leases"
        self._keys = root / "keys"
        self._temp = root / "tmp"
        self._tag = tag
        self._num_temps = 0
        self._lease_files: dict[str, tuple[Signature, LeaseFile | None]] = {}
        self._key_files: dict[str, _KeyFile] = {}
        self._records: Mapping[str, Record] = {}
        self._keys_seen: tuple[int, int] | None = None

    def ensure(self, wall_s: float) -> None:
        """Create what is missing, and clear away what crashed writers left in tmp/."""
        for folder in (self._leases, self._keys, self._temp):
            make_private(folder)
        for entry in _entries(self._temp):
            with suppress(OSError):
                if wall_s - entry.stat(follow_symlinks=False).st_mtime > _TEMP_FILE_MAX_AGE_S:
                    os.unlink(entry.path)

    # -- reading

    def scan(self, relist: bool) -> Snapshot:
        """All leases and keys. Without `relist`, keys are listed only if the folder's mtime changed."""
        # Keys first: a lease is written before its keys, so each key found has its lease found too.
        folder = os.stat(self._keys)
        seen = (folder.st_ino, folder.st_mtime_ns)
        if relist or seen != self._keys_seen:
            self._list_keys()
            self._keys_seen = seen
        return Snapshot(self._list_leases(), self._records)

    def _list_keys(self) -> None:
        files: dict[str, _KeyFile] = {}
        for entry in _entries(self._keys):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                known = self._key_files.get(entry.name)
                if known is None or known.signature != _signature(info):
                    record = _read_record(Path(entry.path), info)
                    if record is None and (known is None or known.record is not None):
                        log.warning("%s is not a discovery key: left alone", entry.path)
                    known = _KeyFile(_signature(info), record)
                files[entry.name] = known
        if files != self._key_files:
            self._key_files = files
            records = [file.record for file in files.values() if file.record is not None]
            self._records = {record.key: record for record in sorted(records, key=lambda record: record.key)}

    def _list_leases(self) -> dict[LeaseId, LeaseSeen]:
        files: dict[str, tuple[Signature, LeaseFile | None]] = {}
        leases: dict[LeaseId, LeaseSeen] = {}
        for entry in sorted(_entries(self._leases), key=lambda entry: entry.name):
            with suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                identity = (info.st_ino, 0, info.st_size)  # a renewal changes the mtime, not the content
                known = self._lease_files.get(entry.name)
                if known is None or known[0] != identity:
                    content = _read_lease(Path(entry.path), info)
                    if content is None and (known is None or known[1] is not None):
                        log.warning("%s is not a discovery lease: left alone", entry.path)
                    known = (identity, content)
                files[entry.name] = known
                if known[1] is not None:
                    # `x.ended` sorts after `x` and wins.
                    name = LeaseId(entry.name.removesuffix(_ENDED))
                    leases[name] = LeaseSeen(known[1].ttl_s, info.st_mtime_ns, entry.name.endswith(_ENDED))
        self._lease_files = files
        return leases

    # -- writing

    def write_lease(self, lease: LeaseId, ttl_s: float, stamp_ns: int) -> None:
        with suppress(FileNotFoundError):  # the same lease, taken up again after its end
            os.unlink(self._leases / f"{lease}{_ENDED}")
        content = msgspec.json.encode(LeaseFile(ttl_s, os.getpid()))
        self._write(self._leases / lease, content, stamp_ns)

    def claim(
        self, record: Record, stamp_ns: int, is_alive: Callable[[LeaseId, LeaseSeen], bool]
    ) -> Signature:
        """Write a record unless another live lease has the key: then KeyConflict.

        Of two leases that claim a free key at the same instant the later write stays, and the other lease
        learns of it at its next renewal.
        """
        present = _record_at(self._keys / file_name(record.key))
        if present is not None and present.lease != record.lease and present.value is not None:
            owner = self._lease_at(present.lease)
            if owner is not None and is_alive(present.lease, owner):
                raise KeyConflict(f"another live lease owns {record.key}", key=record.key)
        return self.write_record(record, stamp_ns)

    def _lease_at(self, lease: LeaseId) -> LeaseSeen | None:
        """A lease's file as it is now; None if it is missing or no lease, as after the end of a lease."""
        if not _LEASE_NAME.fullmatch(lease):
            return None
        path = self._leases / lease
        try:
            info = os.lstat(path)
            content = _read_lease(path, info)
        except FileNotFoundError:
            return None
        return None if content is None else LeaseSeen(content.ttl_s, info.st_mtime_ns, ended=False)

    def write_record(self, record: Record, stamp_ns: int) -> Signature:
        return self._write(self._keys / file_name(record.key), msgspec.msgpack.encode(record), stamp_ns)

    def renew(
        self, lease: LeaseId, ttl_s: float, keys: Mapping[str, OwnKey], stamp_ns: int, rewrite: bool
    ) -> Renewal:
        """A sign of life, and every key put back that is missing or damaged.

        `rewrite` after a loss: prove that writing works, and remove what a late write may have left.
        """
        path = self._leases / lease
        try:
            os.utime(path, ns=(stamp_ns, stamp_ns), follow_symlinks=False)
        except FileNotFoundError:
            rewrite = True
        if rewrite:
            self.write_lease(lease, ttl_s, stamp_ns)
            self._remove_unwanted(lease, keys)
        renewed: dict[str, OwnKey] = {}
        lost: list[str] = []
        for key, own in keys.items():
            path = self._keys / file_name(key)
            if _signature_of(path) == own.signature:
                continue
            present = _record_at(path)
            if present is not None and present.lease != lease:
                lost.append(key)
            else:
                renewed[key] = OwnKey(own.value, self.write_record(Record(key, lease, own.value), stamp_ns))
        return Renewal(renewed, lost)

    def end_lease(self, lease: LeaseId, keys: list[str]) -> None:
        """Revoke: one rename hides all keys from every reader, then the files go."""
        with suppress(FileNotFoundError):
            os.rename(self._leases / lease, self._leases / f"{lease}{_ENDED}")
        for key in keys:
            self.remove_key(key, lease)

    def remove_key(self, key: str, lease: LeaseId) -> None:
        """Remove a key's file if it is still that lease's."""
        self._remove_if(self._keys / file_name(key), lambda path: _lease_of(path) == lease)

    def remove_dead(self, leases: Mapping[LeaseId, int | None]) -> None:
        """Clear away what has been dead for long, given with its last known mtime (None: no file).

        Any number of readers may do it at the same time, and an owner may wake up meanwhile.
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

    def _remove_unwanted(self, lease: LeaseId, keys: Mapping[str, OwnKey]) -> None:
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

    def _remove_if(self, path: Path, doomed: Callable[[Path], bool]) -> None:
        """Unlink a file, but never one that was replaced between the look and the removal.

        Moved aside first and looked at again there; a wrong catch goes back unless a newer one is in place.
        """
        aside = self._temp_path()
        try:
            if not doomed(path):
                return
            os.rename(path, aside)
        except FileNotFoundError:
            return
        try:
            if not doomed(aside):
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
    """The lease of whatever record lies there, under whatever name."""
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
    # Opening a pipe that somebody left here would wait for its writer.
    if not stat.S_ISREG(info.st_mode) or info.st_size > _MAX_FILE_BYTES:
        return None
    try:
        return path.read_bytes()
    except PermissionError:
        return None
