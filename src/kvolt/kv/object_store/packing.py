"""Lossless compression of blocks: zstd over byte planes. Pure.

The high bytes of KV values are similar to each other, the low ones are not, so grouping bytes by significance
compresses better. The width of values is unknown here; `best_width` determines it by trial.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from kvolt.core.errors import ConfigError

Bytes = bytes | memoryview

RAW = 0
"""Width value of uncompressed data."""
WIDTHS = (1, 2, 4)
_LEVEL = 1
_MAX_RATIO = 0.95
"""Maximum compressed share of the size; otherwise compression is not worth its time."""
_SAMPLE_BYTES = 1 << 18


def zstd() -> Any:
    """The zstandard module. ConfigError if it is not installed."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise ConfigError(
            "compression needs the zstandard package",
            key="tiers.object_compression",
            remedy="pip install 'kvolt[object]'",
        ) from None


def best_width(data: Bytes) -> int:
    """Width with the best compression of this block; RAW if none is worthwhile."""
    sample = bytes(data[: min(len(data), _SAMPLE_BYTES) // 4 * 4])
    sizes = {width: len(pack(sample, width)) for width in WIDTHS} if sample else {}
    best = min(sizes, key=sizes.__getitem__, default=RAW)
    return best if sizes and sizes[best] <= _MAX_RATIO * len(sample) else RAW


def pack(data: Bytes, width: int) -> bytes:
    """Compress; trailing bytes that are no whole value follow the planes unchanged."""
    whole = len(data) // width * width
    numbers = np.frombuffer(data, dtype=np.uint8, count=whole).reshape(-1, width)
    planes = b"".join((np.ascontiguousarray(numbers.T).tobytes(), bytes(data[whole:])))
    return bytes(zstd().ZstdCompressor(level=_LEVEL).compress(planes))


def unpack(packed: Bytes, width: int, num_bytes: int) -> bytes | None:
    """Decompress; None if the data is invalid or has another size."""
    library = zstd()
    try:
        # Checked before decompression, since stored data is untrusted.
        if width not in WIDTHS or library.get_frame_parameters(packed).content_size != num_bytes:
            return None
        planes = bytes(library.ZstdDecompressor().decompress(packed))
    except library.ZstdError:
        return None
    whole = num_bytes // width * width
    numbers = np.frombuffer(planes, dtype=np.uint8, count=whole).reshape(width, -1)
    return np.ascontiguousarray(numbers.T).tobytes() + planes[whole:]
