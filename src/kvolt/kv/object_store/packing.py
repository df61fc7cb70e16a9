"""Blocks made smaller, without loss: zstd over planes of their bytes. Pure.

Numbers of a few bytes each, as KV is: their high bytes are much alike, the low ones not at all. Those of one kind
together take less room than mixed. How many bytes a number has is not known here: `best_width` tries.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvolt.core.errors import ConfigError

Bytes = bytes | memoryview

RAW = 0
"""The width of what is not packed."""
WIDTHS = (1, 2, 4)
_LEVEL = 1
_WORTH = 0.95
"""What packed bytes may take of plain ones: else it is not worth the time."""
_SAMPLE_BYTES = 1 << 18


def zstd() -> Any:
    """ConfigError where the library is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "compression needs the zstandard package",
            key="tiers.object_compression",
            remedy="pip install 'kvolt[object]'",
        ) from None


def best_width(data: Bytes) -> int:
    """By which a block like this takes least room; RAW where none is worth it."""
    sample = bytes(data[: min(len(data), _SAMPLE_BYTES) // 4 * 4])
    sizes = {width: len(pack(sample, width)) for width in WIDTHS} if sample else {}
    best = min(sizes, key=sizes.__getitem__, default=RAW)
    return best if sizes and sizes[best] <= _WORTH * len(sample) else RAW


def pack(data: Bytes, width: int) -> bytes:
    """The bytes at the end that are no whole number stay behind the planes as they are."""
    whole = len(data) // width * width
    numbers = np.frombuffer(data, dtype=np.uint8, count=whole).reshape(-1, width)
    planes = b"".join((np.ascontiguousarray(numbers.T).tobytes(), bytes(data[whole:])))
    return bytes(zstd().ZstdCompressor(level=_LEVEL).compress(planes))


def unpack(packed: Bytes, width: int, num_bytes: int) -> bytes | None:
    """What was packed; None where that is not so many bytes, or cannot be."""
    library = zstd()
    try:
        # Before anything is made of it: what is read may be anybody's.
        if width not in WIDTHS or library.get_frame_parameters(packed).content_size != num_bytes:
            return None
        planes = bytes(library.ZstdDecompressor().decompress(packed))
    except library.ZstdError:
        return None
    whole = num_bytes // width * width
    numbers = np.frombuffer(planes, dtype=np.uint8, count=whole).reshape(width, -1)
    return np.ascontiguousarray(numbers.T).tobytes() + planes[whole:]
