"""The checksum that blocks travel with: its one definition. Pure; `_bytes_native.c` and `cuda_blocks` do the same.

Of a block's payload: its pieces one after the other, `length` bytes, as little-endian words w of 64 bits, the last one
filled up with zero bytes. All arithmetic is mod 2^64.

    key(i) = (i + 1) * KEY
    x      = w[i] ^ key(i)
    S      = sum over i of  low32(x) * high32(x) + w[i]
    h      = (S + length * LENGTH_KEY) ^ seed
    h     ^= h >> 37;  h *= FINAL_KEY;  h ^= h >> 32

A sum, so that lanes of a vector unit and threads of a GPU may take words in any order. The seed is made of a block's
names, so that a block in another's place is found too. It finds accidents; it does not withstand who means harm.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvolt.transfer.memory.piece_checks import (
    WORD_BYTES,
    Buffer,
    Sums,
    bytes_of,
    check_one_each,
    check_pieces,
    count_blocks,
    numbers_of,
)

KEY = 0x9E3779B97F4A7C15
LENGTH_KEY = 0xC2B2AE3D27D4EB4F
FINAL_KEY = 0x165667919E3779F9

_LOW32 = np.uint64(0xFFFFFFFF)
_BATCH_BYTES = 1 << 20
"""Of blocks that are summed together."""
_COLUMNS = 1 << 16
"""Words of a block that are looked at together: what numpy makes of them on the way stays in the cache."""


def checksum(data: Buffer, seed: int = 0) -> int:
    """Of one payload."""
    payload = bytes_of("data", data)
    padded = np.zeros((1, -(-len(payload) // WORD_BYTES) * WORD_BYTES), dtype=np.uint8)
    padded[0, : len(payload)] = payload
    return int(finish(_word_sums(padded.view("<u8")), len(payload), np.array([seed], dtype=np.uint64))[0])


def checksums(
    buffer: Buffer, offsets: Buffer, piece_bytes: int, pieces_per_block: int = 1, seeds: Buffer | None = None
) -> Sums:
    """Of each block: pieces at these offsets, all of one block before those of the next."""
    memory, places = bytes_of("buffer", buffer), numbers_of("offsets", offsets)
    check_pieces("offsets", places, piece_bytes, len(memory))
    num_blocks = count_blocks(len(places), piece_bytes, pieces_per_block)
    length = piece_bytes * pieces_per_block
    sums = np.empty(num_blocks, dtype=np.uint64)
    at_once = max(_BATCH_BYTES // length, 1)
    payloads = np.zeros((min(at_once, num_blocks), -(-length // WORD_BYTES) * WORD_BYTES), dtype=np.uint8)
    starts = range(0, length, piece_bytes)
    for first in range(0, num_blocks, at_once):
        blocks = places[first * pieces_per_block : (first + at_once) * pieces_per_block]
        rows = blocks.reshape(-1, pieces_per_block).tolist()
        for payload, row in zip(payloads, rows, strict=False):
            for start, place in zip(starts, row, strict=True):
                payload[start : start + piece_bytes] = memory[place : place + piece_bytes]
        sums[first : first + at_once] = _word_sums(payloads[: len(rows)].view("<u8"))
    return finish(sums, length, seeds)


def finish(sums: Sums, length: int, seeds: Buffer | None = None) -> Sums:
    """Checksums from S of each block, all of one length."""
    h = sums + np.uint64(length * LENGTH_KEY % 2**64)
    if seeds is not None:
        numbers = numbers_of("seeds", seeds)
        check_one_each("seeds", numbers, len(sums))
        h ^= numbers.view(np.uint64)
    h ^= h >> np.uint64(37)
    h *= np.uint64(FINAL_KEY)
    h ^= h >> np.uint64(32)
    return h


def _word_sums(words: npt.NDArray[np.uint64]) -> Sums:
    """S of each row."""
    sums = np.zeros(len(words), dtype=np.uint64)
    for start in range(0, words.shape[1], _COLUMNS):
        part = words[:, start : start + _COLUMNS]
        keys = np.arange(start + 1, start + 1 + part.shape[1], dtype=np.uint64) * np.uint64(KEY)
        mixed = part ^ keys
        sums += ((mixed & _LOW32) * (mixed >> np.uint64(32)) + part).sum(axis=1, dtype=np.uint64)
    return sums
