"""BlockKey: the stored identity is pinned, complete and unambiguous."""

import hashlib

import pytest

from kvolt.core.block_key import BLOCK_KEY_BYTES, BlockKeyChain, BlockKeyContext
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.hashing import MediaExtent

PLAIN = {"weights_hash": "ab" * 32, "dtype": "bfloat16", "block_size": 4, "layout": "nhd"}
TENANT = {**PLAIN, "lora": "sql-adapter", "salt": "mandant-ä"}
IMAGE, AUDIO = bytes(range(32)), bytes(range(100, 120))


def context(**changes: object) -> BlockKeyContext:
    return BlockKeyContext(**{**PLAIN, **changes})  # type: ignore[arg-type]


def keys(tokens: list[int], media: tuple[tuple[int, int, bytes], ...] = (), **changes: object) -> list[str]:
    chain = BlockKeyChain(context(**changes), [MediaExtent(*extent) for extent in media])
    return [key.hex() for key in chain.extend(tokens)]


def reference_keys(
    fields: dict[str, object], tokens: list[int], media: list[tuple[int, int, bytes]]
) -> list[str]:
    """The derivation as its module describes it, written out with nothing of the module."""

    def u64(value: int) -> bytes:
        return value.to_bytes(8, "little")

    framed = b""
    for name in ("format_version", "weights_hash", "lora", "dtype", "block_size", "layout", "salt"):
        value = fields.get(name, 1 if name == "format_version" else "")
        encoded = u64(value) if isinstance(value, int) else str(value).encode()
        framed += u64(len(encoded)) + encoded
    context_key = hashlib.blake2b(framed, digest_size=32, person=b"kvolt.context").digest()

    size = int(str(fields["block_size"]))
    parent, found = b"kvolt block root", []
    for start in range(0, len(tokens) - size + 1, size):
        message = parent
        for token in tokens[start : start + size]:
            message += token.to_bytes(4, "little")
        for at, length, digest in sorted(media):
            if at < start + size and at + length > start:
                message += (at - start).to_bytes(8, "little", signed=True)
                message += u64(length) + u64(len(digest)) + digest
        parent = hashlib.blake2b(message, digest_size=16, key=context_key).digest()
        found.append(parent.hex())
    return found


GOLDEN = [
    (
        PLAIN,
        [1, 2, 3, 4, 5, 6, 7, 2**32 - 1, 9],
        [],
        ["7b85a325d33076700d0dabefa516c19f", "0dd9ad548abc93834fdfb11be1f0f43c"],
    ),
    (
        TENANT,
        [1, 2, 3, 4, 5, 6, 7, 8],
        [],
        ["dd4323429b15137d214c79e2973b73fd", "abf3289255d3dc1782ad70bc59d02463"],
    ),
    (
        TENANT,
        [1, 2, 7, 7, 7, 7, 7, 8, 9, 10, 11, 12],
        [(6, 1, AUDIO), (2, 4, IMAGE)],
        [
            "6ab1c48da27ab181e48e1f8118579f02",
            "28cb10e50b67e7a8a6a079cb4ef28c7b",
            "1d28d35854513086c2d767f1876d267a",
        ],
    ),
]


@pytest.mark.parametrize(("fields", "tokens", "media", "pinned"), GOLDEN, ids=["plain", "tenant", "media"])
def test_the_stored_identity_never_changes(
    fields: dict[str, object], tokens: list[int], media: list[tuple[int, int, bytes]], pinned: list[str]
) -> None:
    """If this fails, stored blocks would be missed or mistaken: raise FORMAT_VERSION and add vectors."""
    assert reference_keys(fields, tokens, media) == pinned
    assert keys(tokens, tuple(media), **fields) == pinned


def test_a_key_has_128_bits() -> None:
    assert {len(key) for key in BlockKeyChain(context()).extend(range(40))} == {BLOCK_KEY_BYTES} == {16}


@pytest.mark.parametrize(
    "change",
    [
        {"weights_hash": "ac" * 32},
        {"lora": "x"},
        {"dtype": "float16"},
        {"block_size": 8},
        {"layout": "hnd"},
        {"salt": "x"},
        {"format_version": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_context_field_changes_every_key(change: dict[str, object]) -> None:
    tokens = list(range(16))
    assert not set(keys(tokens)) & set(keys(tokens, **change))
    assert context().derive_key() != context(**change).derive_key()


def test_empty_lora_and_salt_mean_none() -> None:
    assert context(lora="", salt="").derive_key() == context().derive_key()


def test_the_same_block_elsewhere_has_another_key() -> None:
    first, second, third = keys([1, 2, 3, 4] * 3)
    assert len({first, second, third}) == 3
    assert keys([9, 9, 9, 9, 1, 2, 3, 4])[1] not in {first, second, third}


def test_media_that_swap_places_do_not_share_a_key() -> None:
    """The placeholders are equal, the routing hash is equal, the KV is not."""
    tokens = [7, 7, 7, 7]
    layouts = [
        (),
        ((0, 2, IMAGE), (2, 2, AUDIO)),
        ((0, 2, AUDIO), (2, 2, IMAGE)),
        ((0, 3, IMAGE), (3, 1, AUDIO)),
        ((0, 1, IMAGE), (1, 3, AUDIO)),
        ((0, 4, IMAGE),),
        ((0, 8, IMAGE),),
    ]
    assert len({tuple(keys(tokens, media)) for media in layouts}) == len(layouts)


def test_media_order_in_the_call_does_not_matter() -> None:
    extents = ((0, 2, IMAGE), (2, 2, AUDIO))
    assert keys([7] * 4, extents) == keys([7] * 4, extents[::-1])


def test_media_changes_its_blocks_and_all_after_but_none_before() -> None:
    without, within = keys([7] * 16), keys([7] * 16, ((5, 2, IMAGE),))
    assert [a == b for a, b in zip(without, within, strict=True)] == [True, False, False, False]


def test_chain_reports_each_block_once_and_survives_a_refusal() -> None:
    chain = BlockKeyChain(context())
    assert chain.extend([1, 2, 3]) == []
    with pytest.raises(InvalidRequest):
        chain.extend([4, 2**32])
    grown = chain.extend([4, 5]) + chain.extend([6, 7, 8])
    assert [key.hex() for key in grown] == keys([1, 2, 3, 4, 5, 6, 7, 8])
    assert chain.keys == grown
    assert chain.num_tokens == 8


@pytest.mark.parametrize("change", [{"block_size": 0}, {"format_version": -1}, {"format_version": 2**64}])
def test_numbers_out_of_range_are_config_errors(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        context(**change)
    assert caught.value.fields["key"] == next(iter(change))


def test_a_salt_that_is_not_unicode_is_the_callers_fault() -> None:
    with pytest.raises(InvalidRequest):
        BlockKeyChain(context(salt="\ud800"))
