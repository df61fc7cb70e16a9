"""Packed SequenceHashes: little-endian u64 in one bytes object, the wire format."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from kvolt.core.ids import SequenceHash

HASH_BYTES = 8
HASHES_DTYPE = "<u8"
"""NumPy dtype of packed hashes."""

_MAX_STRUCTS = 256


@lru_cache(_MAX_STRUCTS)
def _struct_of(number: int) -> struct.Struct:
    return struct.Struct(f"<{number}Q")


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Raises struct.error for a value outside u64."""
    return _struct_of(len(hashes)).pack(*hashes)


def unpack_hashes(data: bytes) -> tuple[SequenceHash, ...]:
    """`data` must be a whole number of hashes."""
    return cast("tuple[SequenceHash, ...]", _struct_of(num_packed_hashes(data)).unpack(data))


def num_packed_hashes(data: bytes) -> int:
    return len(data) // HASH_BYTES


def check_packed_hashes(data: bytes) -> None:
    """Raise ValueError unless `data` is a whole number of hashes."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not a multiple of {HASH_BYTES}")
