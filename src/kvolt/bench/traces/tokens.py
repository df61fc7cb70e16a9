"""From hash ids to tokens: prompts that share what the trace says they share, and nothing else.

Every block's tokens come from a hash function of unlimited output (SHAKE-128) over the seed and the block's id: no
state, no cache, the same in every process. Scaling 32 random bits to the vocabulary is done for a whole prompt at once,
as a few operations on one long integer, since a step of Python per token would cost more than an engine's.
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
    """Exactly `input_length` tokens below `vocabulary_size`; equal hash ids at equal positions give equal tokens.

    A record without hash ids gets tokens that depend on `index`, its place in the trace: nothing is shared.
    """
    if not 0 < vocabulary_size <= 2**_LANE_BITS:
        raise ConfigError(
            f"a vocabulary of {vocabulary_size} tokens",
            key="vocabulary_size",
            remedy="give the model's, above 0",
        )
    length = record.input_length
    if record.hash_ids:
        if len(record.hash_ids) * record.block_size < length:
            raise ConfigError(
                f"{len(record.hash_ids)} hash ids are too few for {length} tokens in blocks of {record.block_size}",
                key="hash_ids",
                remedy="give a record as `read_trace` checks it",
            )
        block_bytes = record.block_size * _LANE_BYTES
        noise = b"".join([_noise(b"b", seed, key, block_bytes) for key in record.hash_ids])
    else:
        noise = _noise(b"r", seed, index, length * _LANE_BYTES)
    return struct.unpack(f"<{length}I", _scaled(noise[: length * _LANE_BYTES], vocabulary_size))


def _noise(kind: bytes, seed: int, key: int, num_bytes: int) -> bytes:
    return shake_128(_pack_block(kind, seed & _U64, key & _U64)).digest(num_bytes)


def _scaled(noise: bytes, size: int) -> bytes:
    """Each 32-bit number x as x * size >> 32, for all numbers at once.

    Products need 64 bits, so numbers at even and at odd places are multiplied apart, each with the other's place free.
    """
    low = _low_lanes(-(-len(noise) // 8))
    numbers = int.from_bytes(noise, "little")
    even = ((numbers & low) * size >> _LANE_BITS) & low
    odd = ((numbers >> _LANE_BITS) & low) * size & (low << _LANE_BITS)
    return (even | odd).to_bytes(len(noise), "little")


@lru_cache(maxsize=16)
def _low_lanes(num_pairs: int) -> int:
    """Ones in the lower half of each 64 bits."""
    return int.from_bytes(b"\xff\xff\xff\xff\0\0\0\0" * num_pairs, "little")
