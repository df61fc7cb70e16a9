"""What every call about pieces of memory is held against before a byte moves. Pure; ValueError says what is wrong.

Offsets may come from a peer: nothing is read or written outside of a memory because of them.
"""

from __future__ import annotations

import mmap
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

WORD_BYTES = 8
_WHOLE_NUMBERS = frozenset("lLqQ")


def bytes_of(name: str, buffer: Buffer, *, is_written: bool = False) -> Bytes:
    """The same memory as an array."""
    view = _view_of(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    if is_written and view.readonly:
        raise ValueError(f"{name} is read-only")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def numbers_of(name: str, buffer: Buffer, *, is_written: bool = False) -> Numbers:
    """Numbers of 64 bits, or their bytes, as an array over the same memory. Anything else would be misread."""
    view = _view_of(buffer)
    is_numbers = view.itemsize == WORD_BYTES and view.format.lstrip("@=<") in _WHOLE_NUMBERS
    if not is_numbers and not (view.format == "B" and view.nbytes % WORD_BYTES == 0):
        raise ValueError(f"{name} must be whole numbers of 64 bits, not of the format {view.format}")
    return bytes_of(name, view, is_written=is_written).view(np.int64)


class Extent(NamedTuple):
    """Where a memory lies for this process."""

    start: int
    num_bytes: int

    @classmethod
    def of(cls, memory: Bytes) -> Extent:
        return cls(memory.__array_interface__["data"][0], len(memory))


def check_pieces(name: str, offsets: Numbers, piece_bytes: int, num_bytes: int) -> None:
    """All of them lie inside."""
    if piece_bytes < 1:
        raise ValueError(f"a piece has {piece_bytes} bytes: it must have one or more")
    outside = (offsets < 0) | (offsets > num_bytes - piece_bytes)
    if outside.any():
        index = int(outside.argmax())
        raise ValueError(
            f"{name}: piece {index} at offset {offsets[index]} with {piece_bytes} bytes lies outside of "
            f"{num_bytes} bytes"
        )


def check_as_many(dst_offsets: Numbers, src_offsets: Numbers) -> None:
    if len(dst_offsets) != len(src_offsets):
        raise ValueError(f"{len(src_offsets)} pieces cannot go to {len(dst_offsets)} places")


def check_apart(
    dst: Extent, dst_offsets: Numbers, src: Extent, src_offsets: Numbers, piece_bytes: int
) -> None:
    """No piece is written over one that is read: what arrived would depend on the order."""
    if dst.start >= src.start + src.num_bytes or src.start >= dst.start + dst.num_bytes:
        return
    places = dst_offsets + (dst.start - src.start)
    read = np.append(np.sort(src_offsets), np.iinfo(np.int64).max)
    nearest = read[np.searchsorted(read[:-1], places - piece_bytes, side="right")]
    if (nearest - piece_bytes < places).any():
        raise ValueError("dst and src overlap: a piece would be written over one that is read")


def count_blocks(num_pieces: int, piece_bytes: int, pieces_per_block: int) -> int:
    if pieces_per_block < 1 or num_pieces % pieces_per_block:
        raise ValueError(f"{num_pieces} pieces are not whole blocks of {pieces_per_block}")
    if pieces_per_block > 1 and piece_bytes % WORD_BYTES:
        raise ValueError(f"pieces of {piece_bytes} bytes: of several to a block each must be a multiple of 8")
    return num_pieces // pieces_per_block


def check_one_each(name: str, numbers: Numbers, num_blocks: int) -> None:
    if len(numbers) != num_blocks:
        raise ValueError(f"{name} has {len(numbers)} numbers for {num_blocks} blocks")


def _view_of(buffer: Buffer) -> memoryview:
    # Before Python 3.12 numpy's types do not say that an array is a buffer.
    return memoryview(cast("bytes", buffer))
