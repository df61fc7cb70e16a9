"""Blocks made smaller, and back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.kv.object_store.packing import RAW, WIDTHS, best_width, pack, unpack


@given(st.binary(max_size=5000), st.sampled_from(WIDTHS))
def test_what_is_packed_comes_back(data: bytes, width: int) -> None:
    assert unpack(pack(data, width), width, len(data)) == data


@pytest.mark.parametrize("width", [2, 4])
def test_numbers_are_packed_by_their_width(width: int) -> None:
    """bfloat16 is the first half of float32."""
    numbers = np.random.default_rng(1).normal(size=50_000).astype(np.float32)
    if width == 2:
        numbers = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    data = numbers.tobytes()
    assert best_width(data) >= width
    assert len(pack(data, best_width(data))) < 0.9 * len(data)


def test_what_cannot_be_smaller_is_not_packed() -> None:
    assert best_width(np.random.default_rng(1).bytes(100_000)) == RAW
    assert best_width(b"") == RAW


def test_what_is_no_block_is_none() -> None:
    packed = pack(b"abcd" * 1000, 2)
    assert unpack(packed, 2, 3999) is None
    assert unpack(packed, 3, 4000) is None
    assert unpack(packed[:-5], 2, 4000) is None
    assert unpack(b"nonsense", 2, 4000) is None
    assert unpack(b"", 2, 4000) is None
