"""Pieces of blocks in memory, and argument checks before any byte moves. Pure. Failed checks raise ValueError.

Offsets may come from a peer, so they are untrusted.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Buffer = bytes | bytearray | memoryview | mmap.mmap | npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
Sums = npt.NDArray[np.uint64]

WORD_BYTES = 8
_WHOLE_NUMBERS = frozenset("lLqQ")


@dataclass(frozen=True, slots=True)
class Pieces:
    """Location of blocks in a memory: equal pieces, all of one block before those of the next, usually one per
    block."""

    offsets: Numbers
    piece_bytes: int
    per_block: int = 1

    @property
    def num_blocks(self) -> int:
        return len(self.offsets) // self.per_block

    @property
    def bytes_per_block(self) -> int:
        return self.piece_bytes * self.per_block

    def contiguous(self) -> Pieces:
        """The same pieces laid out contiguously from offset 0."""
        offsets = np.arange(len(self.offsets), dtype=np.int64) * self.piece_bytes
        return Pieces(offsets, self.piece_bytes, self.per_block)

    def slice(self, first: int, count: int) -> Pieces:
        """Pieces of `count` blocks from block `first` on."""
        start, end = first * self.per_block, (first + count) * self.per_block
        return Pieces(self.offsets[start:end], self.piece_bytes, self.per_block)


def byte_view(name: str, buffer: Buffer, *, is_written: bool = False) -> Bytes:
    """Byte array over the same memory."""
    view = _view_of(buffer)
    if not view.c_contiguous:
        raise ValueError(f"{name} is not contiguous")
    if is_written and view.readonly:
        raise ValueError(f"{name} is read-only")
    return np.frombuffer(view, dtype=np.uint8) if view.nbytes else np.empty(0, dtype=np.uint8)


def int64_view(name: str, buffer: Buffer, *, is_written: bool = False) -> Numbers:
    """int64 array over a buffer of 64-bit integers or their bytes; other formats are rejected."""
    view = _view_of(buffer)
    is_numbers = view.itemsize == WORD_BYTES and view.format.lstrip("@=<") in _WHOLE_NUMBERS
    if not is_numbers and not (view.format == "B" and view.nbytes % WORD_BYTES == 0):
        raise ValueError(f"{name} must be 64-bit integers, not format {view.format}")
    return byte_view(name, view, is_written=is_written).view(np.int64)


class Extent(NamedTuple):
    """Address range of a memory in this process."""

    start: int
    num_bytes: int

    @classmethod
    def of(cls, memory: Bytes) -> Extent:
        return cls(memory.__array_interface__["data"][0], len(memory))


def check_pieces(name: str, offsets: Numbers, piece_bytes: int, num_bytes: int) -> None:
    """Check that all pieces are inside the memory."""
    if piece_bytes < 1:
        raise ValueError(f"piece size must be at least one byte, not {piece_bytes}")
    outside = (offsets < 0) | (offsets > num_bytes - piece_bytes)
    if outside.any():
        index = int(outside.argmax())
        raise ValueError(
            f"{name}: piece {index} at offset {offsets[index]} with {piece_bytes} bytes lies outside of "
            f"{num_bytes} bytes"
        )


def check_as_many(dst_offsets: Numbers, src_offsets: Numbers) -> None:
    if len(dst_offsets) != len(src_offsets):
        raise ValueError(f"{len(src_offsets)} source pieces for {len(dst_offsets)} destination pieces")


def check_apart(
    dst: Extent, dst_offsets: Numbers, src: Extent, src_offsets: Numbers, piece_bytes: int
) -> None:
    """Check that no destination overlaps a source, since the result would depend on the order."""
    if dst.start >= src.start + src.num_bytes or src.start >= dst.start + dst.num_bytes:
        return
    places = dst_offsets + (dst.start - src.start)
    read = np.append(np.sort(src_offsets), np.iinfo(np.int64).max)
    nearest = read[np.searchsorted(read[:-1], places - piece_bytes, side="right")]
    if (nearest - piece_bytes < places).any():
        raise ValueError("dst and src overlap: a piece would be written over one that is read")


def count_blocks(num_pieces: int, piece_bytes: int, pieces_per_block: int) -> int:
    if pieces_per_block < 1 or num_pieces % pieces_per_block:
        raise ValueError(f"{num_pieces} pieces are not a multiple of {pieces_per_block} pieces per block")
    if pieces_per_block > 1 and piece_bytes % WORD_BYTES:
        raise ValueError(f"piece size {piece_bytes} must be a multiple of 8 with several pieces per block")
    return num_pieces // pieces_per_block


def check_one_each(name: str, numbers: Numbers, num_blocks: int) -> None:
    if len(numbers) != num_blocks:
        raise ValueError(f"{name} has {len(numbers)} numbers for {num_blocks} blocks")


def _view_of(buffer: Buffer) -> memoryview:
    # Before Python 3.12 numpy's types do not say that an array is a buffer.
    return memoryview(cast("bytes", buffer))
