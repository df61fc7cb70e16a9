"""DiskFiles: durable blocks in the files of a folder.

    about.json         shape and format of the blocks, to detect another version, model or setting
    journal            which slot holds which block (`journal`)
    blocks-0000 ...    adjacent slots, in files of about a gigabyte

Bytes are written before their record, so a block found after a crash is complete; later corruption is detected by its
checksum. A folder has one owner at a time, enforced by a file lock. Calls block; they run in the tier's thread.
Encoding is done by `DiskBlocks`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from kvolt.core.errors import ConfigError, TransferFailed
from kvolt.kv.disk.fp8 import Fp8
from kvolt.kv.disk.journal import FORMAT, Journal, SlotRecord
from kvolt.kv.disk.parallel_calls import ParallelCalls
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot
from kvolt.transfer.memory.slabs import Numbers

_FILE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
"""Bytes per read call; several run in parallel."""
_MAX_OWNERS = 64
"""Concurrent owners of one folder, each with its own part."""
_LOCK_ATTEMPTS, _LOCK_PAUSE_S = 3, 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class About(msgspec.Struct, frozen=True):
    """Description of a folder's contents."""

    format: int
    piece_bytes: int
    num_ranks: int
    num_slots: int
    form: str = ""
    """Format of the stored bytes; empty: as in the engine."""

    def is_like(self, other: About) -> bool:
        """Whether blocks of both have the same shape and format."""
        return msgspec.structs.replace(self, num_slots=other.num_slots) == other


