"""Blocks that vLLM has under several names are told once, of each rank and tier."""

from __future__ import annotations

from kvolt.core.ids import SequenceHash
from kvolt.core.kv_events import Cleared, KvChange, Removed, Stored, Tier
from kvolt.engines.external.held_blocks import HeldBlocks
from kvolt.testing.engines.harness import Replica


def stored(*blocks: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> Stored:
    return Stored.from_hashes(blocks, None if parent is None else SequenceHash(parent), tier=tier)


def removed(*blocks: int, tier: Tier = Tier.DEVICE) -> Removed:
    return Removed.from_hashes(blocks, tier)


def test_what_is_news_goes_through_as_it_is() -> None:
    held = HeldBlocks()
    changes: tuple[KvChange, ...] = (stored(1, 2, 3), removed(2), stored(2, parent=1), Cleared())
    told = held.deduplicate(0, changes)
    assert told == changes
    assert told[0] is changes[0]


def test_a_second_name_is_no_news() -> None:
    held = HeldBlocks()
    held.deduplicate(0, (stored(1, 2),))
    assert held.deduplicate(0, (stored(1, 2),)) == ()
    assert held.deduplicate(0, (removed(1, 2),)) == ()
    assert held.num_on_device == 2
    assert held.deduplicate(0, (removed(1), removed(2))) == (removed(1), removed(2))
    assert held.num_on_device == 0


def test_of_a_run_the_new_ones() -> None:
    held, replica = HeldBlocks(), Replica()
    for change in held.deduplicate(0, (stored(1, 2, 3), removed(2), stored(1, 2, 3, 4))):
        replica.apply(change)
    assert replica.blocks == {1, 2, 3, 4}
    again = held.deduplicate(0, (removed(1, 2, 3, 4),))
    assert again == (removed(2, 4),)


def test_ranks_and_tiers_are_apart() -> None:
    held = HeldBlocks()
    host = stored(1, tier=Tier.HOST)
    assert held.deduplicate(0, (stored(1), host)) == (stored(1), host)
    assert held.deduplicate(1, (stored(1),)) == (stored(1),)
    assert held.num_on_device == 2
    assert held.deduplicate(1, (Cleared(),)) == (Cleared(),)
    assert held.num_on_device == 1
    assert held.deduplicate(0, (stored(1),)) == ()
    assert held.deduplicate(1, (stored(1),)) == (stored(1),)
    held.deduplicate(0, (Cleared(Tier.HOST),))
    assert held.num_on_device == 2
    assert held.deduplicate(0, (host,)) == (host,)
    held.clear()
    assert held.num_on_device == 0
