"""Block checksum: the reference definition. Pure; `_bytes_native.c` and `cuda.triton_blocks` are equal implementations.

Input is the payload of a block: its concatenated pieces, `length` bytes, as little-endian 64-bit words w, the last one
padded with zeros. All arithmetic is mod 2^64.

    key(i) = (i + 1) * KEY
    x      = w[i] ^ key(i)
    S      = sum over i of  low32(x) * high32(x) + w[i]
    h      = (S + length * LENGTH_KEY) ^ seed
    h     ^= h >> 37;  h *= FINAL_KEY;  h ^= h >> 32

S is a sum, so that vector lanes and GPU threads can process words in any order. The seed is derived from the block's
identity, so that a block in the wrong place is detected. Detects accidental corruption, not deliberate manipulation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvolt.transfer.memory.pieces import (
    WORD_BYTES,
    Buffer,
    Sums,
    byte_view,
    check_one_each,
    check_pieces,
    count_blocks,
    int64_view,
)

KEY = 0x9E3779B97F4A7C15
LENGTH_KEY = 0xC2B2AE3D27D4EB4F
FINAL_KEY = 0x165667919E3779F9

_LOW32 = np.uint64(0xFFFFFFFF)
_BATCH_BYTES = 1 << 20
"""Bytes of blocks per batch."""
_COLUMNS = 1 << 16
"""Words per block and step, so that numpy's temporaries stay in the cache."""


def checksum(data: Buffer, seed: int = 0) -> int:
    """Checksum of one payload."""
    payload = byte_view("data", data)
    padded = np.zeros((1, -(-len(payload) // WORD_BYTES) * WORD_BYTES), dtype=np.uint8)
    padded[0, : len(payload)] = payload
    return int(finish(_word_sums(padded.view("<u8")), len(payload), np.array([seed], dtype=np.uint64))[0])


def checksums(
    buffer: Buffer, offsets: Buffer, piece_bytes: int, pieces_per_block: int = 1, seeds: Buffer | None = None
) -> Sums:
    """Checksum of each block; `offsets` lists all pieces of one block before those of the next."""
    memory, places = byte_view("buffer", buffer), int64_view("offsets", offsets)
    check_pieces("offsets", places, piece_bytes, len(memory))
    num_blocks = count_blocks(len(places), piece_bytes, pieces_per_block)
    length = piece_bytes * pieces_per_block
    sums = np.empty(num_blocks, dtype=np.uint64)
    batch = max(_BATCH_BYTES // length, 1)
    payloads = np.zeros((min(batch, num_blocks), -(-length // WORD_BYTES) * WORD_BYTES), dtype=np.uint8)
    starts = range(0, length, piece_bytes)
    for first in range(0, num_blocks, batch):
        blocks = places[first * pieces_per_block : (first + batch) * pieces_per_block]
        rows = blocks.reshape(-1, pieces_per_block).tolist()
        for payload, row in zip(payloads, rows, strict=False):
            for start, place in zip(starts, row, strict=True):
                payload[start : start + piece_bytes] = memory[place : place + piece_bytes]
        sums[first : first + batch] = _word_sums(payloads[: len(rows)].view("<u8"))
    return finish(sums, length, seeds)


def finish(sums: Sums, length: int, seeds: Buffer | None = None) -> Sums:
    """Checksums from S of each block, all of `length` bytes."""
    h = sums + np.uint64(length * LENGTH_KEY % 2**64)
    if seeds is not None:
        numbers = int64_view("seeds", seeds)
        check_one_each("seeds", numbers, len(sums))
        h ^= numbers.view(np.uint64)
    h ^= h >> np.uint64(37)
    h *= np.uint64(FINAL_KEY)
    h ^= h >> np.uint64(32)
    return h


def _word_sums(words: npt.NDArray[np.uint64]) -> Sums:
    """S of each row of words."""
    sums = np.zeros(len(words), dtype=np.uint64)
    for start in range(0, words.shape[1], _COLUMNS):
        part = words[:, start : start + _COLUMNS]
        keys = np.arange(start + 1, start + 1 + part.shape[1], dtype=np.uint64) * np.uint64(KEY)
        mixed = part ^ keys
        sums += ((mixed & _LOW32) * (mixed >> np.uint64(32)) + part).sum(axis=1, dtype=np.uint64)
    return sums