def slots_per_file(shape: BlockShape) -> int:
    """Slots per file, independent of the tier's capacity, which may change. The last file may have fewer."""
    return max(_FILE_BYTES // shape.slot_bytes, 1)


def file_of(folder: Path, number: int) -> Path:
    return folder / f"blocks-{number:04}"


class DiskFiles:
    """Folder of one owner, released by `close`. ConfigError if it cannot be used."""

    def __init__(
        self,
        folder: Path,
        shape: BlockShape,
        num_slots: int,
        form: Fp8 | None = None,
        *,
        is_direct: bool = True,
    ) -> None:
        """`shape`: of the engine's blocks. `form`: stored format, if different. `is_direct`: bypass the page cache if
        supported."""
        self.form = form
        self.shape = shape if form is None else form.packed(shape)
        self.num_slots = num_slots
        self._per_file = slots_per_file(self.shape)
        self._descriptors: dict[int, int] = {}
        self.threads = ParallelCalls()
        """Threads for parallel reads and checksums."""
        self._unsynced: set[int] = set()
        """Files with writes that may not be durable yet."""
        try:
            self.folder, self._lock = _lock_part(folder / self._folder_name())
            try:
                self._check_about()
                self._write_about()
                self._journal = Journal(self.folder)
            except BaseException:
                os.close(self._lock)
                raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot store blocks in {folder}: {error}",
                key="kv_disk_dir",
                remedy="choose a writable folder on a disk with free space",
            ) from None
        self.is_direct = is_direct and _supports_direct(self.folder)

    def close(self) -> None:
        self.threads.close()
        self._journal.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        os.close(self._lock)

    def _folder_name(self) -> str:
        """Folder name for blocks of this shape and format."""
        kind = f"v{FORMAT}-{self.shape.piece_bytes}x{self.shape.num_ranks}"
        return kind if self.form is None else f"{kind}-{self.form.name}"

    @property
    def _about(self) -> About:
        form = "" if self.form is None else self.form.name
        return About(FORMAT, self.shape.piece_bytes, self.shape.num_ranks, self.num_slots, form)

    def _check_about(self) -> None:
        """ValueError if the folder holds other blocks, for example because it was moved here."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # missing or incomplete after a crash
            stored = msgspec.json.decode((self.folder / "about.json").read_bytes(), type=About)
            if not stored.is_like(self._about):
                raise ValueError(
                    f"{self.folder} holds blocks of another kind ({stored}): remove or rename it"
                )

    def _write_about(self) -> None:
        new = self.folder / "about.json.new"
        new.write_bytes(msgspec.json.encode(self._about))
        new.replace(self.folder / "about.json")

    def resize(self, num_slots: int) -> None:
        """Change the capacity; slots beyond it can still be read. TransferFailed on I/O errors."""
        before, self.num_slots = self.num_slots, num_slots
        try:
            with self._transfer_errors("resize"):
                self._write_about()
        except TransferFailed:
            self.num_slots = before
            raise
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()  # reopened with the new size

    def trim(self, end: int) -> None:
        """Delete files whose slots are all at or beyond `end`; the caller ensures these are durably empty."""
        number = -(-end // self._per_file)
        while (path := file_of(self.folder, number)).exists():
            self._unsynced.discard(number)
            descriptor = self._descriptors.pop(number, None)
            if descriptor is not None:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            number += 1

    def recover(self) -> list[SlotRecord]:
        """Return the stored blocks. Call once, first."""
        try:
            return self._recover()
        except OSError as error:
            raise ConfigError(
                f"cannot read {self.folder}: {error}",
                key="kv_disk_dir",
                remedy="free disk space, or remove the folder: it holds only cached data",
            ) from None

    def _recover(self) -> list[SlotRecord]:
        records = self._journal.recover(self.num_slots)
        sizes = {number: self._size(number) for number in {each.slot // self._per_file for each in records}}
        whole: list[SlotRecord] = []
        truncated: list[SlotRecord] = []
        for each in records:
            number, index = divmod(each.slot, self._per_file)
            is_whole = index * self.shape.slot_bytes + self.shape.block_bytes <= sizes[number]
            (whole if is_whole else truncated).append(each)
        self._journal.remove([each.slot for each in truncated])  # their slots will be reused
        return whole

    def write(self, slots: Sequence[Slot], memory: SlotMemory, sources: Numbers) -> None:
        """Write bytes to empty slots; effective only after `commit`. TransferFailed on I/O errors."""
        with self._transfer_errors("write blocks to"):
            for number, in_file, indexes in self._by_file(np.asarray(slots, dtype=np.int64)):
                descriptor = self._open(number)
                self._unsynced.add(number)
                for part, in_part, positions in memory.by_part(sources[indexes]):
                    for at, count, start in _runs(in_file[positions], in_part):
                        self._move(os.pwritev, descriptor, part.memory, at, count, start)

    def commit(self, written: Sequence[SlotRecord], freed: Iterable[Slot] = ()) -> None:
        """Record written blocks and free the slots `freed`, durably. TransferFailed on I/O errors."""
        with self._transfer_errors("write blocks to"):
            for number in sorted(self._unsynced):
                os.fdatasync(self._open(number))
            self._unsynced.clear()
            self._journal.write(written, freed)

    @contextlib.contextmanager
    def _transfer_errors(self, action: str) -> Iterator[None]:
        """Convert I/O errors to TransferFailed."""
        try:
            yield
        except OSError as error:
            reason = "no_room" if error.errno in _NO_ROOM else error.strerror
            raise TransferFailed(
                f"cannot {action} {self.folder}: {error}", path="disk", reason=reason
            ) from None

    def read(self, slots: Sequence[Slot], memory: SlotMemory, destinations: Numbers) -> None:
        """Read disk slots into memory slots. TransferFailed on I/O errors."""
        reads: list[Callable[[], None]] = []
        max_slots = max(_READ_BYTES // self.shape.slot_bytes, 1)
        with self._transfer_errors("read blocks from"):
            for number, in_file, indexes in self._by_file(np.asarray(slots, dtype=np.int64)):
                descriptor = self._open(number)
                for part, in_part, positions in memory.by_part(destinations[indexes]):
                    for at, count, start in _runs(in_file[positions], in_part):
                        for done in range(0, count, max_slots):
                            run = (at + done, min(max_slots, count - done), start + done)
                            reads.append(partial(self._move, os.preadv, descriptor, part.memory, *run))
            self.threads.run(reads)

    def locations(self, slots: Numbers) -> list[tuple[Path, Numbers, Numbers]]:
        """File, byte offsets and indexes in `slots`, for direct reads."""
        return [
            (file_of(self.folder, number), in_file * self.shape.slot_bytes, indexes)
            for number, in_file, indexes in self._by_file(slots)
        ]

    def remove(self, slots: Sequence[Slot]) -> None:
        """Free slots durably, so that they can be reused. TransferFailed on I/O errors."""
        with self._transfer_errors("write the journal of"):
            self._journal.remove(slots)

    def _by_file(self, slots: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        files = slots // self._per_file
        parts = []
        for number in np.unique(files).tolist():
            indexes = np.flatnonzero(files == number)
            parts.append((number, slots[indexes] - number * self._per_file, indexes))
        return parts

    def _size(self, number: int) -> int:
        try:
            return file_of(self.folder, number).stat().st_size
        except OSError:
            return 0

    def _open(self, number: int) -> int:
        descriptor = self._descriptors.get(number)
        if descriptor is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if self.is_direct else 0)
            descriptor = os.open(file_of(self.folder, number), flags, 0o600)
            num_left = self.num_slots - number * self._per_file
            num_bytes = min(self._per_file, num_left) * self.shape.slot_bytes
            if os.fstat(descriptor).st_size < num_bytes:
                try:
                    _allocate(descriptor, num_bytes)
                except BaseException:
                    os.close(descriptor)
                    raise
            self._descriptors[number] = descriptor
        return descriptor

    def _move(
        self,
        call: Callable[[int, list[memoryview], int], int],
        descriptor: int,
        memory: memoryview,
        at: int,
        count: int,
        start: int,
    ) -> None:
        """Transfer `count` adjacent slots, from slot `at` of the file and slot `start` of the memory on."""
        size, num_moved = self.shape.slot_bytes, 0
        while num_moved < count * size:
            # Release the view on errors too, since the traceback would keep it alive.
            with memory[start * size + num_moved : (start + count) * size] as view:
                moved = call(descriptor, [view], at * size + num_moved)
            if not moved:
                raise OSError(errno.EIO, "the file was truncated")
            num_moved += moved


def _lock_part(folder: Path) -> tuple[Path, int]:
    """Lock the first free part of a folder; return it and the lock. OSError if all are in use."""
    for number in range(_MAX_OWNERS):
        part = folder / f"{number:02}"
        part.mkdir(parents=True, exist_ok=True)
        lock = os.open(part / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(_LOCK_ATTEMPTS):
                if not is_locked(lock):
                    return part, lock
                time.sleep(_LOCK_PAUSE_S)  # another process may be probing the lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise OSError(errno.EBUSY, f"all {_MAX_OWNERS} parts are in use")


def is_locked(descriptor: int) -> bool:
    """Take the lock of an open lock file; return whether another process has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _supports_direct(folder: Path) -> bool:
    """Whether the file system supports O_DIRECT; some reject only the first write."""
    path = folder / "direct-probe"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        return False
    page = SlotMemory(BlockShape(1), 1)
    try:
        page.grow_to(1)
        [(part, _, _)] = page.by_part(np.zeros(1, dtype=np.int64))
        return os.pwritev(descriptor, [part.memory], 0) > 0 and os.preadv(descriptor, [part.memory], 0) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)
        page.close()
        with contextlib.suppress(OSError):
            path.unlink()


def _allocate(descriptor: int, num_bytes: int) -> None:
    """Allocate the disk space of a file, or only set its size if the file system cannot."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        os.ftruncate(descriptor, num_bytes)


def _runs(in_file: Numbers, in_memory: Numbers) -> list[tuple[int, int, int]]:
    """Runs of slots adjacent on both sides: first file slot, count, first memory slot."""
    order = np.argsort(in_file, kind="stable")
    in_file, in_memory = in_file[order], in_memory[order]
    breaks = np.flatnonzero((np.diff(in_file) != 1) | (np.diff(in_memory) != 1)) + 1
    firsts = np.concatenate(([0], breaks)).tolist()
    ends = [*firsts[1:], len(in_file)]
    return [
        (int(in_file[first]), end - first, int(in_memory[first]))
        for first, end in zip(firsts, ends, strict=True)
    ]
