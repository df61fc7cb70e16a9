"""Any history of stores, removals, clears and workers coming and going, against a naive model; both indexes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvolt.core.kv_events import digest_of
from kvolt.router.index import prefix_index as index
from kvolt.router.index import prefix_index_python as index_python

NUM_TIERS = index.NUM_TIERS
NUM_WORKERS = 64
PROMPTS = [tuple(range(start, start + 40)) for start in (0, 20, 1000)]
"""They cross: a history may store the middle of one prompt as the head of another, as no chain of hashes would."""


def spread(name: int) -> int:
    """Names as 64-bit numbers, the ends of the range among them."""
    return {0: 0, 1: 2**64 - 1, 2: 2**63}.get(name, name * 0x9E3779B97F4A7C15 % 2**64)


class Model:
    """A set of blocks for each slot and tier, and the definition of a usable prefix, word by word."""

    def __init__(self) -> None:
        self.held: dict[int, list[set[int]]] = {}
        self.num_slots = 0

    def add_worker(self) -> int:
        slot = next(slot for slot in range(self.num_slots + 1) if slot not in self.held)
        self.held[slot] = [set() for _ in range(NUM_TIERS)]
        self.num_slots = max(self.num_slots, slot + 1)
        return slot

    def find_tiers(self, hashes: tuple[int, ...]) -> list[list[int]]:
        return [
            [self.prefix(slot, tier, hashes) for slot in range(self.num_slots)] for tier in range(NUM_TIERS)
        ]

    def prefix(self, slot: int, tier: int, hashes: tuple[int, ...]) -> int:
        usable = set().union(*self.held[slot][: tier + 1]) if slot in self.held else set()
        return next((depth for depth, name in enumerate(hashes) if name not in usable), len(hashes))


slots = st.integers(0, NUM_WORKERS - 1)
tiers = st.sampled_from([0, 0, 0, 1, 2, 4])
runs = st.builds(
    lambda prompt, start, length: [spread(name) for name in prompt[start : start + length]],
    st.sampled_from(PROMPTS),
    st.integers(0, 30),
    st.integers(1, 40),
)
blocks = st.one_of(runs, runs.flatmap(st.permutations), st.lists(st.integers(0, 60).map(spread), max_size=6))


class History(RuleBasedStateMachine):
    make: Any

    @initialize()
    def begin(self) -> None:
        self.index = self.make()
        self.model = Model()

    @rule(num=st.integers(1, NUM_WORKERS))
    def workers_come(self, num: int) -> None:
        for _ in range(min(num, NUM_WORKERS - len(self.model.held))):
            assert self.index.add_worker() == self.model.add_worker()

    @precondition(lambda self: self.model.held)
    @rule(slot=slots)
    def worker_goes(self, slot: int) -> None:
        slot = self.there(slot)
        self.index.remove_worker(slot)
        del self.model.held[slot]
        with pytest.raises(IndexError):
            self.index.store(slot, (1,))

    @precondition(lambda self: self.model.held)
    @rule(slot=slots, tier=tiers, hashes=blocks, many=st.integers(1, 12))
    def stored(self, slot: int, tier: int, hashes: list[int], many: int) -> None:
        for each in range(many):
            place = self.there(slot + each * 5)
            self.index.store(place, tuple(hashes), tier)
            self.model.held[place][tier].update(hashes)

    @precondition(lambda self: self.model.held)
    @rule(slot=slots, tier=tiers, hashes=blocks, many=st.integers(1, 12))
    def removed(self, slot: int, tier: int, hashes: list[int], many: int) -> None:
        for each in range(many):
            place = self.there(slot + each * 5)
            self.index.remove(place, hashes, tier)
            self.model.held[place][tier].difference_update(hashes)

    @precondition(lambda self: self.model.held)
    @rule(slot=slots, tier=st.none() | tiers)
    def cleared(self, slot: int, tier: int | None) -> None:
        slot = self.there(slot)
        self.index.clear(slot, tier)
        for level in range(NUM_TIERS) if tier is None else (tier,):
            self.model.held[slot][level].clear()

    @rule(hashes=blocks)
    def found(self, hashes: list[int]) -> None:
        expected = self.model.find_tiers(tuple(hashes))
        assert self.index.find_tiers(hashes).tolist() == expected
        assert self.index.find(hashes).tolist() == expected[0]

    @invariant()
    def is_what_the_model_is(self) -> None:
        self.index.check_integrity()
        for slot, held in self.model.held.items():
            for tier, names in enumerate(held):
                assert self.index.digest(slot, tier) == (len(names), digest_of(names))
        for prompt in PROMPTS:
            self.found([spread(name) for name in prompt])
        held_sets = [names for held in self.model.held.values() for names in held]
        assert self.index.num_pairs == sum(map(len, held_sets))
        assert self.index.num_blocks == len(set().union(*held_sets))

    def teardown(self) -> None:
        for slot, held in self.model.held.items():
            for tier, names in enumerate(held):
                assert sorted(self.index.contents(slot, tier)) == sorted(names)
                assert self.index.num_evicted(slot, tier) == 0

    def there(self, slot: int) -> int:
        present = sorted(self.model.held)
        return present[slot % len(present)]


class PythonHistory(History):
    make = index_python.BlockIndex


TestPython = PythonHistory.TestCase
TestPython.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)

if index.IS_NATIVE:

    class NativeHistory(History):
        make = index.BlockIndex

    TestNative = NativeHistory.TestCase
    TestNative.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


LONG_PROMPTS = [
    tuple(spread(name) for name in range(start, start + 500)) for start in range(10_000, 20_000, 1000)
]
NUM_CAPPED_WORKERS = 100
pieces = st.builds(
    lambda number, start, length, step: LONG_PROMPTS[number][start : start + length : step],
    st.integers(0, len(LONG_PROMPTS) - 1),
    st.integers(0, 400),
    st.integers(1, 500),
    st.sampled_from([1, 1, 1, 2, 7]),
)


class CappedHistory(RuleBasedStateMachine):
    """More than the cap allows: what is left is found exactly, and nothing that was never stored or is gone."""

    make: Any
    max_bytes: int

    @initialize()
    def begin(self) -> None:
        self.index = self.make(self.max_bytes)
        self.model = Model()
        for _ in range(NUM_CAPPED_WORKERS):
            self.index.add_worker()
            self.model.add_worker()

    @rule(
        first=st.integers(0, 99), step=st.integers(1, 60), many=st.integers(1, 60), hashes=pieces, tier=tiers
    )
    def stored(self, first: int, step: int, many: int, hashes: tuple[int, ...], tier: int) -> None:
        for slot in {(first + each * step) % NUM_CAPPED_WORKERS for each in range(many)}:
            self.index.store(slot, hashes, tier)
            self.model.held[slot][tier].update(hashes)
            assert self.index.num_bytes <= self.max_bytes

    @rule(
        first=st.integers(0, 99), step=st.integers(1, 60), many=st.integers(1, 60), hashes=pieces, tier=tiers
    )
    def removed(self, first: int, step: int, many: int, hashes: tuple[int, ...], tier: int) -> None:
        for slot in {(first + each * step) % NUM_CAPPED_WORKERS for each in range(many)}:
            self.index.remove(slot, hashes, tier)
            self.model.held[slot][tier].difference_update(hashes)

    @rule(slot=st.integers(0, 99))
    def cleared(self, slot: int) -> None:
        self.index.clear(slot)
        self.model.held[slot] = [set() for _ in range(NUM_TIERS)]
        assert not any(self.index.num_evicted(slot, tier) for tier in range(NUM_TIERS))

    @invariant()
    def is_within_its_cap_and_exact(self) -> None:
        self.index.check_integrity()
        assert self.index.num_bytes <= self.max_bytes
        left = Model()
        left.num_slots = NUM_CAPPED_WORKERS
        for slot, held in self.model.held.items():
            left.held[slot] = [set(self.index.contents(slot, tier)) for tier in range(NUM_TIERS)]
            for tier, names in enumerate(held):
                assert left.held[slot][tier] <= names
                if not self.index.num_evicted(slot, tier):
                    assert left.held[slot][tier] == names
        for prompt in LONG_PROMPTS:
            assert self.index.find_tiers(prompt).tolist() == left.find_tiers(prompt)


class CappedPythonHistory(CappedHistory):
    make = index_python.BlockIndex
    max_bytes = 400 * 1024


TestCappedPython = CappedPythonHistory.TestCase
TestCappedPython.settings = settings(max_examples=8, stateful_step_count=10, deadline=None)

if index.IS_NATIVE:

    class CappedNativeHistory(CappedHistory):
        make = index.BlockIndex
        max_bytes = index.MIN_MAX_BYTES

    TestCappedNative = CappedNativeHistory.TestCase
    TestCappedNative.settings = settings(max_examples=15, stateful_step_count=15, deadline=None)
