"""Bytes of pieces from memory to memory and through sockets, in Python: what `block_bytes` does, and what runs where no
compiler was. `_bytes_native.c` is the same in C.

Offsets, seeds and `out` are numbers of 64 bits in any buffer: arrays, or their bytes. A call that is refused
(ValueError) has moved nothing. Destinations of one call must not overlap each other: whoever owns the blocks gives each
out once. A destination over a source of the same call is refused where both lie in memory that this process sees at one
address; memory that is mapped twice looks like two.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvolt.transfer.memory.checksum import checksums as defined_checksums
from kvolt.transfer.memory.piece_checks import (
    Buffer,
    Bytes,
    Extent,
    Numbers,
    bytes_of,
    check_apart,
    check_as_many,
    check_one_each,
    check_pieces,
    count_blocks,
    numbers_of,
)

_MAX_RANGES = 1024
"""Of memory in one system call: what Linux takes."""
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


def copy(dst: Buffer, dst_offsets: Buffer, src: Buffer, src_offsets: Buffer, piece_bytes: int, /) -> None:
    """Pieces to their places; neighbours on both sides at once."""
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
    """See `checksum`; one for each block into `out`."""
    places = numbers_of("offsets", offsets)
    check_pieces("offsets", places, piece_bytes, len(bytes_of("src", src)))
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
    """`copy`, and checksums of what has arrived in `dst`: a source that changes meanwhile does not go unnoticed."""
    sides = _both_sides(dst, dst_offsets, src, src_offsets, piece_bytes)
    sums = _sums_for(sides[1], piece_bytes, pieces_per_block, seeds, out)
    _copy(*sides, piece_bytes)
    sums[:] = defined_checksums(sides[0], sides[1], piece_bytes, pieces_per_block, seeds).view(np.int64)


def send(fd: int, src: Buffer, offsets: Buffer, piece_bytes: int, start: int, most: int, /) -> int:
    """Bytes of the pieces, one after the other, from the one numbered `start` on: how many a socket took, one or more.
    BlockingIOError when it took none. Of a socket that blocks it waits for the first only."""
    ranges = _ranges(bytes_of("src", src), numbers_of("offsets", offsets), piece_bytes, start, most)
    with _borrowed(fd) as link:
        return link.sendmsg(ranges, (), _NO_SIGNAL)


def receive(fd: int, dst: Buffer, offsets: Buffer, piece_bytes: int, start: int, most: int, /) -> int:
    """As `send`, from a socket into the pieces; 0 when the peer has closed."""
    memory = bytes_of("dst", dst, is_written=True)
    ranges = _ranges(memory, numbers_of("offsets", offsets), piece_bytes, start, most)
    with _borrowed(fd) as link:
        return link.recvmsg_into(ranges)[0]


@contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """Somebody else's socket."""
    if fd < 0:  # of one that was closed
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    link = socket.socket(fileno=fd)
    try:
        yield link
    finally:
        link.detach()


def _both_sides(
    dst: Buffer, dst_offsets: Buffer, src: Buffer, src_offsets: Buffer, piece_bytes: int
) -> tuple[Bytes, Numbers, Bytes, Numbers]:
    written, read = bytes_of("dst", dst, is_written=True), bytes_of("src", src)
    to, origins = numbers_of("dst_offsets", dst_offsets), numbers_of("src_offsets", src_offsets)
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
        check_one_each("seeds", numbers_of("seeds", seeds), num_blocks)
    sums = numbers_of("out", out, is_written=True)
    check_one_each("out", sums, num_blocks)
    return sums


def _copy(dst: Bytes, dst_offsets: Numbers, src: Bytes, src_offsets: Numbers, piece_bytes: int) -> None:
    for first, end in _runs(piece_bytes, dst_offsets, src_offsets):
        size = (end - first) * piece_bytes
        to, origin = int(dst_offsets[first]), int(src_offsets[first])
        dst[to : to + size] = src[origin : origin + size]


def _runs(piece_bytes: int, *offsets: Numbers) -> Iterator[tuple[int, int]]:
    """First and end of pieces that follow each other on all sides."""
    count = len(offsets[0])
    if count:
        breaks = np.logical_or.reduce([np.diff(side) != piece_bytes for side in offsets])
        ends = [*(np.flatnonzero(breaks) + 1).tolist(), count]
        yield from zip([0, *ends[:-1]], ends, strict=True)


def _ranges(memory: Bytes, offsets: Numbers, piece_bytes: int, start: int, most: int) -> list[memoryview]:
    """Of memory, as many as a system call takes."""
    check_pieces("offsets", offsets, piece_bytes, len(memory))
    size = len(offsets) * piece_bytes
    if not 0 <= start < size or most < 1:
        raise ValueError(f"there are no {most} bytes from byte {start} on of {size}")
    end = min(start + most, size)
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
