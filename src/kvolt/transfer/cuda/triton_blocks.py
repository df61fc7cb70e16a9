# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"
"""Pieces of a device's memory moved and summed in one pass, by a Triton kernel. Imported only where a device is used.

A word is loaded once, and what was loaded is stored and summed: the checksum is of what has arrived, whatever happens
to the source meanwhile. Memory is any that the device reaches: its own, a peer's that is mapped (CUDA IPC), the host's
where it is pinned. Offsets stay on the host until they are checked: they may come from a peer.

What is moved must lie at multiples of 8 bytes and be multiples of 8; at multiples of 16 it is faster.
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
from kvolt.transfer.memory.piece_checks import (
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
    numbers_of,
)

_KEY = tl.constexpr(KEY)
_TILE_WORDS = 2048
_WARPS = 8
_PIECES_AT_ONCE = 8192
_PROGRAMS_PER_PROCESSOR = 4
"""So that enough bytes are on their way; more would only wait."""


# Not specialised: a transfer shall not wait for a compiler because its number of blocks is another one.
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
    """Offsets and sizes in units of so many words: the compiler sees from it how wide it may load and store."""
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
        # A sum mod 2^64 is the same in any order.
        tl.atomic_add(sums_ptr + piece // pieces_per_block, total.to(tl.int64, bitcast=True), sem="relaxed")


class Moved:
    """Work that a device has been given. What it reads and writes must stay until it is done."""

    def __init__(self, sums: Tensor, length: int, seeds: Numbers | None) -> None:
        """Before anything is launched: what it needs is there then, or nothing moves."""
        self._length = length
        self._seeds = seeds
        self._event = torch.cuda.Event() if sums.is_cuda else None
        self._on_device = sums
        self._sums = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True) if sums.is_cuda else sums

    def launched(self) -> None:
        """All of it."""
        if self._event is not None:
            self._sums.copy_(self._on_device, non_blocking=True)
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def checksums(self) -> Sums:
        """Of each block; waits until all is done."""
        if self._event is not None:
            self._event.synchronize()
        return finish(self._sums.numpy().view(np.uint64), self._length, self._seeds)


class DeviceBlocks:
    """Gives the work to a device, on its current stream. ValueError where a call is refused: nothing has moved then."""

    def __init__(self, device: torch.device, max_programs: int | None = None) -> None:
        """`max_programs`: how much of the device a transfer may take, for the sake of who computes meanwhile."""
        self._device = device
        self._max_programs = max_programs or _PROGRAMS_PER_PROCESSOR * _processors_of(device)

    def gather(
        self,
        out: Tensor,
        slab: Tensor,
        offsets: Buffer,
        piece_bytes: int,
        pieces_per_block: int = 1,
        seeds: Buffer | None = None,
    ) -> Moved:
        """Pieces of a slab to `out`, one after the other."""
        in_row = _in_row(numbers_of("offsets", offsets), piece_bytes)
        return self.copy(out, in_row, slab, offsets, piece_bytes, pieces_per_block, seeds)

    def scatter(
        self,
        slab: Tensor,
        offsets: Buffer,
        row: Tensor,
        piece_bytes: int,
        pieces_per_block: int = 1,
        seeds: Buffer | None = None,
    ) -> Moved:
        """Pieces that lie one after the other to their places in a slab."""
        in_row = _in_row(numbers_of("offsets", offsets), piece_bytes)
        return self.copy(slab, offsets, row, in_row, piece_bytes, pieces_per_block, seeds)

    def copy(
        self,
        dst: Tensor,
        dst_offsets: Buffer,
        src: Tensor,
        src_offsets: Buffer,
        piece_bytes: int,
        pieces_per_block: int = 1,
        seeds: Buffer | None = None,
    ) -> Moved:
        """See `bytes_python.copy_checked`."""
        to, origins = _own("dst_offsets", dst_offsets), _own("src_offsets", src_offsets)
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
    ) -> Moved:
        """Of blocks that stay where they are."""
        origins = _own("offsets", offsets)
        check_pieces("offsets", origins, piece_bytes, src.nbytes)
        return self._launch(None, (src, origins), piece_bytes, pieces_per_block, seeds)

    def _launch(
        self,
        dst: tuple[Tensor, Numbers] | None,
        src: tuple[Tensor, Numbers],
        piece_bytes: int,
        pieces_per_block: int,
        seeds: Buffer | None,
    ) -> Moved:
        num_pieces = len(src[1])
        num_blocks = count_blocks(num_pieces, piece_bytes, pieces_per_block)
        own_seeds = None if seeds is None else _own("seeds", seeds)
        if own_seeds is not None:
            check_one_each("seeds", own_seeds, num_blocks)
        sides = [src] if dst is None else [dst, src]
        unit_bytes = _unit_bytes(sides, piece_bytes)
        words = [_words(memory) for memory, _ in sides]
        with self._on_device():
            sums = torch.zeros(num_blocks, dtype=torch.int64, device=self._device)
            moved = Moved(sums, piece_bytes * pieces_per_block, own_seeds)
            try:
                # Part by part: while the device moves one the host prepares the next.
                num_blocks_at_once = max(_PIECES_AT_ONCE // pieces_per_block, 1)
                for first in range(0, num_blocks, num_blocks_at_once):
                    part = slice(first * pieces_per_block, (first + num_blocks_at_once) * pieces_per_block)
                    offsets = np.stack([each[part] for _, each in sides])
                    self._move(words, offsets, sums[first:], piece_bytes, pieces_per_block, unit_bytes)
                moved.launched()
            except BaseException:
                # Whoever is told that nothing comes of it may give the blocks to others.
                self._settle()
                raise
            return moved

    def _settle(self) -> None:
        """Nothing that was launched is under way any more."""
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
        """Of one memory, which is only summed, or from the second to the first; `offsets` has a row for each."""
        # Shifted: to divide takes numpy longer than the device needs for blocks of 64 KiB.
        places = self._uploaded(offsets >> (unit_bytes.bit_length() - 1))
        tiles_per_piece = triton.cdiv(piece_bytes, WORD_BYTES * _TILE_WORDS)
        num_tiles = offsets.shape[1] * tiles_per_piece
        _move_kernel[(min(num_tiles, self._max_programs),)](
            words[0],
            words[-1],
            places[0],
            places[-1],
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

    def _uploaded(self, numbers: Numbers) -> Tensor:
        """By way of pinned memory: from any other the copy would wait for what the stream does."""
        if self._device.type != "cuda":
            return torch.from_numpy(numbers)
        return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)


def _processors_of(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _own(name: str, numbers: Buffer) -> Numbers:
    """Nobody changes them after they were checked."""
    return numbers_of(name, numbers).copy()


def _in_row(offsets: Numbers, piece_bytes: int) -> Numbers:
    return np.arange(len(offsets), dtype=np.int64) * piece_bytes


def _extent(memory: Tensor) -> Extent:
    return Extent(memory.data_ptr(), memory.nbytes)


def _words(memory: Tensor) -> Tensor:
    if not memory.is_contiguous():
        raise ValueError("a memory that is moved from or to must be contiguous")
    as_bytes = memory.view(-1).view(torch.uint8)
    return as_bytes[: as_bytes.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)


def _unit_bytes(sides: list[tuple[Tensor, Numbers]], piece_bytes: int) -> int:
    """The largest that everything is a multiple of: 16 or 8."""
    for unit in (2 * WORD_BYTES, WORD_BYTES):
        starts = (
            memory.data_ptr() | int(np.bitwise_or.reduce(offsets, initial=0)) for memory, offsets in sides
        )
        if piece_bytes % unit == 0 and not any(start % unit for start in starts):
            return unit
    raise ValueError(f"a device moves pieces that lie at multiples of {WORD_BYTES} bytes, of as many bytes")
