"""The digest of a set of blocks: the same however one got there, another for nearly every other set."""

from __future__ import annotations

import random

import pytest

from kvolt.core.kv_events import EMPTY_DIGEST, digest_of, mix_hash

RNG = random.Random(7)
HASHES = tuple(RNG.getrandbits(64) for _ in range(300))


def test_mix_is_splitmix64() -> None:
    """The first numbers of the generator with seed 0, whose state grows by a constant."""
    step = 0x9E3779B97F4A7C15
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [mix_hash(index * step & 2**64 - 1) for index in range(4)] == published


@pytest.mark.parametrize("number", [0, 1, 2, 23, 24, 25, 300])
def test_few_and_many_are_worked_out_alike(number: int) -> None:
    expected = EMPTY_DIGEST
    for each in HASHES[:number]:
        expected ^= mix_hash(each)
    assert digest_of(HASHES[:number]) == digest_of(set(HASHES[:number])) == expected
    assert digest_of(list(reversed(HASHES[:number]))) == expected


def test_it_follows_what_comes_and_goes() -> None:
    digest = digest_of(HASHES[:100])
    assert digest ^ digest_of(HASHES[100:]) == digest_of(HASHES)
    assert digest ^ digest_of(HASHES[:40]) == digest_of(HASHES[40:100])
    assert digest ^ digest_of(HASHES[:100]) == EMPTY_DIGEST


def test_neighbours_do_not_cancel_out() -> None:
    """As they would in the xor of the hashes themselves."""
    assert 1 ^ 2 ^ 3 == 0
    assert digest_of((1, 2, 3)) != EMPTY_DIGEST
    assert len({digest_of(range(first, first + 3)) for first in range(100)}) == 100
    assert digest_of((0,)) != EMPTY_DIGEST


def test_extreme_hashes_have_a_place() -> None:
    extreme = (0, 1, 2**63, 2**64 - 1)
    padded = (*extreme, *HASHES)
    assert digest_of(padded) == digest_of(extreme) ^ digest_of(HASHES)
