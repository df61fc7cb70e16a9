"""The path to and from a file: blocks of a file slab into memory of this process, and back. A part at a turn.

Runs of blocks that follow each other in the file are one call of the kernel's, wherever they lie in memory, and are
taken in the order of the file. Nothing is copied here but by the kernel.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kvolt.core.errors import KvoltError, TransferFailed, Unsupported
from kvolt.transfer.memory.slabs import Numbers, Pieces, Slab
from kvolt.transfer.paths.lanes import MemoryKind

if TYPE_CHECKING:
    from kvolt.transfer.peer.progress import Progress
    from kvolt.transfer.peer.read_op import Reading

FILE = "file"
"""The name of the path: nothing leaves the process but to its own file, so nothing is checked."""
_TURN_BYTES = 4 << 20
_MOST_RANGES = 1024
"""In one call: the kernel's IOV_MAX."""


def move(progress: Progress, reading: Reading, source: Slab, numbers: Numbers) -> None:
    """The source's blocks with these numbers, turn by turn. It or the destination is a file."""
    other = source.kind if reading.wanted.slab.kind is MemoryKind.FILE else reading.wanted.slab.kind
    if other in (MemoryKind.FILE, MemoryKind.DEVICE):
        told = f"blocks do not go between a file and a {other}: read them into memory of the host first"
        reading.stop(Unsupported(told, feature=FILE))
        return
    there = reading.pieces_there(numbers, source.block_bytes)
    if there is not None:
        mover = FileMove(reading, source, there)
        reading.moved_by(mover)
        progress.work(mover)


class FileMove:
    """Work, and the Mover of a Reading: between a file and memory, whichever is the source."""

    def __init__(self, reading: Reading, source: Slab, there: Pieces) -> None:
        """`there`: where the blocks lie in the source."""
        self._reading = reading
        self._source = source
        self._there = there
        self._first = 0

    def stop(self) -> bool:
        return True  # between two turns nothing is under way

    def turn(self) -> bool:
        if self._reading.is_over:
            return False
        wanted, first = self._reading.wanted, self._first
        count = min(max(_TURN_BYTES // self._there.bytes_per_block, 1), self._there.num_blocks - first)
        here, there = wanted.into.part(first, count), self._there.part(first, count)
        try:
            if self._source.kind is MemoryKind.FILE:
                read_file(self._source, there, wanted.slab.memory, here.offsets)
            else:
                write_file(wanted.slab, here, self._source.memory, there.offsets)
        except KvoltError as error:
            self._reading.stop(error)
            return False
        except ValueError as error:  # a slab that was closed too early
            self._reading.stop(TransferFailed(f"blocks cannot be moved: {error}", path=FILE, reason="closed"))
            return False
        self._first += count
        self._reading.landed(count)
        return self._first < self._there.num_blocks


def read_file(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers) -> None:
    """Into memory at these offsets. TransferFailed where the file has them not."""
    _move(slab, pieces, memory, offsets, is_read=True)


def write_file(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers) -> None:
    """From memory at these offsets. TransferFailed where the file cannot take them."""
    _move(slab, pieces, memory, offsets, is_read=False)


def _move(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers, is_read: bool) -> None:
    if slab.descriptor is None:
        raise TransferFailed("the file of these blocks is closed", path=FILE, reason="closed")
    call: Callable[[int, list[memoryview], int], int] = os.preadv if is_read else os.pwritev
    for first, ranges in runs(pieces.offsets, offsets, pieces.piece_bytes):
        at, views = first, [memory[start:end] for start, end in ranges]
        while views:
            try:
                moved = call(slab.descriptor, views, at)
            except OSError as error:
                told = f"a file of blocks cannot be {'read' if is_read else 'written'}: {error.strerror}"
                raise TransferFailed(told, path=FILE, reason=error.strerror) from None
            if not moved:
                raise TransferFailed("a file of blocks is shorter than it was", path=FILE, reason="short")
            at += moved
            views = _after(views, moved)


def runs(file_offsets: Numbers, offsets: Numbers, size: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """What follows each other in the file: from where on, and the ranges of memory that it is, in this order."""
    order = np.argsort(file_offsets, kind="stable")
    there, here = file_offsets[order], offsets[order]
    is_apart = np.diff(there) != size
    # A range of memory ends where memory or file goes on elsewhere; a run, where the file does.
    firsts = np.concatenate(([0], np.flatnonzero(is_apart | (np.diff(here) != size)) + 1))
    starts = here[firsts]
    ends = here[np.concatenate((firsts[1:], [len(here)])) - 1] + size
    begins_run = np.concatenate(([True], is_apart))[firsts]
    first_ranges = np.flatnonzero(begins_run).tolist()
    ranges = list(zip(starts.tolist(), ends.tolist(), strict=True))
    for first, end in zip(first_ranges, [*first_ranges[1:], len(ranges)], strict=True):
        at = int(there[firsts[first]])
        for part in range(first, end, _MOST_RANGES):
            some = ranges[part : min(part + _MOST_RANGES, end)]
            yield at, some
            at += sum(stop - start for start, stop in some)


def _after(views: list[memoryview], moved: int) -> list[memoryview]:
    """What is left when the first bytes have moved."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
