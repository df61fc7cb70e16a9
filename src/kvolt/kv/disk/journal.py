"""The journal of a disk tier: which block lies in which slot, so that it is known after any crash.

A file of records of equal size, each with a checksum of its own and a number that counts up. A record says that a slot
holds a block from now on, or none. What is true of a slot is what its record with the highest number says; records that
are not whole, wherever they are, say nothing. So nothing depends on the order in which a disk writes what it was not
told to keep, as long as two rules are kept by who calls this (`disk`):

- a slot's bytes are on the disk before the record that it holds them is written;
- the record that a slot holds nothing is on the disk before its bytes are changed.

Owns the format, and the file, which is written anew once most of it is past. Synchronous; for one thread.
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
"""Of the records' own checksums."""
_LEAST_RECORDS = 4096
"""Below which a journal is not written anew."""

Records = npt.NDArray[np.void]


class JournalFile:
    """The file itself. OSError from any call; after one that failed it is as before, or the next one is refused."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _NAME
        self._descriptor = self._open(self._path)
        self._num_bytes = os.fstat(self._descriptor).st_size

    def append(self, data: bytes) -> None:
        """On the disk on return."""
        try:
            _write(self._descriptor, data)
            os.fdatasync(self._descriptor)
        except OSError:
            # A part of a record would put all that follow in the wrong place.
            os.ftruncate(self._descriptor, self._num_bytes)
            raise
        self._num_bytes += len(data)

    def replace(self, data: bytes) -> None:
        """The whole file at once: after a crash it is what it was, or this."""
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

    def cut(self, num_bytes: int) -> None:
        """To so many bytes."""
        os.ftruncate(self._descriptor, num_bytes)
        self._num_bytes = num_bytes

    def read(self) -> bytes:
        return self._path.read_bytes()

    def close(self) -> None:
        os.close(self._descriptor)

    @staticmethod
    def _open(path: Path) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class Written(msgspec.Struct, frozen=True):
    """A block in its slot."""

    slot: Slot
    block: TierBlock
    checksum: int


class Journal:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self._file = JournalFile(folder)
        self._live: dict[Slot, bytes] = {}
        """The record of each slot that holds a block."""
        self._number = 0
        self._num_records = 0

    def recover(self, num_slots: int) -> list[Written]:
        """What the slots hold, those written last at the end. Once, before anything is written."""
        data = self._file.read()
        records, whole = _read(data)
        self._number = int(whole["number"].max(initial=0))
        found = _latest(whole)
        found = found[found["slot"] < num_slots]
        written = _all_written(found)
        self._num_records = len(records)
        lines = _cut(found.tobytes(), RECORD.itemsize)
        self._live = dict(zip((each.slot for each in written), lines, strict=True))
        # What was passed over must not be found another time, when what stood against it is gone.
        num_told = int((_last_per_slot(whole)["is_there"] == 1).sum())
        if len(data) != whole.nbytes or num_told != len(found):
            self._file.cut(
                records.nbytes
            )  # what comes next is in its place, also where there is no room to rewrite
            self._write_anew()
        return written

    def add(self, written: Sequence[Written]) -> None:
        """Their bytes are on the disk; on return so are these records."""
        self.write(written, ())

    def remove(self, slots: Iterable[Slot]) -> None:
        """They hold nothing any more; on return that is on the disk."""
        self.write((), slots)

    def write(self, written: Sequence[Written], gone: Iterable[Slot]) -> None:
        """Both at once, which waits for the disk once. No slot may be of both."""
        gone = [slot for slot in gone if slot in self._live]
        records = np.zeros(len(written) + len(gone), dtype=RECORD)
        records["slot"][len(written) :] = gone
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
        for slot in gone:
            del self._live[slot]
        self._tidy()

    def close(self) -> None:
        self._file.close()

    def _append(self, records: Records) -> bytes:
        """Numbered and summed, and on the disk."""
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

    def _tidy(self) -> None:
        if self._num_records > max(_LEAST_RECORDS, 4 * len(self._live)):
            self._write_anew()

    def _write_anew(self) -> None:
        """What is past is left out. Where that cannot be done now, what there is is true as well."""
        try:
            self._file.replace(b"".join(self._live.values()))
        except OSError as error:
            log.warning("the journal of a disk tier stays as long as it is: %s", error)
            self._num_records = len(self._live)  # to be tried again some time
            return
        self._num_records = len(self._live)


def read_journal(folder: Path, num_slots: int) -> list[Written]:
    """As `Journal.recover`, by who does not own it: nothing is changed."""
    _, whole = _read((folder / _NAME).read_bytes())
    found = _latest(whole)
    return _all_written(found[found["slot"] < num_slots])


def _read(data: bytes) -> tuple[Records, Records]:
    """All records, and those of them that are whole."""
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
    """Of each slot its last record, if it holds a block by that; of a block in two slots the later one. In order."""
    records = _last_per_slot(records)
    records = records[records["is_there"] == 1]
    return records[_last_of_each(records["key"])]


def _last_per_slot(records: Records) -> Records:
    records = records[np.argsort(records["number"], kind="stable")]
    return records[_last_of_each(records["slot"])]


def _last_of_each(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """The places of the last of each value, in order of places."""
    backwards = np.ascontiguousarray(values[::-1])
    if backwards.dtype.kind == "V":
        backwards = backwards.view("S16")  # which tells apart all but what ends in zeros: keys are hashes
    _, firsts = np.unique(backwards, return_index=True)
    return np.sort(len(values) - 1 - firsts)


def _all_written(records: Records) -> list[Written]:
    keys, parents = (
        _cut(records["key"].tobytes(), BLOCK_KEY_BYTES),
        _cut(records["parent"].tobytes(), BLOCK_KEY_BYTES),
    )
    columns = ("slot", "hash", "has_parent", "parent_hash", "position", "checksum")
    rows = zip(*(records[name].tolist() for name in columns), strict=True)
    return [
        Written(
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


def _cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]
