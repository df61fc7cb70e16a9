"""Prompt tokens from hash ids: prompts share exactly the prefixes that the trace defines.

The tokens of a block are the output of SHAKE-128 over the seed and the block's id: stateless, equal in every process.
Scaling 32 random bits to the vocabulary is done for a whole prompt with a few operations on one long integer, since
per-token Python code would be too slow.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from hashlib import shake_128

from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

_LANE_BITS = 32
_LANE_BYTES = 4
_U64 = 2**64 - 1
_pack_block = struct.Struct("<cQQ").pack


def tokens_of(record: TraceRecord, vocabulary_size: int, seed: int = 0, index: int = 0) -> tuple[int, ...]:
    """Generate `input_length` tokens below `vocabulary_size`; equal hash ids at equal positions give equal tokens.

    Tokens of a record without hash ids depend on `index`, its position in the trace, so nothing is shared.
    """
    if not 0 < vocabulary_size <= 2**_LANE_BITS:
        raise ConfigError(
            f"the vocabulary size is {vocabulary_size}",
            key="vocabulary_size",
            remedy="must be above 0",
        )
    length = record.input_length
    if record.hash_ids:
        if len(record.hash_ids) * record.block_size < length:
            raise ConfigError(
                f"{len(record.hash_ids)} hash ids are too few for {length} tokens in blocks of {record.block_size}",
                key="hash_ids",
                remedy="use records checked by `read_trace`",
            )
        block_bytes = record.block_size * _LANE_BYTES
        noise = b"".join([_noise(b"b", seed, key, block_bytes) for key in record.hash_ids])
    else:
        noise = _noise(b"r", seed, index, length * _LANE_BYTES)
    return struct.unpack(f"<{length}I", _scaled(noise[: length * _LANE_BYTES], vocabulary_size))


def _noise(kind: bytes, seed: int, key: int, num_bytes: int) -> bytes:
    return shake_128(_pack_block(kind, seed & _U64, key & _U64)).digest(num_bytes)


def _scaled(noise: bytes, size: int) -> bytes:
    """Map each 32-bit number x to x * size >> 32, for all numbers at once.

    Products need 64 bits, so numbers at even and odd positions are multiplied separately.
    """
    low = _low_lanes(-(-len(noise) // 8))
    numbers = int.from_bytes(noise, "little")
    even = ((numbers & low) * size >> _LANE_BITS) & low
    odd = ((numbers >> _LANE_BITS) & low) * size & (low << _LANE_BITS)
    return (even | odd).to_bytes(len(noise), "little")


@lru_cache(maxsize=16)
def _low_lanes(num_pairs: int) -> int:
    """Mask of the lower half of each 64-bit lane."""
    return int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * num_pairs, "little")
