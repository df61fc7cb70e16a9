"""DiskFiles: blocks in files of a folder, found again after a restart.

    about.json         the shape and form of blocks, by which another version, model or setting is told apart
    journal            which slot holds which block (`journal`)
    blocks-0000 ...    slots side by side, in files of about a gigabyte

Bytes first, then the record of them: whatever a crash leaves, a block that is found is whole; and what a disk spoils
later is found out by its checksum, and is a miss. A folder has one owner at a time, by a lock that dies with it.
Calls block: they are for a thread of the tier's own. What the bytes mean is not known here: `disk_blocks`.
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
from kvolt.kv.disk.fp8 import EightBits
from kvolt.kv.disk.journal import FORMAT, Journal, Written
from kvolt.kv.disk.parallel_calls import SideBySide
from kvolt.kv.tiers.slot_memory import BlockShape, SlotMemory
from kvolt.kv.tiers.slot_table import Slot
from kvolt.transfer.memory.slabs import Numbers

_FILE_BYTES = 1 << 30
_READ_BYTES = 4 << 20
"""Of one read, of several at once."""
_MOST_OWNERS = 64
"""Of one folder at a time: each has a part of it."""
_LOCK_LOOKS, _LOCK_PAUSE_S = 3, 0.05
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class About(msgspec.Struct, frozen=True):
    """What lies in a folder."""

    format: int
    piece_bytes: int
    num_ranks: int
    num_slots: int
    form: str = ""
    """Of the bytes, where they are not as the engine had them."""

    def is_like(self, other: About) -> bool:
        """Whether blocks of one are what blocks of the other are."""
        return msgspec.structs.replace(self, num_slots=other.num_slots) == other


def slots_per_file(shape: BlockShape) -> int:
    """Whatever the size of the tier, which may be another the next time; the last file may have fewer."""
    return max(_FILE_BYTES // shape.slot_bytes, 1)


def file_of(folder: Path, number: int) -> Path:
    return folder / f"blocks-{number:04}"


class DiskFiles:
    """The folder of one owner. `close` gives it up. ConfigError where it cannot be used."""

    def __init__(
        self,
        folder: Path,
        shape: BlockShape,
        num_slots: int,
        form: EightBits | None = None,
        *,
        is_direct: bool = True,
    ) -> None:
        """`shape`: of blocks as the engine has them. `form`: in which they lie here, where it is another. `is_direct`:
        past the kernel's cache, where the file system lets us."""
        self.form = form
        self.shape = shape if form is None else form.packed(shape)
        self.num_slots = num_slots
        self._per_file = slots_per_file(self.shape)
        self._descriptors: dict[int, int] = {}
        self.threads = SideBySide()
        """For whatever is done with what they read."""
        self._unsynced: set[int] = set()
        """Files that blocks were put in, whose bytes the disk may not have yet."""
        try:
            self.folder, self._lock = _own(folder / self._kind_of_folder())
            try:
                self._check_what_this_is()
                self._say_what_this_is()
                self._journal = Journal(self.folder)
            except BaseException:
                os.close(self._lock)
                raise
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"blocks cannot be kept in {folder}: {error}",
                key="kv_disk_dir",
                remedy="name a folder that this process may write to, on a disk with room",
            ) from None
        self.is_direct = is_direct and _takes_direct(self.folder)

    def close(self) -> None:
        self.threads.close()
        self._journal.close()
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        os.close(self._lock)

    def _kind_of_folder(self) -> str:
        """Blocks of each shape and form have a folder of their own."""
        kind = f"v{FORMAT}-{self.shape.piece_bytes}x{self.shape.num_ranks}"
        return kind if self.form is None else f"{kind}-{self.form.name}"

    @property
    def _about(self) -> About:
        form = "" if self.form is None else self.form.name
        return About(FORMAT, self.shape.piece_bytes, self.shape.num_ranks, self.num_slots, form)

    def _check_what_this_is(self) -> None:
        """ValueError where it is something else: somebody has moved a folder to where another belongs."""
        with contextlib.suppress(OSError, msgspec.MsgspecError):  # none yet, or a crash has left none
            there = msgspec.json.decode((self.folder / "about.json").read_bytes(), type=About)
            if not there.is_like(self._about):
                raise ValueError(f"{self.folder} holds blocks of another kind ({there}): remove or rename it")

    def _say_what_this_is(self) -> None:
        new = self.folder / "about.json.new"
        new.write_bytes(msgspec.json.encode(self._about))
        new.replace(self.folder / "about.json")

    def resize(self, num_slots: int) -> None:
        """Slots up to this are written to from now on; those above it can be read still. TransferFailed."""
        before, self.num_slots = self.num_slots, num_slots
        try:
            self._say_what_this_is()
        except OSError as error:
            self.num_slots = before
            raise TransferFailed(
                f"{self.folder} cannot be resized: {error}", path="disk", reason=error.strerror
            ) from None
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()  # each gets its new size when it is opened

    def trim(self, end: int) -> None:
        """No block lies in a slot from `end` on, and that is known for good: their room is given back."""
        number = -(-end // self._per_file)
        while (path := file_of(self.folder, number)).exists():
            self._unsynced.discard(number)
            descriptor = self._descriptors.pop(number, None)
            if descriptor is not None:
                os.close(descriptor)
            with contextlib.suppress(OSError):
                path.unlink()
            number += 1

    def recover(self) -> list[Written]:
        """What is there. Once, and first."""
        try:
            return self._recover()
        except OSError as error:
            raise ConfigError(
                f"what is kept in {self.folder} cannot be read: {error}",
                key="kv_disk_dir",
                remedy="make room on that disk, or remove the folder: nothing in it is the only copy",
            ) from None

    def _recover(self) -> list[Written]:
        found = self._journal.recover(self.num_slots)
        sizes = {number: self._size(number) for number in {each.slot // self._per_file for each in found}}
        end = self.shape.slot_bytes
        whole: list[Written] = []
        cut: list[Written] = []
        for each in found:
            number, place = divmod(each.slot, self._per_file)
            is_there = place * end + self.shape.block_bytes <= sizes[number]
            (whole if is_there else cut).append(each)
        self._journal.remove([each.slot for each in cut])  # their slots will hold others
        return whole

    def put(self, slots: Sequence[Slot], memory: SlotMemory, sources: Numbers) -> None:
        """Bytes into slots that hold nothing, where they are nothing until `keep`. TransferFailed."""
        with self._writing():
            for number, theirs, which in self._by_file(np.asarray(slots, dtype=np.int64)):
                descriptor = self._open(number)
                self._unsynced.add(number)
                for part, ours, index in memory.by_part(sources[which]):
                    for at, count, start in _runs(theirs[index], ours):
                        self._move(os.pwritev, descriptor, part.memory, at, count, start)

    def keep(self, written: Sequence[Written], gone: Iterable[Slot] = ()) -> None:
        """On return these, whose bytes were put there, are there for good, and so is that `gone` hold nothing any more.
        TransferFailed where that cannot be."""
        with self._writing():
            for number in sorted(self._unsynced):
                os.fdatasync(self._open(number))
            self._unsynced.clear()
            self._journal.write(written, gone)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = "no_room" if error.errno in _NO_ROOM else error.strerror
            raise TransferFailed(
                f"blocks cannot be written to {self.folder}: {error}", path="disk", reason=reason
            ) from None

    def read(self, slots: Sequence[Slot], memory: SlotMemory, destinations: Numbers) -> None:
        """Slots of the disk into slots of the memory. TransferFailed where they cannot be read."""
        reads: list[Callable[[], None]] = []
        most = max(_READ_BYTES // self.shape.slot_bytes, 1)
        try:
            for number, theirs, which in self._by_file(np.asarray(slots, dtype=np.int64)):
                descriptor = self._open(number)
                for part, ours, index in memory.by_part(destinations[which]):
                    for at, count, start in _runs(theirs[index], ours):
                        for done in range(0, count, most):
                            place = (at + done, min(most, count - done), start + done)
                            reads.append(partial(self._move, os.preadv, descriptor, part.memory, *place))
            self.threads.run(reads)
        except OSError as error:
            raise TransferFailed(
                f"blocks cannot be read from {self.folder}: {error}", path="disk", reason=error.strerror
            ) from None

    def places(self, slots: Numbers) -> list[tuple[Path, Numbers, Numbers]]:
        """For who reads slots past us: in which file, at which offsets, and which of `slots` these are."""
        return [
            (file_of(self.folder, number), theirs * self.shape.slot_bytes, which)
            for number, theirs, which in self._by_file(slots)
        ]

    def remove(self, slots: Sequence[Slot]) -> None:
        """They hold nothing any more, and may be written to after this. TransferFailed where that cannot be kept."""
        try:
            self._journal.remove(slots)
        except OSError as error:
            raise TransferFailed(
                f"the journal of {self.folder} cannot be written: {error}", path="disk", reason=error.strerror
            ) from None

    # ---

    def _by_file(self, slots: Numbers) -> list[tuple[int, Numbers, Numbers]]:
        files = slots // self._per_file
        found = []
        for number in np.unique(files).tolist():
            which = np.flatnonzero(files == number)
            found.append((number, slots[which] - number * self._per_file, which))
        return found

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
            left = self.num_slots - number * self._per_file
            num_bytes = min(self._per_file, left) * self.shape.slot_bytes
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
        """So many slots one after the other, from slot `at` of the file and slot `start` of the memory on."""
        size, num_moved = self.shape.slot_bytes, 0
        while num_moved < count * size:
            # Let go also where it fails: who holds the error would hold the memory with it.
            with memory[start * size + num_moved : (start + count) * size] as view:
                moved = call(descriptor, [view], at * size + num_moved)
            if not moved:
                raise OSError(errno.EIO, "the file is shorter than it was")
            num_moved += moved


def _own(folder: Path) -> tuple[Path, int]:
    """The first part of a folder that nobody has, and the lock by which it is ours. OSError where there is none."""
    for number in range(_MOST_OWNERS):
        part = folder / f"{number:02}"
        part.mkdir(parents=True, exist_ok=True)
        lock = os.open(part / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for _ in range(_LOCK_LOOKS):
                if _locked(lock):
                    return part, lock
                time.sleep(_LOCK_PAUSE_S)  # it may be somebody who only looks
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)
    raise OSError(errno.EBUSY, f"{_MOST_OWNERS} others have it")


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _takes_direct(folder: Path) -> bool:
    """Whether this file system reads and writes past the kernel's cache: some refuse at the first write only."""
    path = folder / "direct-probe"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    except OSError:
        return False
    page = SlotMemory(BlockShape(1), 1)
    try:
        page.reach(1)
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
    """Room for all of a file at once, where the file system can; else it is as large, and room is found as it fills."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise
        os.ftruncate(descriptor, num_bytes)


def _runs(theirs: Numbers, ours: Numbers) -> list[tuple[int, int, int]]:
    """Slots that follow each other on both sides: from where there, how many, from where here."""
    order = np.argsort(theirs, kind="stable")
    theirs, ours = theirs[order], ours[order]
    breaks = np.flatnonzero((np.diff(theirs) != 1) | (np.diff(ours) != 1)) + 1
    firsts = np.concatenate(([0], breaks)).tolist()
    ends = [*firsts[1:], len(theirs)]
    return [
        (int(theirs[first]), end - first, int(ours[first])) for first, end in zip(firsts, ends, strict=True)
    ]
