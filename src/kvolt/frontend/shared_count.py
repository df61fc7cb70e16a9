"""Request counts in shared memory, which bound the processes of one frontend together.

Each process maps the same file and writes only its own 8-byte slot, so there is no lock. The parent process owns the
file and clears the slot of a process that died.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvolt.core.errors import ConfigError

EDGE_DETAILS = "edge"
"""Key of the status details of a process that shares its counts: group, models with their workers, router."""

_SLOT_BYTES = 8


class SharedCounts:
    """Slots of all processes. Slots are aligned words, so reads are never torn."""

    def __init__(self, path: Path) -> None:
        """Map the file; raises ConfigError if it is missing or invalid."""
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise _unusable(path, str(error)) from error
        if len(self._memory) % _SLOT_BYTES:
            self._memory.close()
            raise _unusable(path, "not a table of counts")
        self._bytes = memoryview(self._memory)
        self._slots = self._bytes.cast("Q")

    @classmethod
    def create(cls, path: Path, num_slots: int) -> SharedCounts:
        """Create the file with all slots at zero."""
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(num_slots * _SLOT_BYTES))
        return cls(path)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def total(self) -> int:
        return sum(self._slots)

    def set_count(self, slot: int, count: int) -> None:
        self._slots[slot] = count

    def close(self) -> None:
        self._slots.release()
        self._bytes.release()
        self._memory.close()


class SharedSlot:
    """Slot of one process."""

    __slots__ = ("_counts", "_slot")

    def __init__(self, counts: SharedCounts, slot: int) -> None:
        """Reset the slot: its count may be left from a previous process."""
        if not 0 <= slot < counts.num_slots:
            raise ConfigError(
                f"slot {slot} is out of range", key="slot", remedy=f"use 0 to {counts.num_slots - 1}"
            )
        self._counts = counts
        self._slot = slot
        counts.set_count(slot, 0)

    def set_count(self, count: int) -> int:
        """Set the count of this process and return the sum of all slots."""
        self._counts.set_count(self._slot, count)
        return self._counts.total()


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"cannot share counts in {path}: {reason}",
        key="counts",
        remedy="use `kvolt frontend --processes N`, which creates the file",
    )
