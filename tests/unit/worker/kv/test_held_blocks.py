"""What a worker knows of its engine's blocks: what a replay of all changes gives, with digests that follow."""

from __future__ import annotations

import random

from kvolt.core.kv_events import Cleared, KvChange, KvDigest, Removed, Stored, Tier, digest_of
from kvolt.worker.kv.held_blocks import HeldBlocks


def stored(*hashes: int, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored.from_hashes(hashes, tier=tier)


def removed(*hashes: int, tier: Tier = Tier.DEVICE) -> Removed:
    return Removed.from_hashes(hashes, tier)


def contents(holdings: HeldBlocks) -> dict[tuple[int, Tier], set[int]]:
    return {(rank, tier): set(blocks) for rank, tier, blocks in holdings.contents() if blocks}


def test_ranks_and_tiers_are_apart() -> None:
    holdings = HeldBlocks()
    holdings.apply((stored(1, 2), stored(1, tier=Tier.HOST)), 0)
    holdings.apply((stored(1, 3),), 1)
    assert contents(holdings) == {(0, Tier.DEVICE): {1, 2}, (0, Tier.HOST): {1}, (1, Tier.DEVICE): {1, 3}}
    assert holdings.digests(1) == (KvDigest(2, digest_of((1, 3)), 1),)
    assert len(holdings.digests()) == 3
    holdings.apply((Cleared(Tier.HOST),), 0)
    assert contents(holdings) == {(0, Tier.DEVICE): {1, 2}, (1, Tier.DEVICE): {1, 3}}
    holdings.apply((Cleared(),), 1)
    assert contents(holdings) == {(0, Tier.DEVICE): {1, 2}}
    assert KvDigest(0, 0, 1) in holdings.digests(), "empty, and said to be"
    assert holdings.num_blocks == 2


def test_what_cannot_be_is_taken_as_a_set_would() -> None:
    """An engine that tells a block twice, or one gone that never was, does no harm."""
    holdings = HeldBlocks()
    holdings.apply((stored(1, 2), stored(2, 3, 3), removed(9), removed(1, 1), removed(1)), 0)
    assert contents(holdings) == {(0, Tier.DEVICE): {2, 3}}
    assert holdings.digests() == (KvDigest(2, digest_of((2, 3))),)
    holdings.apply((stored(5, 5),), 0)
    assert holdings.digests() == (KvDigest(3, digest_of((2, 3, 5))),)
    assert holdings.num_blocks == 3


def test_random_histories() -> None:
    rng = random.Random(3)
    holdings, model = HeldBlocks(), set[int]()
    for _ in range(500):
        blocks = rng.sample(range(200), rng.choice((1, 3, 40)))
        change: KvChange
        match rng.randrange(20):
            case 0:
                change = Cleared()
                model.clear()
            case number if number < 10:
                change = stored(*blocks)
                model.update(blocks)
            case _:
                change = removed(*blocks)
                model.difference_update(blocks)
        holdings.apply((change,), 0)
        assert holdings.num_blocks == len(model)
        for digest in holdings.digests():
            assert digest == KvDigest(len(model), digest_of(model))
    assert contents(holdings).get((0, Tier.DEVICE), set()) == model


def test_it_is_bounded_and_says_so() -> None:
    holdings = HeldBlocks(max_blocks=10)
    holdings.apply((stored(*range(10)),), 0)
    assert not holdings.is_lost
    holdings.apply((stored(10),), 1)
    assert holdings.is_lost
    holdings.apply((stored(11), Cleared()), 0)
    assert (holdings.num_blocks, contents(holdings), holdings.digests()) == (0, {}, ())
