"""What a tier says that it has, held against a plain model of it, in any order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.unit.kv.tiers.tier_lab import keys, sequence

from kvolt.core.errors import ConfigError, KvoltError
from kvolt.core.ids import BlockKey
from kvolt.core.kv_events import Cleared, Removed, Stored, Tier
from kvolt.kv.tiers.slot_table import Slot, SlotTable, TierBlock

BLOCKS = {block.key: block for name in "abcd" for block in sequence(name, 5)}
SOME = st.sampled_from(sorted(BLOCKS))
RULES = ("lru", "s3fifo", "tinylfu")


class Life(RuleBasedStateMachine):
    """Writers, readers and who lets go, in any order."""

    @initialize(eviction=st.sampled_from(RULES), num_slots=st.integers(1, 8), is_durable=st.booleans())
    def begin(self, eviction: str, num_slots: int, is_durable: bool) -> None:
        self.slot_table = SlotTable(Tier.DISK, num_slots, eviction, is_durable)
        self.is_durable = is_durable
        self.writing: dict[BlockKey, Slot] = {}
        self.reading: list[BlockKey] = []
        self.bytes: dict[Slot, BlockKey] = {}
        """What was written where last."""
        self.told: set[int] = set()

    @rule(name=st.sampled_from("abcd"), start=st.integers(0, 4), count=st.integers(1, 5))
    def reserve(self, name: str, start: int, count: int) -> None:
        blocks: list[TierBlock] = sequence(name, 5)[start : start + count]
        if self.is_durable:
            self.slot_table.make_room(len(blocks))
            self.slot_table.complete_eviction(self.slot_table.evicting_slots())
        for index, slot in self.slot_table.reserve(blocks):
            assert slot not in self.writing.values()
            assert not any(self.slot_table.slot(key) == slot for key in self.reading)
            self.writing[blocks[index].key] = slot
            self.bytes[slot] = blocks[index].key

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), is_good=st.booleans())
    def end_writing(self, data: st.DataObject, is_good: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.writing)))
        del self.writing[key]
        if is_good:
            self.slot_table.seal(key, 7)
            self.slot_table.register([key])
        else:
            self.slot_table.cancel([key])

    @rule(key=SOME)
    def read(self, key: BlockKey) -> None:
        if not self.slot_table.has(key):
            with pytest.raises(KvoltError):
                self.slot_table.hold([key])
            return
        [slot] = self.slot_table.hold([key])
        assert self.bytes[slot] == key
        self.reading.append(key)

    @precondition(lambda self: self.reading)
    @rule(data=st.data())
    def end_reading(self, data: st.DataObject) -> None:
        key = self.reading.pop(data.draw(st.integers(0, len(self.reading) - 1)))
        self.slot_table.release([key])

    @rule(key=SOME)
    def forget(self, key: BlockKey) -> None:
        is_free = self.slot_table.has(key) and key not in self.reading
        assert self.slot_table.forget([key]) == is_free

    @rule(num_slots=st.integers(1, 8))
    def resize(self, num_slots: int) -> None:
        self.slot_table.resize(num_slots)
        if not self.writing and not self.reading:
            assert len(self.slot_table) <= num_slots

    @rule()
    def tell(self) -> None:
        for change in self.slot_table.take_changes():
            assert change.tier is Tier.DISK
            if isinstance(change, Cleared):  # the log overflowed
                self.told.clear()
                continue
            hashes = set(change.sequence_hashes)
            if isinstance(change, Stored):
                assert not hashes & self.told
                self.told |= hashes
            elif isinstance(change, Removed):
                assert hashes <= self.told
                self.told -= hashes
        assert self.told == {BLOCKS[key].sequence_hash for key in self.slot_table}

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "slot_table"):
            self.slot_table.check_integrity()
            assert all(self.slot_table.has(key) for key in self.reading), "what is read does not go"
            assert all(self.bytes[self.slot_table.slot(key)] == key for key in self.slot_table)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("eviction", RULES)
def test_of_a_chain_the_deepest_goes_first(eviction: str) -> None:
    slot_table = SlotTable(Tier.HOST, 5, eviction)
    chain = sequence("a", 5)
    store(slot_table, chain)
    store(slot_table, sequence("b", 3))
    assert slot_table.match(keys(chain)) == 2


@pytest.mark.parametrize("eviction", RULES)
def test_what_is_asked_for_again_and_again_outlives_what_comes_once(eviction: str) -> None:
    slot_table = SlotTable(Tier.HOST, 20, eviction)
    wanted = sequence("wanted", 4)
    store(slot_table, wanted)
    for number in range(30):
        slot_table.hold(keys(wanted))
        slot_table.release(keys(wanted))
        store(slot_table, sequence(f"once {number}", 4))
    assert slot_table.match(keys(wanted)) == 4


def test_a_tier_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match="no room for a block"):
        SlotTable(Tier.HOST, 0)
    with pytest.raises(ConfigError, match="unknown eviction policy 'newest'"):
        SlotTable(Tier.HOST, 1, "newest")


def store(slot_table: SlotTable, blocks: list[TierBlock]) -> None:
    for index, _ in slot_table.reserve(blocks):
        slot_table.seal(blocks[index].key, 1)
        slot_table.register([blocks[index].key])


def test_an_invalidated_block_is_removed_on_release() -> None:
    slot_table, blocks = SlotTable(Tier.HOST, 8), sequence("a", 3)
    keys = [block.key for block in blocks]
    slot_table.reserve(blocks)
    for key in keys:
        slot_table.seal(key, 1)
    slot_table.register(keys)
    slot_table.hold(keys)
    slot_table.invalidate(keys[1])
    assert [slot_table.has(key) for key in keys] == [True, False, True]
    assert slot_table.match(keys) == 1
    slot_table.check_integrity()
    slot_table.release(keys)
    assert not slot_table.has_or_pending(keys[1])
    slot_table.invalidate(keys[2])
    assert not slot_table.has_or_pending(keys[2]), "at once if not held"
    slot_table.check_integrity()


def test_a_tier_that_has_grown_tells_all_that_it_has() -> None:
    slot_table = SlotTable(Tier.DISK, 1)
    slot_table.resize(8)
    blocks = sequence("grown", 8)
    slot_table.reserve(blocks)
    for block in blocks:
        slot_table.seal(block.key, 0)
        slot_table.register([block.key])
    stored = [change for change in slot_table.take_changes() if isinstance(change, Stored)]
    assert {told for change in stored for told in change.sequence_hashes} == {
        block.sequence_hash for block in blocks
    }
