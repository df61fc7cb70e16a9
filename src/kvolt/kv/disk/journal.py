"""Journal of a disk tier: which slot holds which block, crash-safe.

A file of fixed-size records, each with a checksum and an increasing number. A record states that a slot holds a block
or is empty; the record with the highest number applies, and invalid records are ignored. The result does not depend on
the order in which the disk writes unsynced data, as long as the caller (`files`) keeps two rules:

- the bytes of a slot are durable before the record that it holds them is written;
- the record that a slot is empty is durable before its bytes are changed.

The file is rewritten once most records are obsolete. Synchronous; one thread only.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvolt.core.block_key import BLOCK_KEY_BYTES
from kvolt.core.ids import BlockKey, SequenceHash
from kvolt.kv.tiers.slot_table import Slot, TierBlock
from kvolt.transfer.memory import block_bytes

log = logging.getLogger(__name__)

FORMAT = 1
RECORD = np.dtype(
    [
        ("format", "<u2"),
        ("is_there", "<u2"),
        ("slot", "<u4"),
        ("number", "<u8"),
        ("key", "V16"),
        ("parent", "V16"),
        ("hash", "<u8"),
        ("parent_hash", "<u8"),
        ("checksum", "<u8"),
        ("position", "<u4"),
        ("has_parent", "<u4"),
        ("sum", "<u8"),
    ]
)
_NAME = "journal"
_SUMMED_BYTES = RECORD.itemsize - 8
_SEED = 0x6B766F6C742D6A6E
"""Checksum seed of records."""
_MIN_REWRITE_RECORDS = 4096
"""Smaller journals are not rewritten."""

Records = npt.NDArray[np.void]


class JournalFile:
    """The journal file. Any call may raise OSError; then the file is unchanged or the next call fails."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._descriptor = self._open(self._path)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """Append durably."""
        try:
            _write(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError:
            # A partial record would misalign all following ones.
            os.ftruncate(self._descriptor, self._num_bytes)
            raise
        self._num_bytes += len(data)

    def replace(self, data: bytes) -> None:
        """Replace the file atomically."""
        path = self._path.with_suffix(".new")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        descriptor = self._open(path)
        try:
            _write(descriptor, data)
            os.fsync(descriptor)
            path.replace(self._path)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(self._descriptor)
        self._descriptor, self._num_bytes = descriptor, len(data)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def truncate(self, num_bytes: int) -> None:
        os.ftruncate(self._descriptor, num_bytes)
        self._num_bytes = num_bytes

    def read(self) -> bytes:
        return self._path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class SlotRecord(msgspec.Struct, frozen=True):
    """Block in a slot with the checksum of its bytes."""

    slot: Slot
    block: TierBlock
    checksum: int


class Journal:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self._file = JournalFile(folder)
        self._live: dict[Slot, bytes] = {}
        """Current record of each occupied slot."""
        self._number = 0
        self._num_records = 0

    def recover(self, num_slots: int) -> list[SlotRecord]:
        """Return the blocks in the slots, in order of writing. Call once, before any write."""
        data = self._file.read()
        records, whole = _read(data)
        self._number = int(whole["number"].max(initial=0))
        latest = _latest(whole)
        latest = latest[latest["slot"] < num_slots]
        written = _to_slot_records(latest)
        self._num_records = len(records)
        lines = _split(latest.tobytes(), RECORD.itemsize)
        self._live = dict(zip((each.slot for each in written), lines, strict=True))
        # Ignored records must not become effective later, when the records that override them are gone.
        num_occupied = int((_last_per_slot(whole)["is_there"] == 1).sum())
        if len(data) != whole.nbytes or num_occupied != len(latest):
            # Keeps new records aligned even if the rewrite fails for lack of space.
            self._file.truncate(records.nbytes)
            self._rewrite()
        return written

    def add(self, written: Sequence[SlotRecord]) -> None:
        """Record blocks whose bytes are durable. Durable on return."""
        self.write(written, ())

    def remove(self, slots: Iterable[Slot]) -> None:
        """Record empty slots. Durable on return."""
        self.write((), slots)

    def write(self, written: Sequence[SlotRecord], freed: Iterable[Slot]) -> None:
        """Record both with a single sync. The slots must be disjoint."""
        freed = [slot for slot in freed if slot in self._live]
        records = np.zeros(len(written) + len(freed), dtype=RECORD)
        records["slot"][len(written) :] = freed
        for record, each in zip(records, written, strict=False):
            block = each.block
            record["is_there"], record["slot"] = 1, each.slot
            record["key"], record["hash"] = np.void(bytes(block.key)), block.sequence_hash
            if block.parent is not None:
                record["parent"], record["has_parent"] = np.void(bytes(block.parent)), 1
            record["parent_hash"] = block.parent_hash or 0
            record["checksum"], record["position"] = each.checksum, block.position
        data = self._append(records)
        for index, each in enumerate(written):
            self._live[each.slot] = data[index * RECORD.itemsize : (index + 1) * RECORD.itemsize]
        for slot in freed:
            del self._live[slot]
        self._rewrite_if_large()

    def close(self) -> None:
        self._file.close()

    def _append(self, records: Records) -> bytes:
        """Number, checksum and append records durably."""
        if not len(records):
            return b""
        records["format"] = FORMAT
        records["number"] = np.arange(self._number + 1, self._number + 1 + len(records))
        self._number += len(records)
        records["sum"] = _sums(records)
        data = records.tobytes()
        self._file.append(data)
        self._num_records += len(records)
        return data

    def _rewrite_if_large(self) -> None:
        if self._num_records > max(_MIN_REWRITE_RECORDS, 4 * len(self._live)):
            self._rewrite()

    def _rewrite(self) -> None:
        """Drop obsolete records. On failure the file stays valid."""
        try:
            self._file.replace(b"".join(self._live.values()))
        except OSError as error:
            log.warning("journal rewrite failed: tier=disk error=%s", error)
            self._num_records = len(self._live)  # retry later
            return
        self._num_records = len(self._live)


def read_journal(folder: Path, num_slots: int) -> list[SlotRecord]:
    """Like `Journal.recover`, read-only, for a process that does not own the journal."""
    _, whole = _read((folder / _NAME).read_bytes())
    latest = _latest(whole)
    return _to_slot_records(latest[latest["slot"] < num_slots])


def _read(data: bytes) -> tuple[Records, Records]:
    """All records, and the valid ones."""
    records = np.frombuffer(data, dtype=RECORD, count=len(data) // RECORD.itemsize)
    return records, records[_are_whole(records)]


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _are_whole(records: Records) -> npt.NDArray[np.bool_]:
    if not len(records):
        return np.zeros(0, dtype=bool)
    are_whole: npt.NDArray[np.bool_] = (records["format"] == FORMAT) & (records["sum"] == _sums(records))
    return are_whole


def _sums(records: Records) -> npt.NDArray[np.uint64]:
    sums = np.empty(len(records), dtype=np.uint64)
    offsets = np.arange(len(records), dtype=np.int64) * RECORD.itemsize
    seeds = np.full(len(records), _SEED, dtype=np.uint64)
    block_bytes.checksums(records.tobytes(), offsets, _SUMMED_BYTES, 1, seeds, sums)
    return sums


def _latest(records: Records) -> Records:
    """Last record per slot, if occupied; for a block in two slots only the later one. In order of writing."""
    records = _last_per_slot(records)
    records = records[records["is_there"] == 1]
    return records[_last_of_each(records["key"])]


def _last_per_slot(records: Records) -> Records:
    records = records[np.argsort(records["number"], kind="stable")]
    return records[_last_of_each(records["slot"])]


def _last_of_each(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Indexes of the last occurrence of each value, sorted."""
    backwards = np.ascontiguousarray(values[::-1])
    if backwards.dtype.kind == "V":
        backwards = backwards.view("S16")  # ignores trailing zeros only, which does not matter for hashes
    _, firsts = np.unique(backwards, return_index=True)
    return np.sort(len(values) - 1 - firsts)


def _to_slot_records(records: Records) -> list[SlotRecord]:
    keys, parents = (
        _split(records["key"].tobytes(), BLOCK_KEY_BYTES),
        _split(records["parent"].tobytes(), BLOCK_KEY_BYTES),
    )
    columns = ("slot", "hash", "has_parent", "parent_hash", "position", "checksum")
    rows = zip(*(records[name].tolist() for name in columns), strict=True)
    return [
        SlotRecord(
            Slot(slot),
            TierBlock(
                BlockKey(key),
                SequenceHash(sequence_hash),
                BlockKey(parent) if has_parent else None,
                SequenceHash(parent_hash) if has_parent else None,
                position,
            ),
            checksum,
        )
        for key, parent, (slot, sequence_hash, has_parent, parent_hash, position, checksum) in zip(
            keys, parents, rows, strict=True
        )
    ]


def _split(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
