"""The checksum: committed vectors, and what it must find."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.transfer.memory import checksum as module
from kvolt.transfer.memory.checksum import FINAL_KEY, KEY, LENGTH_KEY, checksum, checksums

VECTORS: dict[str, Any] = json.loads(Path(__file__).with_name("checksum_vectors.json").read_text())
ALL_BITS = 2**64 - 1


def noise(length: int) -> bytes:
    return hashlib.shake_128(b"kvolt").digest(length)


def payload(vector: dict[str, Any]) -> bytes:
    length = vector["length"]
    return {"noise": noise(length), "zeros": b"\0" * length, "ones": b"\xff" * length}[vector["data"]]


def by_hand(data: bytes, seed: int) -> int:
    """As the module's docstring has it, a word at a time."""
    padded = data + bytes(-len(data) % 8)
    total = 0
    for index, start in enumerate(range(0, len(padded), 8)):
        word = int.from_bytes(padded[start : start + 8], "little")
        x = word ^ ((index + 1) * KEY & ALL_BITS)
        total += (x & 0xFFFFFFFF) * (x >> 32) + word
    h = (total + len(data) * LENGTH_KEY & ALL_BITS) ^ seed
    h ^= h >> 37
    h = h * FINAL_KEY & ALL_BITS
    return h ^ h >> 32


@pytest.mark.parametrize(
    "vector", VECTORS["payloads"], ids=lambda row: f"{row['data']}-{row['length']}-{row['seed']}"
)
def test_payloads(vector: dict[str, Any]) -> None:
    assert f"{checksum(payload(vector), int(vector['seed'], 16)):016x}" == vector["checksum"]


@pytest.mark.parametrize("vector", VECTORS["blocks of 65536 bytes of noise"])
def test_blocks(vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = np.array([int(seed, 16) for seed in vector["seeds"]], dtype=np.uint64)
    offsets = np.array(vector["offsets"], dtype=np.int64)
    arguments = noise(65536), offsets, vector["piece_bytes"], vector["pieces_per_block"], seeds
    assert [f"{number:016x}" for number in checksums(*arguments)] == vector["checksums"]
    monkeypatch.setattr(module, "_BATCH_BYTES", 1)  # block by block
    monkeypatch.setattr(module, "_COLUMNS", 3)
    assert [f"{number:016x}" for number in checksums(*arguments)] == vector["checksums"]


@given(data=st.binary(max_size=200), seed=st.integers(0, ALL_BITS))
def test_the_definition_a_word_at_a_time(data: bytes, seed: int) -> None:
    assert checksum(data, seed) == by_hand(data, seed)


@given(data=st.binary(min_size=1, max_size=100), bit=st.integers(0, 799))
def test_a_bit_that_changed_is_found(data: bytes, bit: int) -> None:
    changed = bytearray(data)
    changed[bit // 8 % len(data)] ^= 1 << bit % 8
    assert checksum(data) != checksum(changed)


def test_what_is_not_in_the_sum_of_words_alone_is_found() -> None:
    first, second = noise(64)[:8], noise(64)[8:16]
    assert checksum(first + second) != checksum(second + first)
    assert checksum(b"") != checksum(b"\0") != checksum(b"\0" * 8) != checksum(b"\0" * 16)
    assert checksum(first, 1) != checksum(first, 2)


def test_no_seed_is_a_seed_of_zero() -> None:
    offsets = np.array([0, 16], dtype=np.int64)
    zeros = np.zeros(2, dtype=np.uint64)
    assert checksums(noise(32), offsets, 16).tolist() == checksums(noise(32), offsets, 16, 1, zeros).tolist()
    assert checksums(noise(32), offsets, 16)[1] == checksum(noise(32)[16:])


def test_no_blocks_have_no_checksums() -> None:
    assert checksums(b"", np.empty(0, dtype=np.int64), 16).tolist() == []


@pytest.mark.parametrize(
    ("offsets", "piece_bytes", "pieces_per_block", "seeds", "why"),
    [
        ([17], 16, 1, None, "piece 0 at offset 17 with 16 bytes lies outside of 32 bytes"),
        ([0, -1], 16, 1, None, "piece 1 at offset -1"),
        ([0], 33, 1, None, "lies outside"),
        ([0], 0, 1, None, "at least one byte"),
        ([0, 8, 16], 8, 2, None, "3 pieces are not a multiple of 2"),
        ([0], 8, 0, None, "not a multiple of 0"),
        ([0, 8], 4, 2, None, "a multiple of 8"),
        ([0, 8], 8, 1, [1], "seeds has 1 numbers for 2 blocks"),
    ],
)
def test_what_is_refused(
    offsets: list[int], piece_bytes: int, pieces_per_block: int, seeds: list[int] | None, why: str
) -> None:
    given_seeds = None if seeds is None else np.array(seeds, dtype=np.uint64)
    with pytest.raises(ValueError, match=why):
        checksums(noise(32), np.array(offsets, dtype=np.int64), piece_bytes, pieces_per_block, given_seeds)
