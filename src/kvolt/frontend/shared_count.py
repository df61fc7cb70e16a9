"""A number per process in memory that the processes of one edge share: what bounds them together.

A file that each of them maps: one 8-byte slot each, written by its owner alone, so there is no lock. Whoever
started them keeps the file and clears the slot of one that died.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from kvolt.core.errors import ConfigError

_SLOT_BYTES = 8


class SharedCounts:
    """The slots of all processes. Aligned words: a reader sees a number that was written, never half of one."""

    def __init__(self, path: Path) -> None:
        """ConfigError when there is no such file of slots."""
        try:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise _unusable(path, str(error)) from error
        if len(self._memory) % _SLOT_BYTES:
            self._memory.close()
            raise _unusable(path, "it is no table of counts")
        self._bytes = memoryview(self._memory)
        self._slots = self._bytes.cast("Q")

    @classmethod
    def create(cls, path: Path, num_slots: int) -> SharedCounts:
        """A new file with every slot at zero."""
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(num_slots * _SLOT_BYTES))
        return cls(path)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    def total(self) -> int:
        return sum(self._slots)

    def put(self, slot: int, count: int) -> None:
        self._slots[slot] = count

    def close(self) -> None:
        self._slots.release()
        self._bytes.release()
        self._memory.close()


class SharedSlot:
    """One process's own slot, and the sum of all."""

    __slots__ = ("_counts", "_slot")

    def __init__(self, counts: SharedCounts, slot: int) -> None:
        """Clears the slot: what an earlier life of this process counted is gone with it."""
        if not 0 <= slot < counts.num_slots:
            raise ConfigError(
                f"slot {slot} is not one of {counts.num_slots}", key="slot", remedy="count from 0"
            )
        self._counts = counts
        self._slot = slot
        counts.put(slot, 0)

    def put(self, count: int) -> int:
        """Write our number; the sum of all slots comes back, ours included."""
        self._counts.put(self._slot, count)
        return self._counts.total()


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"cannot share counts by {path}: {why}",
        key="counts",
        remedy="leave this to `kvolt frontend --processes N`, which makes the file",
    )
