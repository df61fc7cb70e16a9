"""What a reader of a shared directory believes: which leases live, which keys are there.

Owns expiry and the rule that absence is not news: a key goes when its owner says so (a tombstone, an
ended lease) or when its lease has been silent for its ttl. A file that merely vanished (somebody
removed the directory) is believed for one ttl more, time enough for its owner to put it back.

Silence is counted in time that was observed: a reader that was stopped, or could not read, grants
every living lease a new ttl instead of declaring all of them dead at once.

Pure: knows no file, no clock and no task; times come in as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvolt.runtime.discovery.port import LeaseId
from kvolt.runtime.discovery.watch import Change

DEAD_TTLS_KEPT = 4
"""Ttls that a dead lease and its keys are left lying before a reader removes them."""

_ORPHAN_TTL_S = 30.0
"""Taken for a lease that no file tells the ttl of."""


class LeaseSeen(msgspec.Struct, frozen=True):
    """A lease as one scan found it."""

    ttl_s: float
    mtime_ns: int
    ended: bool


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A key as its owner wrote it; `value` is None in a tombstone."""

    key: str
    lease: LeaseId
    value: bytes | None


class Snapshot(msgspec.Struct, frozen=True):
    """One scan. `records` is the same object as in the scan before when nothing in it changed."""

    leases: Mapping[LeaseId, LeaseSeen]
    records: Mapping[str, Record]


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    mtime_ns: int | None
    """None while there is no file."""
    alive: bool
    silent_s: float = 0.0
    """While alive, observed time since its last sign of life; then, observed time since its death."""

    def turn(self, alive: bool) -> bool:
        """Returns whether that is a change."""
        if self.alive == alive:
            return False
        self.alive = alive
        self.silent_s = 0.0
        return True


class View:
    """The state of one reader, fed with snapshots."""

    def __init__(self, max_step_s: float) -> None:
        self._max_step_s = max_step_s
        self._last_update_at: float | None = None
        self._leases: dict[LeaseId, _Lease] = {}
        self._records: Mapping[str, Record] = {}
        self._visible: dict[str, Record] = {}
        self._vanished_s: dict[str, float] = {}

    def lost(self) -> None:
        """The store could not be read: what is known stays, and time stands still until it can."""
        self._last_update_at = None
        for lease in self._leases.values():
            lease.silent_s = 0.0
        for key in self._vanished_s:
            self._vanished_s[key] = 0.0

    def content(self, prefix: str = "") -> dict[str, bytes]:
        """In key order."""
        return {
            key: record.value
            for key in sorted(self._visible)
            if (record := self._visible[key]).value is not None and key.startswith(prefix)
        }

    def believes_alive(self, lease: LeaseId) -> bool:
        known = self._leases.get(lease)
        return known is not None and known.alive

    def update(self, snapshot: Snapshot, now_s: float, wall_s: float) -> list[Change]:
        """Returns what changed, in key order."""
        elapsed_s = 0.0
        if self._last_update_at is not None:
            elapsed_s = min(now_s - self._last_update_at, self._max_step_s)
        self._last_update_at = now_s
        turned = self._age_leases(snapshot.leases, elapsed_s, wall_s)
        if snapshot.records is self._records and not turned and not self._vanished_s:
            return []
        self._records = snapshot.records
        return self._refresh(elapsed_s)

    def garbage(self) -> dict[LeaseId, int | None]:
        """Leases dead for so long that their files may go, with the mtime last seen of each.

        Each is named once per such time.
        """
        found: dict[LeaseId, int | None] = {}
        for name, lease in list(self._leases.items()):
            if not lease.alive and lease.silent_s >= DEAD_TTLS_KEPT * lease.ttl_s:
                found[name] = lease.mtime_ns
                lease.silent_s = 0.0
                if lease.mtime_ns is None:
                    del self._leases[name]
        return found

    def _age_leases(self, seen: Mapping[LeaseId, LeaseSeen], elapsed_s: float, wall_s: float) -> bool:
        turned = False
        for name, file in seen.items():
            lease = self._leases.get(name)
            if lease is None or (lease.mtime_ns is None and not lease.alive):
                fresh = wall_s - file.mtime_ns / 1e9 < file.ttl_s
                self._leases[name] = _Lease(file.ttl_s, file.mtime_ns, fresh and not file.ended)
                turned = True
                continue
            lease.silent_s += elapsed_s
            if file.ended:
                turned |= lease.turn(alive=False)
            elif file.mtime_ns != lease.mtime_ns:
                turned |= lease.turn(alive=True)
                lease.silent_s = 0.0
            elif lease.alive and lease.silent_s >= lease.ttl_s:
                turned |= lease.turn(alive=False)
            lease.ttl_s, lease.mtime_ns = file.ttl_s, file.mtime_ns
        for name, lease in self._leases.items():
            if name in seen:
                continue
            if lease.mtime_ns is not None:
                lease.mtime_ns = None
                lease.silent_s = 0.0
            else:
                lease.silent_s += elapsed_s
            if lease.alive and lease.silent_s >= lease.ttl_s:
                turned |= lease.turn(alive=False)
        return turned

    def _refresh(self, elapsed_s: float) -> list[Change]:
        before, vanished_before = self._visible, self._vanished_s
        self._visible, self._vanished_s = {}, {}
        for key, record in self._records.items():
            lease = self._leases.get(record.lease)
            if lease is None:
                lease = self._leases[record.lease] = _Lease(_ORPHAN_TTL_S, None, alive=False)
            if lease.alive and record.value is not None:
                self._visible[key] = record
        for key, record in before.items():
            if key not in self._records:
                self._believe(key, record, vanished_before.get(key, -elapsed_s) + elapsed_s)
        return _difference(before, self._visible)

    def _believe(self, key: str, record: Record, vanished_s: float) -> None:
        """Keep a key whose file is missing, unless its lease or its time is over."""
        lease = self._leases.get(record.lease)
        if lease is not None and lease.alive and vanished_s < lease.ttl_s:
            self._visible[key] = record
            self._vanished_s[key] = vanished_s


def _difference(before: Mapping[str, Record], after: Mapping[str, Record]) -> list[Change]:
    changes: list[Change] = [(key, None) for key in before if key not in after]
    for key, record in after.items():
        old = before.get(key)
        if old is None or (old is not record and old.value != record.value):
            changes.append((key, record.value))
    return sorted(changes, key=lambda change: change[0])
