"""Ids of recorded blocks: equal prefixes and nothing else are equal, and without the key nothing can be tested."""

from __future__ import annotations

from kvolt.core.hashing import SequenceHasher, request_seed
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, StopConditions
from kvolt.frontend.admin.trace_ids import TraceIds

KEY = b"k" * 32


def request(
    tokens: tuple[int, ...], model: str = "m", lora: str | None = None, salt: str | None = None
) -> Request:
    hasher = SequenceHasher(4, request_seed(lora, salt))
    hasher.extend(tokens)
    return Request(
        request_id=RequestId("r"),
        model=model,
        token_ids=tokens,
        stop=StopConditions(max_tokens=1),
        block_size=4,
        sequence_hashes=tuple(hasher.sequence),
        lora=lora,
        salt=salt,
    )


def ids(tokens: tuple[int, ...], key: bytes = KEY, **more: str) -> tuple[int, ...]:
    return TraceIds(key).blocks(request(tokens, **more))


def test_equal_prefixes_have_equal_ids() -> None:
    one, other = ids((1, 2, 3, 4, 5, 6, 7, 8, 9)), ids((1, 2, 3, 4, 5, 6, 7, 0, 9))
    assert len(one) == len(other) == 3
    assert one[0] == other[0]
    assert one[1] != other[1]
    assert one[2] != other[2], "the same token after another block is another block"
    assert ids((1, 2, 3, 4, 5, 6, 7, 8, 9)) == one


def test_the_partial_last_block_has_an_id_too() -> None:
    assert len(ids((1, 2))) == 1
    assert ids((1, 2)) == ids((1, 2)) != ids((1, 3))
    assert len(ids((1, 2, 3, 4))) == 1
    assert ids((1, 2, 3, 4, 5))[1] != ids((1, 2, 3, 4, 6))[1]
    assert ids((1, 2, 3, 4, 5))[1] != ids((5,))[0]


def test_models_adapters_and_tenants_share_no_id() -> None:
    for tokens in ((1, 2), (1, 2, 3, 4, 5, 6)):
        kinds = [
            ids(tokens),
            ids(tokens, model="other"),
            ids(tokens, lora="sql"),
            ids(tokens, salt="tenant"),
        ]
        flat = [each for kind in kinds for each in kind]
        assert len(set(flat)) == len(flat)


def test_another_key_gives_other_ids_and_none_is_the_routing_hash() -> None:
    tokens = tuple(range(40))
    assert set(ids(tokens)).isdisjoint(ids(tokens, key=b"o" * 32))
    hashes = request(tokens).sequence_hashes
    assert set(ids(tokens)).isdisjoint([*hashes, *(each >> 11 for each in hashes)])


def test_ids_survive_readers_that_know_doubles_only() -> None:
    for each in ids(tuple(range(400))):
        assert 0 <= each == int(float(each)) < 2**53


def test_names_are_replaced() -> None:
    made = TraceIds(KEY)
    assert made.name(None) is None
    alice = made.name("alice")
    assert alice == made.name("alice") != made.name("bob")
    assert alice is not None
    assert "alice" not in alice
    assert alice != TraceIds(b"o" * 16).name("alice")
    assert made.name("\ud800") is not None
