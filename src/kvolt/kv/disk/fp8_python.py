"""FP8 encoding in numpy: the reference for `_fp8_native.c`, bit-identical and slower. Pure.

A piece is an array of float32, float16 or bfloat16 values. Encoded, it has one byte per value (e4m3: sign, four
exponent bits, three mantissa bits; the maximum is 448, NaN is 0x7f), followed by one byte per group of 64 values: the
exponent of a power-of-two scale. Values are rounded to nearest, ties to even.

- The scale maps the largest finite value of the group just below 448. Values of at least 1/14,000 of the largest have a
  relative error of at most 1/16; smaller ones an absolute error of at most 1/230,000 of the largest.
- Scales are powers of two, so re-encoding decoded values is exact. Another scale would not reduce the error, since e4m3
  has its precision per value, not per group.
- Zeros keep their sign. Infinities and NaN become NaN. Results beyond the largest finite value of the dtype are
clamped.
  Magnitudes below 2^-125 become zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = ("float32", "float16", "bfloat16")
"""Dtypes by index."""
WIDTHS = (4, 2, 2)
GROUP = 64

_MAGNITUDE, _INFINITE, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)
_LARGEST = tuple(map(np.uint32, (0x7F7FFFFF, 0x477FE000, 0x7F7F0000)))
_NARROW_NAN = (np.uint32(0x7FC00000), np.uint16(0x7E00), np.uint16(0x7FC0))
_LEAST_POWER = np.uint32(0x3C800000)
"""2^-6, the smallest normal value."""
_ALMOST_TWO = np.uint32(0x17FFFF)
"""Carries mantissas that round above 1.75 into the next power of two."""
_LEAST_TOP = 20
"""Keeps scales and products normal."""

Numbers = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]


def encode(
    dst: memoryview,
    dst_offsets: Numbers,
    src: memoryview,
    src_offsets: Numbers,
    num_values: int,
    kind: int,
) -> None:
    """Encode pieces of `num_values` values. ValueError if a piece is out of range."""
    sizes = _check(dst, dst_offsets, src, src_offsets, num_values, kind)
    for to, start in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
        data = np.frombuffer(src, dtype=np.uint8, count=sizes[0], offset=start)
        dst[to : to + sizes[1]] = _encoded(_widen(data, kind), num_values).tobytes()


def decode(
    dst: memoryview,
    dst_offsets: Numbers,
    src: memoryview,
    src_offsets: Numbers,
    num_values: int,
    kind: int,
) -> None:
    """Decode pieces of `num_values` values. ValueError if a piece is out of range."""
    sizes = _check(src, src_offsets, dst, dst_offsets, num_values, kind)
    for to, start in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
        data = np.frombuffer(src, dtype=np.uint8, count=sizes[1], offset=start)
        dst[to : to + sizes[0]] = _narrow(_decoded(data, num_values), kind).tobytes()


def packed_bytes(num_values: int) -> int:
    """Encoded size of a piece."""
    return num_values + -(-num_values // GROUP)


def _check(
    packed: memoryview,
    packed_offsets: Numbers,
    wide: memoryview,
    wide_offsets: Numbers,
    count: int,
    kind: int,
) -> tuple[int, int]:
    if count < 1 or not 0 <= kind < len(KINDS):
        raise ValueError(f"invalid piece: {count} values of kind {kind}")
    if len(packed_offsets) != len(wide_offsets):
        raise ValueError(f"piece counts differ: {len(wide_offsets)} and {len(packed_offsets)}")
    sizes = count * WIDTHS[kind], packed_bytes(count)
    for memory, offsets, size in ((wide, wide_offsets, sizes[0]), (packed, packed_offsets, sizes[1])):
        if len(offsets) and (offsets.min() < 0 or offsets.max() > memory.nbytes - size):
            raise ValueError(f"a piece of {size} bytes lies outside of {memory.nbytes} bytes")
    return sizes


def _encoded(wide: Words, count: int) -> Bytes:
    groups = np.zeros((-(-count // GROUP), GROUP), dtype=np.uint32)
    groups.reshape(-1)[:count] = wide
    magnitudes = groups & _MAGNITUDE
    are_finite = magnitudes < _INFINITE
    most = np.where(are_finite, magnitudes, 0).max(axis=1, keepdims=True).astype(np.uint32)
    tops = np.maximum((most + _ALMOST_TWO) >> 23, np.uint32(_LEAST_TOP))
    factors = ((np.uint32(262) - tops) << 23).view(np.float32)
    with np.errstate(invalid="ignore"):  # NaN, handled below
        scaled = np.where(are_finite, magnitudes, 0).view(np.float32) * factors
    powers = np.maximum(scaled.view(np.uint32) & _INFINITE, _LEAST_POWER)
    shifts = powers + np.uint32(20 << 23)
    eighths = (scaled + shifts.view(np.float32)).view(np.uint32) - shifts
    codes = np.where(are_finite, ((powers - _LEAST_POWER) >> 20) + eighths, 0x7F) | (groups >> 24 & 0x80)
    return np.concatenate((codes.astype(np.uint8).reshape(-1)[:count], tops.astype(np.uint8).reshape(-1)))


def _decoded(data: Bytes, count: int) -> npt.NDArray[np.float32]:
    """Decoded values as float32, not clamped to the target dtype yet."""
    codes, tops = data[:count].astype(np.uint32), data[count:].astype(np.uint32)
    magnitudes = codes & 0x7F
    are_tiny = magnitudes < 8
    more = ((magnitudes | np.where(are_tiny, 8, 0)) << 20) + np.uint32(120 << 23)
    values = more.astype(np.uint32).view(np.float32) - np.where(are_tiny, np.float32(2**-6), np.float32(0))
    factors = np.repeat(((tops - 8) << 23).astype(np.uint32).view(np.float32), GROUP)[:count]
    with np.errstate(over="ignore"):  # clamped later
        bits = (values.astype(np.float32) * factors).view(np.uint32)
    signed: Words = (np.where(magnitudes == 0x7F, _NAN, bits) | (codes & 0x80) << 24).astype(np.uint32)
    return signed.view(np.float32)


def _widen(data: Bytes, kind: int) -> Words:
    if KINDS[kind] == "float32":
        return data.view(np.uint32)
    if KINDS[kind] == "float16":
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            return data.view(np.float16).astype(np.float32).view(np.uint32)
    return data.view(np.uint16).astype(np.uint32) << np.uint32(16)


def _narrow(values: npt.NDArray[np.float32], kind: int) -> Bytes:
    bits = values.view(np.uint32)
    magnitudes, signs = bits & _MAGNITUDE, bits & ~_MAGNITUDE
    are_nan = magnitudes > _INFINITE
    cut = (np.where(are_nan, 0, np.minimum(magnitudes, _LARGEST[kind])) | signs).astype(np.uint32)
    made: npt.NDArray[np.uint16] | Words
    if KINDS[kind] == "float32":
        made = np.where(are_nan, _NARROW_NAN[kind] | signs, cut)
    else:
        is_half = KINDS[kind] == "float16"
        narrow = (
            cut.view(np.float32).astype(np.float16).view(np.uint16)
            if is_half
            else (cut >> 16).astype(np.uint16)
        )
        made = np.where(are_nan, _NARROW_NAN[kind] | (signs >> 16).astype(np.uint16), narrow)
    return np.ascontiguousarray(made).view(np.uint8)
