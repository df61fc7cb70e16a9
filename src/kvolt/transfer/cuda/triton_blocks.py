# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Copies pieces of device memory and computes their checksums in one pass of a Triton kernel.

Imported only if a device is used. Each word is loaded once, then stored and added to the checksum, so the checksum
matches the copied bytes even if the source changes. Works on any memory the device can access: its own, a peer's mapped
by CUDA IPC, pinned host memory. Offsets may come from a peer and are checked on the host.

Pieces must be 8-byte aligned and a multiple of 8 bytes; 16 is faster.
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from kvolt.transfer.memory.checksum import KEY, finish
from kvolt.transfer.memory.pieces import (
    WORD_BYTES,
    Buffer,
    Extent,
    Numbers,
    Sums,
    check_apart,
    check_as_many,
    check_one_each,
    check_pieces,
    count_blocks,
    int64_view,
)

_KEY = tl.constexpr(KEY)
_TILE_WORDS = 2048
_WARPS = 8
_BATCH_PIECES = 8192
_PROGRAMS_PER_PROCESSOR = 4
"""Enough to keep loads in flight; more would only queue."""


# Not specialized: a new number of blocks must not trigger a compilation.
@triton.jit(
    do_not_specialize=["num_tiles", "tiles_per_piece", "piece_units", "pieces_per_block"],
    do_not_specialize_on_alignment=["dst_at_ptr", "src_at_ptr", "sums_ptr"],
)
def _move_kernel(
    dst_ptr,
    src_ptr,
    dst_at_ptr,
    src_at_ptr,
    sums_ptr,
    num_tiles,
    tiles_per_piece,
    piece_units,
    pieces_per_block,
    UNIT: tl.constexpr,
    STORES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Offsets and sizes are in units of UNIT words, from which the compiler derives the load and store width."""
    piece_words = piece_units * UNIT
    columns = tl.arange(0, TILE)
    lane_keys = (columns + 1).to(tl.uint64) * _KEY
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        piece = tile // tiles_per_piece
        start = (tile % tiles_per_piece) * TILE
        inside = start + columns < piece_words
        src_at = tl.load(src_at_ptr + piece) * UNIT + start
        loaded = tl.load(src_ptr + src_at + columns, mask=inside, other=0)
        if STORES:
            dst_at = tl.load(dst_at_ptr + piece) * UNIT + start
            tl.store(dst_ptr + dst_at + columns, loaded, mask=inside)
        word = loaded.to(tl.uint64, bitcast=True)
        first = (piece % pieces_per_block).to(tl.int64) * piece_words + start
        mixed = word ^ (lane_keys + first.to(tl.uint64) * _KEY)
        terms = (mixed & 0xFFFFFFFF) * (mixed >> 32) + word
        total = tl.sum(tl.where(inside, terms, tl.zeros_like(terms)), 0)
        # The sum mod 2^64 does not depend on the order.
        tl.atomic_add(sums_ptr + piece // pieces_per_block, total.to(tl.int64, bitcast=True), sem="relaxed")


class PendingMove:
    """Launched work on a device. Its source and destination must stay valid until it is done."""

    def __init__(self, sums: Tensor, length: int, seeds: Numbers | None) -> None:
        """Allocates everything it needs before anything is launched."""
        self._length = length
        self._seeds = seeds
        self._event = torch.cuda.Event() if sums.is_cuda else None
        self._on_device = sums
        self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True) if sums.is_cuda else sums

    def record(self) -> None:
        """Enqueue the copy of the sums and the completion event."""
        if self._event is not None:
            self._sums.copy_(self._on_device, non_blocking=True)
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def checksums(self) -> Sums:
        """Checksums of each block; blocks until the work is done."""
        if self._event is not None:
            self._event.synchronize()
        return finish(self._sums.numpy().view(np.uint64), self._length, self._seeds)


class DeviceBlocks:
    """Launches copies on the current stream of a device. A rejected call raises ValueError and has moved nothing."""

    def __init__(self, device: torch.device, max_programs: int | None = None) -> None:
        """`max_programs`: limit on concurrent kernel programs, which leaves the rest of the device to computation."""
        self._device = device
        self._max_programs = max_programs or _PROGRAMS_PER_PROCESSOR * _processors_of(device)

    def copy(
        self,
        dst: Tensor,
        dst_offsets: Buffer,
        src: Tensor,
        src_offsets: Buffer,
        piece_bytes: int,
        pieces_per_block: int = 1,
        seeds: Buffer | None = None,
    ) -> PendingMove:
        """Like `block_bytes_python.copy_checked`."""
        to, origins = _private_copy("dst_offsets", dst_offsets), _private_copy("src_offsets", src_offsets)
        check_as_many(to, origins)
        check_pieces("dst_offsets", to, piece_bytes, dst.nbytes)
        check_pieces("src_offsets", origins, piece_bytes, src.nbytes)
        check_apart(_extent(dst), to, _extent(src), origins, piece_bytes)
        return self._launch((dst, to), (src, origins), piece_bytes, pieces_per_block, seeds)

    def checksums(
        self,
        src: Tensor,
        offsets: Buffer,
        piece_bytes: int,
        pieces_per_block: int = 1,
        seeds: Buffer | None = None,
    ) -> PendingMove:
        """Checksums of blocks in `src`."""
        origins = _private_copy("offsets", offsets)
        check_pieces("offsets", origins, piece_bytes, src.nbytes)
        return self._launch(None, (src, origins), piece_bytes, pieces_per_block, seeds)

    def _launch(
        self,
        dst: tuple[Tensor, Numbers] | None,
        src: tuple[Tensor, Numbers],
        piece_bytes: int,
        pieces_per_block: int,
        seeds: Buffer | None,
    ) -> PendingMove:
        num_pieces = len(src[1])
        num_blocks = count_blocks(num_pieces, piece_bytes, pieces_per_block)
        own_seeds = None if seeds is None else _private_copy("seeds", seeds)
        if own_seeds is not None:
            check_one_each("seeds", own_seeds, num_blocks)
        sides = [src] if dst is None else [dst, src]
        unit_bytes = _unit_bytes(sides, piece_bytes)
        words = [_words(memory) for memory, _ in sides]
        with self._on_device():
            sums = torch.zeros(num_blocks, dtype=torch.int64, device=self._device)
            moved = PendingMove(sums, piece_bytes * pieces_per_block, own_seeds)
            try:
                # In parts, so that the host prepares the next one while the device works.
                batch_blocks = max(_BATCH_PIECES // pieces_per_block, 1)
                for first in range(0, num_blocks, batch_blocks):
                    part = slice(first * pieces_per_block, (first + batch_blocks) * pieces_per_block)
                    offsets = np.stack([each[part] for _, each in sides])
                    self._move(words, offsets, sums[first:], piece_bytes, pieces_per_block, unit_bytes)
                moved.record()
            except BaseException:
                # The caller may reuse the blocks after an error.
                self._synchronize()
                raise
            return moved

    def _synchronize(self) -> None:
        """Wait for all launched work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _move(
        self,
        words: list[Tensor],
        offsets: Numbers,
        sums: Tensor,
        piece_bytes: int,
        pieces_per_block: int,
        unit_bytes: int,
    ) -> None:
        """Copy from the second memory to the first, or only sum a single one. `offsets` has one row per memory."""
        # Shift instead of divide: numpy's division takes longer than the device needs for 64 KiB blocks.
        unit_offsets = self._upload(offsets >> (unit_bytes.bit_length() - 1))
        tiles_per_piece = triton.cdiv(piece_bytes, WORD_BYTES * _TILE_WORDS)
        num_tiles = offsets.shape[1] * tiles_per_piece
        _move_kernel[(min(num_tiles, self._max_programs),)](
            words[0],
            words[-1],
            unit_offsets[0],
            unit_offsets[-1],
            sums,
            num_tiles,
            tiles_per_piece,
            piece_bytes // unit_bytes,
            pieces_per_block,
            UNIT=unit_bytes // WORD_BYTES,
            STORES=len(words) > 1,
            TILE=_TILE_WORDS,
            num_warps=_WARPS,
        )

    def _on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()

    def _upload(self, numbers: Numbers) -> Tensor:
        """Copy to the device from pinned memory; from pageable memory the copy would synchronize with the stream."""
        if self._device.type != "cuda":
            return torch.from_numpy(numbers)
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)


def _processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _private_copy(name: str, numbers: Buffer) -> Numbers:
    """Copy of the numbers, so that they cannot change after the checks."""
    return int64_view(name, numbers).copy()


def _extent(memory: Tensor) -> Extent:
    return Extent(memory.data_ptr(), memory.nbytes)


def _words(memory: Tensor) -> Tensor:
    if not memory.is_contiguous():
        raise ValueError("source and destination must be contiguous")
    as_bytes = memory.view(-1).view(torch.uint8)
    return as_bytes[: as_bytes.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)


def _unit_bytes(sides: list[tuple[Tensor, Numbers]], piece_bytes: int) -> int:
    """Largest common unit: 16 or 8 bytes."""
    for unit in (2 * WORD_BYTES, WORD_BYTES):
        starts = (
            memory.data_ptr() | int(np.bitwise_or.reduce(offsets, initial=0)) for memory, offsets in sides
        )
        if piece_bytes % unit == 0 and not any(start % unit for start in starts):
            return unit
    raise ValueError(f"pieces must be aligned to and a multiple of {WORD_BYTES} bytes on a device")
