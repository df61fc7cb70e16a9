"""SequenceHashes as bytes, eight little-endian ones each: how they travel and are counted, without an object each."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import cast

from kvolt.core.ids import SequenceHash

HASH_BYTES = 8
HASHES_DTYPE = "<u8"
"""The same in NumPy's words."""

_MOST_KINDS = 256


@lru_cache(_MOST_KINDS)
def _of(number: int) -> struct.Struct:
    return struct.Struct(f"<{number}Q")


def packed(hashes: Sequence[int]) -> bytes:
    """struct.error for what has no place in 64 bits without a sign."""
    return _of(len(hashes)).pack(*hashes)


def unpacked(data: bytes) -> tuple[SequenceHash, ...]:
    """Of bytes that hold whole hashes."""
    return cast("tuple[SequenceHash, ...]", _of(num_packed(data)).unpack(data))


def num_packed(data: bytes) -> int:
    return len(data) // HASH_BYTES


def check_packed(data: bytes) -> None:
    """ValueError where they are no whole hashes."""
    if len(data) % HASH_BYTES:
        raise ValueError(f"{len(data)} bytes are not hashes of {HASH_BYTES} bytes each")
