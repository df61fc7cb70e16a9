"""Copies pieces between memories and through sockets: the Python reference for `_bytes_native.c`, used if that was not
built.

Offsets, seeds and `out` are 64-bit numbers in any buffer. A rejected call (ValueError) has moved nothing. Destinations
of one call must not overlap each other; the owner of the blocks ensures that. Destinations that overlap a source of the
same call are rejected if both have the same address range; memory mapped twice is not recognised.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvolt.transfer.memory.checksum import checksums as defined_checksums
from kvolt.transfer.memory.pieces import (
    Buffer,
    Bytes,
    Extent,
    Numbers,
    byte_view,
    check_apart,
    check_as_many,
    check_one_each,
    check_pieces,
    count_blocks,
    int64_view,
)

_MAX_RANGES = 1024
"""Memory ranges per system call: IOV_MAX."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def copy(dst: Buffer, dst_offsets: Buffer, src: Buffer, src_offsets: Buffer, piece_bytes: int, /) -> None:
    """Copy pieces; pieces adjacent on both sides are copied together."""
    _copy(*_both_sides(dst, dst_offsets, src, src_offsets, piece_bytes), piece_bytes)


def checksums(
    src: Buffer,
    offsets: Buffer,
    piece_bytes: int,
    pieces_per_block: int,
    seeds: Buffer | None,
    out: Buffer,
    /,
) -> None:
    """Compute the checksum of each block into `out`; defined in `checksum`."""
    places = int64_view("offsets", offsets)
    check_pieces("offsets", places, piece_bytes, len(byte_view("src", src)))
    sums = _sums_for(places, piece_bytes, pieces_per_block, seeds, out)
    sums[:] = defined_checksums(src, places, piece_bytes, pieces_per_block, seeds).view(np.int64)


def copy_checked(
    dst: Buffer,
    dst_offsets: Buffer,
    src: Buffer,
    src_offsets: Buffer,
    piece_bytes: int,
    pieces_per_block: int,
    seeds: Buffer | None,
    out: Buffer,
    /,
) -> None:
    """Copy, then compute checksums of `dst`, so that a source that changes during the copy is detected."""
    sides = _both_sides(dst, dst_offsets, src, src_offsets, piece_bytes)
    sums = _sums_for(sides[1], piece_bytes, pieces_per_block, seeds, out)
    _copy(*sides, piece_bytes)
    sums[:] = defined_checksums(sides[0], sides[1], piece_bytes, pieces_per_block, seeds).view(np.int64)


def send(fd: int, src: Buffer, offsets: Buffer, piece_bytes: int, start: int, max_bytes: int, /) -> int:
    """Send the concatenated pieces from byte `start` on; return the number of bytes sent, at least one.

    BlockingIOError if the socket accepts none. A blocking socket blocks for the first byte only.
    """
    ranges = _ranges(byte_view("src", src), int64_view("offsets", offsets), piece_bytes, start, max_bytes)
    with _borrow_socket(fd) as sock:
        return sock.sendmsg(ranges, (), _NO_SIGNAL)


def receive(fd: int, dst: Buffer, offsets: Buffer, piece_bytes: int, start: int, max_bytes: int, /) -> int:
    """Receive into the pieces, like `send`; 0 if the peer has closed."""
    memory = byte_view("dst", dst, is_written=True)
    ranges = _ranges(memory, int64_view("offsets", offsets), piece_bytes, start, max_bytes)
    with _borrow_socket(fd) as sock:
        return sock.recvmsg_into(ranges)[0]


@contextmanager
def _borrow_socket(fd: int) -> Iterator[socket.socket]:
    """Socket object for a descriptor that it does not own."""
    if fd < 0:  # closed socket
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def _both_sides(
    dst: Buffer, dst_offsets: Buffer, src: Buffer, src_offsets: Buffer, piece_bytes: int
) -> tuple[Bytes, Numbers, Bytes, Numbers]:
    written, read = byte_view("dst", dst, is_written=True), byte_view("src", src)
    to, origins = int64_view("dst_offsets", dst_offsets), int64_view("src_offsets", src_offsets)
    check_as_many(to, origins)
    check_pieces("dst_offsets", to, piece_bytes, len(written))
    check_pieces("src_offsets", origins, piece_bytes, len(read))
    check_apart(Extent.of(written), to, Extent.of(read), origins, piece_bytes)
    return written, to, read, origins


def _sums_for(
    offsets: Numbers, piece_bytes: int, pieces_per_block: int, seeds: Buffer | None, out: Buffer
) -> Numbers:
    num_blocks = count_blocks(len(offsets), piece_bytes, pieces_per_block)
    if seeds is not None:
        check_one_each("seeds", int64_view("seeds", seeds), num_blocks)
    sums = int64_view("out", out, is_written=True)
    check_one_each("out", sums, num_blocks)
    return sums


def _copy(dst: Bytes, dst_offsets: Numbers, src: Bytes, src_offsets: Numbers, piece_bytes: int) -> None:
    for first, end in _runs(piece_bytes, dst_offsets, src_offsets):
        size = (end - first) * piece_bytes
        to, origin = int(dst_offsets[first]), int(src_offsets[first])
        dst[to : to + size] = src[origin : origin + size]


def _runs(piece_bytes: int, *offsets: Numbers) -> Iterator[tuple[int, int]]:
    """Yield start and end index of pieces that are adjacent in all offset arrays."""
    count = len(offsets[0])
    if count:
        breaks = np.logical_or.reduce([np.diff(side) != piece_bytes for side in offsets])
        ends = [*(np.flatnonzero(breaks) + 1).tolist(), count]
        yield from zip([0, *ends[:-1]], ends, strict=True)


def _ranges(
    memory: Bytes, offsets: Numbers, piece_bytes: int, start: int, max_bytes: int
) -> list[memoryview]:
    """Memory ranges of the bytes to transfer, at most `_MAX_RANGES`."""
    check_pieces("offsets", offsets, piece_bytes, len(memory))
    size = len(offsets) * piece_bytes
    if not 0 <= start < size or max_bytes < 1:
        raise ValueError(f"invalid range: {max_bytes} bytes from byte {start} of {size}")
    end = min(start + max_bytes, size)
    first, skipped = divmod(start, piece_bytes)
    touched = offsets[first : -(-end // piece_bytes)]
    view = memory.data
    ranges: list[memoryview] = []
    left = end - start
    for run_first, run_end in _runs(piece_bytes, touched):
        origin = int(touched[run_first]) + skipped
        length = min((run_end - run_first) * piece_bytes - skipped, left)
        ranges.append(view[origin : origin + length])
        left -= length
        skipped = 0
        if len(ranges) == _MAX_RANGES:
            break
    return ranges
