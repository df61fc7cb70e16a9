"""File path: copies blocks between a file slab and memory of this process, in steps.

Adjacent blocks in the file are one vectored system call, wherever they are in memory, in file order. Only the kernel
copies bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np

from kvolt.core.errors import KvoltError, TransferFailed, Unsupported
from kvolt.transfer.memory.pieces import Pieces
from kvolt.transfer.memory.slabs import Numbers, Slab
from kvolt.transfer.paths.lanes import FILE, MemoryKind
from kvolt.transfer.peer.progress import Progress
from kvolt.transfer.peer.read_op import ReadOp

_STEP_BYTES = 4 << 20
_MAX_RANGES = 1024
"""Ranges per system call: IOV_MAX."""


def move_blocks(progress: Progress, read_op: ReadOp, source: Slab, numbers: Numbers) -> None:
    """Move the numbered blocks of `source` in steps. Either `source` or the destination is a file."""
    other = source.kind if read_op.request.slab.kind is MemoryKind.FILE else read_op.request.slab.kind
    if other in (MemoryKind.FILE, MemoryKind.DEVICE):
        message = f"cannot copy between a file and {other} memory: read the blocks into host memory first"
        read_op.stop(Unsupported(message, feature=FILE))
        return
    pieces = read_op.source_pieces(numbers, source.block_bytes)
    if pieces is not None:
        mover = FileMover(read_op, source, pieces)
        read_op.set_mover(mover)
        progress.schedule(mover)


class FileMover:
    """Work and Mover of a ReadOp between a file and memory, in either direction."""

    def __init__(self, read_op: ReadOp, source: Slab, source_pieces: Pieces) -> None:
        self._read_op = read_op
        self._source = source
        self._source_pieces = source_pieces
        self._first = 0

    def stop(self) -> bool:
        return True  # nothing is in flight between steps

    def step(self) -> bool:
        if self._read_op.is_done:
            return False
        request, first = self._read_op.request, self._first
        count = min(
            max(_STEP_BYTES // self._source_pieces.bytes_per_block, 1), self._source_pieces.num_blocks - first
        )
        destination, pieces = request.into.slice(first, count), self._source_pieces.slice(first, count)
        try:
            if self._source.kind is MemoryKind.FILE:
                read_file(self._source, pieces, request.slab.memory, destination.offsets)
            else:
                write_file(request.slab, destination, self._source.memory, pieces.offsets)
        except KvoltError as error:
            self._read_op.stop(error)
            return False
        except ValueError as error:  # a slab was closed during the read
            self._read_op.stop(TransferFailed(f"cannot move blocks: {error}", path=FILE, reason="closed"))
            return False
        self._first += count
        self._read_op.on_blocks_moved(count)
        return self._first < self._source_pieces.num_blocks


def read_file(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers) -> None:
    """Read pieces of a file into memory at `offsets`. TransferFailed on an I/O error or a short file."""
    _move(slab, pieces, memory, offsets, is_read=True)


def write_file(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers) -> None:
    """Write pieces of a file from memory at `offsets`. TransferFailed on an I/O error."""
    _move(slab, pieces, memory, offsets, is_read=False)


def _move(slab: Slab, pieces: Pieces, memory: memoryview, offsets: Numbers, is_read: bool) -> None:
    if slab.descriptor is None:
        raise TransferFailed("the block file is closed", path=FILE, reason="closed")
    call: Callable[[int, list[memoryview], int], int] = os.preadv if is_read else os.pwritev
    for first, ranges in runs(pieces.offsets, offsets, pieces.piece_bytes):
        at, views = first, [memory[start:end] for start, end in ranges]
        while views:
            try:
                moved = call(slab.descriptor, views, at)
            except OSError as error:
                message = f"cannot {'read' if is_read else 'write'} the block file: {error.strerror}"
                raise TransferFailed(message, path=FILE, reason=error.strerror) from None
            if not moved:
                raise TransferFailed("the block file was truncated", path=FILE, reason="short")
            at += moved
            views = _remaining(views, moved)


def runs(file_offsets: Numbers, offsets: Numbers, size: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield each contiguous run of the file: its offset and its memory ranges, at most `_MAX_RANGES` at a time."""
    order = np.argsort(file_offsets, kind="stable")
    in_file, in_memory = file_offsets[order], offsets[order]
    has_gap = np.diff(in_file) != size
    # A memory range ends at a gap in memory or file; a run ends at a gap in the file.
    firsts = np.concatenate(([0], np.flatnonzero(has_gap | (np.diff(in_memory) != size)) + 1))
    starts = in_memory[firsts]
    ends = in_memory[np.concatenate((firsts[1:], [len(in_memory)])) - 1] + size
    begins_run = np.concatenate(([True], has_gap))[firsts]
    first_ranges = np.flatnonzero(begins_run).tolist()
    ranges = list(zip(starts.tolist(), ends.tolist(), strict=True))
    for first, end in zip(first_ranges, [*first_ranges[1:], len(ranges)], strict=True):
        at = int(in_file[firsts[first]])
        for part in range(first, end, _MAX_RANGES):
            some = ranges[part : min(part + _MAX_RANGES, end)]
            yield at, some
            at += sum(stop - start for start, stop in some)


def _remaining(views: list[memoryview], moved: int) -> list[memoryview]:
    """Views without their first `moved` bytes."""
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
