"""Block hashes for routing: fixed values, token forms, refusals, growth."""

from array import array
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.hashing import (
    MediaExtent,
    SequenceHasher,
    TokenBlocks,
    local_hashes,
    media_by_block,
    request_seed,
    sequence_hashes,
    token_bytes,
)
from kvolt.core.ids import LocalBlockHash, SequenceHash

IMAGE = bytes.fromhex("0123456789abcdef") + bytes(24)
OTHER = bytes.fromhex("00000000000000ff") + bytes(24)


def le32(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def le64(*values: int) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


def test_seed_adds_lora_and_salt() -> None:
    lora, salt = xxh3_64_intdigest(b"adapter", 0), xxh3_64_intdigest("mandant-ä".encode(), 1)
    assert request_seed(None, None) == 1337
    assert request_seed("adapter", None) == (1337 + lora) % 2**64
    assert request_seed(None, "mandant-ä") == (1337 + salt) % 2**64
    assert request_seed("adapter", "mandant-ä") == (1337 + lora + salt) % 2**64
    assert request_seed("same", None) != request_seed(None, "same")


def test_empty_lora_and_salt_mean_none() -> None:
    assert request_seed("", "") == 1337


def test_seed_wraps_to_64_bits() -> None:
    names = [f"lora-{number}" for number in range(32)]
    sums = [1337 + xxh3_64_intdigest(name.encode(), 0) + xxh3_64_intdigest(b"salt", 1) for name in names]
    assert max(sums) >= 2**64
    assert [request_seed(name, "salt") for name in names] == [total % 2**64 for total in sums]


@pytest.mark.parametrize("param", ["lora", "salt"])
def test_lone_surrogate_is_the_callers_fault(param: str) -> None:
    names: dict[str, str | None] = {"lora": None, "salt": None, param: "\ud800"}
    with pytest.raises(InvalidRequest) as caught:
        request_seed(names["lora"], names["salt"])
    assert caught.value.fields == {"param": param}


def test_local_hash_covers_full_blocks_only() -> None:
    expected = [xxh3_64_intdigest(le32(1, 2, 3, 4), 1337), xxh3_64_intdigest(le32(5, 6, 7, 2**32 - 1), 1337)]
    assert local_hashes([1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9, 10], 4) == expected
    assert local_hashes([1, 2, 3], 4) == []
    assert local_hashes([], 4) == []


def test_sequence_hash_chains_from_the_first_local_hash() -> None:
    local = local_hashes(range(12), 4)
    second = xxh3_64_intdigest(le64(local[0], local[1]), 1337)
    third = xxh3_64_intdigest(le64(second, local[2]), 1337)
    assert sequence_hashes(local) == [local[0], second, third]
    assert sequence_hashes(local[2:], SequenceHash(second)) == [third]
    assert sequence_hashes([]) == []


def test_a_zero_parent_is_a_parent() -> None:
    block = LocalBlockHash(7)
    assert sequence_hashes([block], SequenceHash(0)) == [xxh3_64_intdigest(le64(0, 7), 1337)]


def test_media_hashes_are_appended_sorted() -> None:
    media = [[], [2**64 - 1, 3], [5]]
    seed = request_seed("adapter", "salt")
    assert local_hashes([1, 2, 3, 4, 5], 2, seed, media) == [
        xxh3_64_intdigest(le32(1, 2), seed),
        xxh3_64_intdigest(le32(3, 4) + le64(3, 2**64 - 1), seed),
    ]


@pytest.mark.parametrize("media", [[[-1]], [[2**64]], []])
def test_bad_media_is_refused(media: list[list[int]]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        local_hashes([1, 2], 2, media=media)
    assert caught.value.fields["param"] == "media"


IDS = [0, 1, 255, 256, 70_000, 2**31, 2**32 - 1]


@pytest.mark.parametrize(
    "tokens",
    [
        IDS,
        tuple(IDS),
        deque(IDS),
        array("I", IDS),
        array("Q", IDS),
        np.array(IDS, np.uint32),
        np.array(IDS, ">u4"),
        np.array(IDS, np.int64),
        np.repeat(np.array(IDS, np.uint32), 2)[::2],
        [np.uint32(token) for token in IDS],
    ],
    ids=[
        "list",
        "tuple",
        "deque",
        "array-u32",
        "array-u64",
        "numpy-u32",
        "big-endian",
        "int64",
        "strided",
        "scalars",
    ],
)
def test_every_form_of_token_ids_has_the_same_bytes(tokens: list[int]) -> None:
    assert token_bytes(tokens) == le32(*IDS)


class BigEndianArray(array):  # type: ignore[type-arg]
    """What array("I") is on a big-endian machine: the same ids, the other bytes."""

    def __iter__(self) -> Iterator[int]:
        return iter(array("I", le32(*IDS)))


def test_bytes_do_not_follow_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = BigEndianArray("I", le32(*IDS))
    tokens.byteswap()
    monkeypatch.setattr("sys.byteorder", "big")
    assert token_bytes(tokens) == le32(*IDS)


@pytest.mark.parametrize("bad", [-1, 2**32, 2**70, 1.0, "7", None])
def test_a_bad_token_id_is_the_callers_fault(bad: object) -> None:
    tokens = [1, 2, bad, 4]
    with pytest.raises(InvalidRequest) as caught:
        local_hashes(tokens, 4)  # type: ignore[arg-type]
    assert caught.value.fields == {"param": "tokens", "index": 2}


@pytest.mark.parametrize(
    "tokens", [np.array([1, -1]), np.array([1.0, 2.0]), np.array([[1, 2]], np.uint32), array("f", [1.0])]
)
def test_arrays_of_the_wrong_kind_are_refused(tokens: list[int]) -> None:
    with pytest.raises(InvalidRequest):
        token_bytes(tokens)


@pytest.mark.parametrize("block_size", [0, -1, 2**32])
def test_block_size_out_of_range_is_a_config_error(block_size: int) -> None:
    for attempt in (
        lambda: local_hashes([1], block_size),
        lambda: SequenceHasher(block_size),
        lambda: media_by_block([], block_size, 1),
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        assert caught.value.fields["key"] == "block_size"


def test_media_falls_into_every_block_it_overlaps() -> None:
    extents = [MediaExtent(3, 6, IMAGE), MediaExtent(8, 1, OTHER), MediaExtent(40, 9, OTHER)]
    assert media_by_block(extents, 4, 4) == [
        [0x0123456789ABCDEF],
        [0x0123456789ABCDEF],
        [0xFF, 0x0123456789ABCDEF],
        [],
    ]
    assert media_by_block([MediaExtent(4, 4, IMAGE)], 4, 3) == [[], [0x0123456789ABCDEF], []]
    assert media_by_block([MediaExtent(0, 2**62, OTHER)], 4, 2) == [[0xFF], [0xFF]]


@pytest.mark.parametrize(("start", "length", "digest"), [(-1, 1, IMAGE), (0, 0, IMAGE), (0, 1, bytes(15))])
def test_an_extent_must_lie_in_the_prompt_and_carry_a_real_digest(
    start: int, length: int, digest: bytes
) -> None:
    with pytest.raises(InvalidRequest):
        MediaExtent(start, length, digest)


def test_an_extent_is_checked_where_it_arrives() -> None:
    extent = MediaExtent(3, 6, IMAGE)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(extent), type=MediaExtent) == extent
    with pytest.raises(InvalidRequest):
        msgspec.convert({"start": 3, "length": 6, "digest": bytes(8)}, MediaExtent)


def test_hasher_reports_each_block_once() -> None:
    hasher = SequenceHasher(4, seed=99)
    local = local_hashes(range(1, 13), 4, 99)
    expected = sequence_hashes(local)
    assert hasher.extend([1, 2, 3]) == []
    assert hasher.extend([]) == []
    assert hasher.extend([4]) == expected[:1]
    assert hasher.num_tokens == 4
    assert hasher.extend(range(5, 15)) == expected[1:]
    assert hasher.sequence == expected
    assert hasher.num_tokens == 14


def test_hasher_is_unchanged_by_a_refused_extend() -> None:
    hasher = SequenceHasher(4)
    hasher.extend([1, 2, 3])
    with pytest.raises(InvalidRequest):
        hasher.extend([4, 5, -6])
    assert hasher.num_tokens == 3
    assert hasher.extend([4]) == sequence_hashes(local_hashes([1, 2, 3, 4], 4))


def test_hasher_places_media_in_blocks_that_come_later() -> None:
    extents = [MediaExtent(8, 1, OTHER), MediaExtent(3, 6, IMAGE)]
    hasher = SequenceHasher(4, media=extents)
    for token in range(16):
        hasher.extend([token])
    local = local_hashes(range(16), 4, media=media_by_block(extents, 4, 4))
    assert hasher.sequence == sequence_hashes(local)


def test_passed_media_is_forgotten() -> None:
    blocks = TokenBlocks(4, [MediaExtent(0, 2, IMAGE), MediaExtent(3, 6, OTHER)])
    blocks.push(range(4))
    assert blocks.pending_media == [MediaExtent(3, 6, OTHER)]
    blocks.push(range(8))
    assert blocks.pending_media == []
