"""What `_fp8_native.c` does, in numpy: slower, and the same to the last bit. Pure.

A piece is a row of values, float32, float16 or bfloat16. In eight bits it is a byte for each of them (e4m3: a sign,
four bits of exponent, three of mantissa; the largest is 448, and NaN is 0x7f) and after all of these a byte for
each group of 64: the exponent of a power of two that its values are to be multiplied by. Values are rounded to the
nearest, ties to even.

- The power of two is the one by which the largest finite value of the group is just within 448. So a value that is
  1/14,000 of the largest or more is off by 1/16 of itself at most, and a smaller one by 1/230,000 of the largest.
- A power of two and not any factor: numbers are moved and never mixed, and what was rounded once is not rounded
  again the next time. The error would not be smaller with another factor, since e4m3 has digits to a value and not
  to a group.
- Zeros keep their sign. What is no finite number is NaN afterwards. What would be rounded beyond the largest finite
  number of its kind is that number. Magnitudes below 2^-125 are zero.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

KINDS = ("float32", "float16", "bfloat16")
"""By their numbers."""
WIDTHS = (4, 2, 2)
GROUP = 64

_MAGNITUDE, _INFINITE, _NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint32(0x7FC00000)
_LARGEST = tuple(map(np.uint32, (0x7F7FFFFF, 0x477FE000, 0x7F7F0000)))
_NARROW_NAN = (np.uint32(0x7FC00000), np.uint16(0x7E00), np.uint16(0x7FC0))
_LEAST_POWER = np.uint32(0x3C800000)
"""2^-6, the least that has all its digits."""
_ALMOST_TWO = np.uint32(0x17FFFF)
"""Added to what rounds to more than 1.75 of its power of two, it is of the next."""
_LEAST_TOP = 20
"""So that no factor and no product is subnormal."""

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
    """Pieces of so many values at these offsets, in eight bits to those. ValueError where one lies outside."""
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
    """The other way."""
    sizes = _check(src, src_offsets, dst, dst_offsets, num_values, kind)
    for to, start in zip(dst_offsets.tolist(), src_offsets.tolist(), strict=True):
        data = np.frombuffer(src, dtype=np.uint8, count=sizes[1], offset=start)
        dst[to : to + sizes[0]] = _narrow(_decoded(data, num_values), kind).tobytes()


def packed_bytes(num_values: int) -> int:
    """Of a piece in eight bits."""
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
        raise ValueError(f"{count} values of kind {kind} are no piece")
    if len(packed_offsets) != len(wide_offsets):
        raise ValueError(f"{len(wide_offsets)} pieces cannot go to {len(packed_offsets)} places")
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
    with np.errstate(invalid="ignore"):  # of NaN, which is looked after
        scaled = np.where(are_finite, magnitudes, 0).view(np.float32) * factors
    powers = np.maximum(scaled.view(np.uint32) & _INFINITE, _LEAST_POWER)
    shifts = powers + np.uint32(20 << 23)
    eighths = (scaled + shifts.view(np.float32)).view(np.uint32) - shifts
    codes = np.where(are_finite, ((powers - _LEAST_POWER) >> 20) + eighths, 0x7F) | (groups >> 24 & 0x80)
    return np.concatenate((codes.astype(np.uint8).reshape(-1)[:count], tops.astype(np.uint8).reshape(-1)))


def _decoded(data: Bytes, count: int) -> npt.NDArray[np.float32]:
    """With what is too large for some kinds still; NaN where there is none."""
    codes, tops = data[:count].astype(np.uint32), data[count:].astype(np.uint32)
    magnitudes = codes & 0x7F
    are_tiny = magnitudes < 8
    more = ((magnitudes | np.where(are_tiny, 8, 0)) << 20) + np.uint32(120 << 23)
    values = more.astype(np.uint32).view(np.float32) - np.where(are_tiny, np.float32(2**-6), np.float32(0))
    factors = np.repeat(((tops - 8) << 23).astype(np.uint32).view(np.float32), GROUP)[:count]
    with np.errstate(over="ignore"):  # which is cut off
        bits = (values.astype(np.float32) * factors).view(np.uint32)
    signed: Words = (np.where(magnitudes == 0x7F, _NAN, bits) | (codes & 0x80) << 24).astype(np.uint32)
    return signed.view(np.float32)


def _widen(data: Bytes, kind: int) -> Words:
    if KINDS[kind] == "float32":
        return data.view(np.uint32)
    if KINDS[kind] == "float16":
        with np.errstate(invalid="ignore"):  # of NaN, which stays one
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
