"""A reader's view of a shared directory: live leases and visible keys.

Owns expiry, and the rule that a missing file is no delete: a key is deleted when its owner says so (a tombstone, an
ended lease) or when its lease was silent for its ttl. A file that vanished (the directory was removed) stays visible
for one more ttl, so that its owner can restore it.

Silence is counted in observed time: a reader that was stopped, or could not read, grants every live lease a new ttl
instead of declaring all of them dead at once.

Pure: no files, clock or tasks; times are arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.watch import Change

DEAD_TTLS_KEPT = 4
"""Number of ttls after which a reader removes the files of a dead lease."""

_ORPHAN_TTL_S = 30.0
"""Assumed ttl of a lease without a file."""


class LeaseObservation(msgspec.Struct, frozen=True):
    """A lease file as read by one scan."""

    ttl_s: float
    mtime_ns: int
    ended: bool


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A key as its owner wrote it; `value` is None in a tombstone."""

    key: str
    lease: LeaseId
    value: bytes | None


class Snapshot(msgspec.Struct, frozen=True):
    """Result of one scan. `records` is the same object as in the previous scan if unchanged."""

    leases: Mapping[LeaseId, LeaseObservation]
    records: Mapping[str, Record]


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    mtime_ns: int | None
    """None while the file is missing."""
    alive: bool
    silent_s: float = 0.0
    """While alive, observed time since its last renewal; afterwards, observed time since its death."""

    def set_alive(self, alive: bool) -> bool:
        """Set `alive`; returns whether it changed."""
        if self.alive == alive:
            return False
        self.alive = alive
        self.silent_s = 0.0
        return True


class View:
    """State of one reader, updated from snapshots."""

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._last_update_at: float | None = None
        self._leases: dict[LeaseId, _Lease] = {}
        self._records: Mapping[str, Record] = {}
        self._visible: dict[str, Record] = {}
        self._missing_s: dict[str, float] = {}

    def mark_unreadable(self) -> None:
        """Keep the known state and stop counting time: the directory could not be read."""
        self._last_update_at = None
        for lease in self._leases.values():
            lease.silent_s = 0.0
        for key in self._missing_s:
            self._missing_s[key] = 0.0

    def content(self, prefix: str = "") -> dict[str, bytes]:
        """Visible entries under the prefix, in key order."""
        return {
            key: record.value
            for key in sorted(self._visible)
            if (record := self._visible[key]).value is not None and key.startswith(prefix)
        }

    def is_alive(self, lease: LeaseId) -> bool:
        known = self._leases.get(lease)
        return known is not None and known.alive

    def apply_snapshot(self, snapshot: Snapshot, now_s: float, wall_s: float) -> list[Change]:
        """Apply a snapshot; returns the changes in key order."""
        elapsed_s = 0.0
        if self._last_update_at is not None:
            elapsed_s = min(now_s - self._last_update_at, self._max_step_s)
        self._last_update_at = now_s
        changed = self._age_leases(snapshot.leases, elapsed_s, wall_s)
        if snapshot.records is self._records and not changed and not self._missing_s:
            return []
        self._records = snapshot.records
        return self._refresh(elapsed_s)

    def collect_dead_leases(self) -> dict[LeaseId, int | None]:
        """Leases whose files may be removed, with their last mtime.

        A lease is returned once per `DEAD_TTLS_KEPT` ttls.
        """
        dead: dict[LeaseId, int | None] = {}
        for name, lease in list(self._leases.items()):
            if not lease.alive and lease.silent_s >= DEAD_TTLS_KEPT * lease.ttl_s:
                dead[name] = lease.mtime_ns
                lease.silent_s = 0.0
                if lease.mtime_ns is None:
                    del self._leases[name]
        return dead

    def _age_leases(
        self, observed: Mapping[LeaseId, LeaseObservation], elapsed_s: float, wall_s: float
    ) -> bool:
        changed = False
        for name, file in observed.items():
            lease = self._leases.get(name)
            if lease is None or (lease.mtime_ns is None and not lease.alive):
                fresh = wall_s - file.mtime_ns / 1e9 < file.ttl_s
                self._leases[name] = _Lease(file.ttl_s, file.mtime_ns, fresh and not file.ended)
                changed = True
                continue
            lease.silent_s += elapsed_s
            if file.ended:
                changed |= lease.set_alive(alive=False)
            elif file.mtime_ns != lease.mtime_ns:
                changed |= lease.set_alive(alive=True)
                lease.silent_s = 0.0
            elif lease.alive and lease.silent_s >= lease.ttl_s:
                changed |= lease.set_alive(alive=False)
            lease.ttl_s, lease.mtime_ns = file.ttl_s, file.mtime_ns
        for name, lease in self._leases.items():
            if name in observed:
                continue
            if lease.mtime_ns is not None:
                lease.mtime_ns = None
                lease.silent_s = 0.0
            else:
                lease.silent_s += elapsed_s
            if lease.alive and lease.silent_s >= lease.ttl_s:
                changed |= lease.set_alive(alive=False)
        return changed

    def _refresh(self, elapsed_s: float) -> list[Change]:
        before, missing_before = self._visible, self._missing_s
        self._visible, self._missing_s = {}, {}
        for key, record in self._records.items():
            lease = self._leases.get(record.lease)
            if lease is None:
                lease = self._leases[record.lease] = _Lease(_ORPHAN_TTL_S, None, alive=False)
            if lease.alive and record.value is not None:
                self._visible[key] = record
        for key, record in before.items():
            if key not in self._records:
                self._keep_missing(key, record, missing_before.get(key, -elapsed_s) + elapsed_s)
        return _difference(before, self._visible)

    def _keep_missing(self, key: str, record: Record, missing_s: float) -> None:
        """Keep a key whose file is missing, until its lease or its time is over."""
        lease = self._leases.get(record.lease)
        if lease is not None and lease.alive and missing_s < lease.ttl_s:
            self._visible[key] = record
            self._missing_s[key] = missing_s


def _difference(before: Mapping[str, Record], after: Mapping[str, Record]) -> list[Change]:
    changes: list[Change] = [(key, None) for key in before if key not in after]
    for key, record in after.items():
        old = before.get(key)
        if old is None or (old is not record and old.value != record.value):
            changes.append((key, record.value))
    return sorted(changes, key=lambda change: change[0])
