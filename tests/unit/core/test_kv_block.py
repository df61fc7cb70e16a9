"""A block's checksum covers its bytes and its names."""

from __future__ import annotations

import msgspec
import pytest

from kvolt.core.block_key import KvBlock
from kvolt.core.ids import BlockKey, SequenceHash

BLOCK = KvBlock(BlockKey(b"k" * 16), SequenceHash(2**64 - 1), BlockKey(b"p" * 16), 3, b"bytes" * 100).seal()


def test_a_sealed_block_stays_intact_on_its_way() -> None:
    assert BLOCK.is_intact
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(BLOCK), type=KvBlock)
    assert again == BLOCK
    assert again.is_intact


@pytest.mark.parametrize(
    "change",
    [
        {"key": BlockKey(b"K" * 16)},
        {"sequence_hash": SequenceHash(1)},
        {"parent": None},
        {"parent": BlockKey(b"P" * 16)},
        {"position": 4},
        {"data": b"bytes" * 99 + b"bytez"},
        {"data": b"bytes" * 99},
        {"checksum": 0},
    ],
)
def test_any_change_shows(change: dict[str, object]) -> None:
    assert not msgspec.structs.replace(BLOCK, **change).is_intact


def test_a_block_that_was_never_sealed_is_not_intact() -> None:
    assert not msgspec.structs.replace(BLOCK, checksum=0).is_intact


def test_the_checksum_is_the_same_on_any_machine() -> None:
    assert BLOCK.checksum == 3843919959223688354
