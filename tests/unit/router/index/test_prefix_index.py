"""BlockIndex: slots, tiers, prefixes, errors, memory limit. Both implementations pass every case."""

from __future__ import annotations

import importlib
import sys
import tracemalloc
from array import array
from typing import Any

import numpy as np
import pytest

import kvolt.router
from kvolt.core.kv_events import TIER_LEVEL, digest_of
from kvolt.router.index import prefix_index as index
from kvolt.router.index import prefix_index_python as index_python

Make = Any
IMPLEMENTATIONS = {
    "python": index_python.BlockIndex,
    **({"native": index.BlockIndex} if index.IS_NATIVE else {}),
}
ROOMY = {"python": 3 * 1024**2, "native": 512 * 1024}
"""A cap under which about ten thousand blocks of one holder fit."""


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request: pytest.FixtureRequest) -> Make:
    return IMPLEMENTATIONS[request.param]


@pytest.fixture
def max_bytes(make: Make) -> int:
    return next(ROOMY[name] for name, made in IMPLEMENTATIONS.items() if made is make)


def of(make: Make, num_workers: int, **options: int) -> Any:
    made = make(**options)
    assert [made.add_worker() for _ in range(num_workers)] == list(range(num_workers))
    return made


def prompt(start: int, length: int) -> tuple[int, ...]:
    return tuple(number * 0x9E3779B97F4A7C15 % 2**64 for number in range(start + 1, start + length + 1))


def test_a_block_counts_only_if_all_before_it_are_held(make: Make) -> None:
    made = of(make, 3)
    made.store(0, (1, 2, 3, 4))
    made.store(1, (3, 4))
    made.store(2, (2, 1))
    assert made.find((1, 2, 3, 4)).tolist() == [4, 0, 2]
    made.remove(0, (2,))
    assert made.find((1, 2, 3, 4)).tolist() == [1, 0, 2]
    made.store(1, (2,))
    made.store(1, (1,))
    made.store(0, (2,))
    assert made.find((1, 2, 3, 4)).tolist() == [4, 4, 2]
    assert made.find((1, 5, 2)).tolist() == [1, 1, 1]
    assert made.find(()).tolist() == [0, 0, 0]


def test_an_answer_is_an_array_of_its_own(make: Make) -> None:
    made = of(make, 2)
    made.store(1, (7,))
    found = made.find((7,))
    assert found.dtype == np.int32
    found += 1  # a policy may work in it
    assert made.find((7,)).tolist() == [0, 1]
    assert made.find_tiers((7,)).shape == (index.NUM_TIERS, 2)
    assert make().find((7,)).shape == (0,)
    assert make().find_tiers((7,)).shape == (index.NUM_TIERS, 0)


def test_tiers_count_with_the_faster_ones(make: Make) -> None:
    made = of(make, 2)
    made.store(0, (1, 3), 0)
    made.store(0, (2,), tier=1)
    made.store(0, (4,), 3)
    made.store(1, (1, 2, 3), 2)
    assert made.find((1, 2, 3, 4)).tolist() == [1, 0]
    assert made.find_tiers((1, 2, 3, 4)).tolist() == [[1, 0], [3, 0], [3, 3], [4, 3], [4, 3]]
    assert made.find_local_tiers((1, 2, 3, 4)).tolist() == [[1, 0], [3, 0], [3, 3]]
    made.clear(0, 1)
    assert made.find_tiers((1, 2, 3, 4))[:, 0].tolist() == [1] * 5
    assert made.digest(0, 3) == (1, digest_of([4]))
    assert len(TIER_LEVEL) == index.NUM_TIERS


def test_repeated_and_unknown_blocks_change_nothing(make: Make) -> None:
    made = of(make, 2)
    made.store(0, (1, 2, 2, 1))
    made.store(0, (1, 2))
    made.remove(0, (3,))
    made.remove(1, (1,))
    made.remove(0, (1,), 1)
    assert (made.num_pairs, made.num_blocks) == (2, 2)
    assert made.digest(0) == (2, digest_of([1, 2]))
    assert made.digest(1) == (0, 0)
    made.remove(0, (1, 1, 2))
    assert (made.num_pairs, made.num_blocks) == (0, 0)


def test_slots_are_used_again_and_start_empty(make: Make) -> None:
    made = of(make, 3)
    for slot in range(3):
        made.store(slot, (1, 2))
        made.store(slot, (3,), 4)
    made.remove_worker(1)
    made.remove_worker(0)
    assert made.find((1, 2)).tolist() == [0, 0, 2]
    assert made.num_pairs == 3
    assert [made.add_worker(), made.add_worker(), made.add_worker()] == [0, 1, 3]
    assert made.find_tiers((1, 2, 3))[4].tolist() == [0, 0, 3, 0]
    assert made.contents(0) == []
    made.check_integrity()


@pytest.mark.parametrize("num_workers", [63, 64, 65, 300])
def test_blocks_that_many_hold(make: Make, num_workers: int) -> None:
    made = of(make, num_workers)
    blocks = prompt(0, 30)
    for slot in range(num_workers):
        made.store(slot, blocks[: slot % 31])
        made.store(slot, blocks[20:25], slot % 5)
    assert made.find(blocks).tolist() == [
        max(slot % 31, 25 if slot % 31 in range(20, 26) and slot % 5 == 0 else 0)
        for slot in range(num_workers)
    ]
    made.check_integrity()
    for slot in range(num_workers - 1, -1, -2):
        made.clear(slot)
    for slot in range(0, num_workers, 3):
        made.remove(slot, blocks[::4])
    made.check_integrity()
    for slot in range(num_workers):
        made.clear(slot)
    assert (made.num_pairs, made.num_blocks) == (0, 0)
    made.check_integrity()


def test_contents_and_digest_after_much_coming_and_going(make: Make) -> None:
    made = of(make, 2)
    blocks = prompt(0, 400)
    made.store(1, blocks)
    for start in range(0, 400, 8):
        made.store(0, blocks[start : start + 8])
        made.remove(0, blocks[max(start - 16, 0) : start])
        made.store(0, blocks[start : start + 2])
    left = sorted(made.contents(0))
    assert left == sorted(blocks[392:])
    assert made.digest(0) == (len(left), digest_of(left))
    assert sorted(made.contents(1)) == sorted(blocks)
    assert made.num_pairs == 408
    made.check_integrity()


@pytest.mark.parametrize(
    "hashes",
    [
        [1, 2, 2**64 - 1],
        (1, 2, 2**64 - 1),
        np.array([1, 2, 2**64 - 1], dtype=np.uint64),
        array("Q", [1, 2, 2**64 - 1]),
        np.array([1, 2, 2**64 - 1], dtype="<u8").tobytes(),
        bytearray(np.array([1, 2, 2**64 - 1], dtype="<u8").tobytes()),
        np.array([1, 0, 2, 0, 2**64 - 1], dtype=np.uint64)[::2],
        [np.uint64(1), True + 1, 2**64 - 1],
        {1: "a", 2: "b", 2**64 - 1: "c"},
    ],
    ids=["list", "tuple", "numpy", "array", "bytes", "bytearray", "strided", "numbers", "keys"],
)
def test_forms_in_which_hashes_come(make: Make, hashes: Any) -> None:
    made = of(make, 1)
    made.store(0, hashes)
    assert made.find(hashes).tolist() == [3]
    assert sorted(made.contents(0)) == [1, 2, 2**64 - 1]
    made.remove(slot=0, hashes=hashes, tier=0)
    assert made.num_pairs == 0
    assert made.find(np.array([3, 4], dtype=np.int32)).tolist() == [0]


@pytest.mark.parametrize(
    ("hashes", "error"),
    [
        ((1, "2"), TypeError),
        ((1, None), TypeError),
        ([1.0], TypeError),
        ("12345678", TypeError),
        (5, TypeError),
        (None, TypeError),
        ((1, -1), OverflowError),
        ([2**64], OverflowError),
        (np.array([-1]), OverflowError),
        (b"1234567", ValueError),
    ],
)
def test_hashes_that_are_none(make: Make, hashes: Any, error: type[Exception]) -> None:
    made = of(make, 1)
    made.store(0, (1,))
    for call in (made.find, made.find_tiers, lambda bad: made.store(0, bad), lambda bad: made.remove(0, bad)):
        with pytest.raises(error):
            call(hashes)
    assert made.contents(0) == [1]


@pytest.mark.parametrize("slot", [-1, 2, 2**70, 1])
def test_slots_that_are_none(make: Make, slot: int) -> None:
    made = of(make, 2)
    made.remove_worker(1)
    for call in (made.remove_worker, made.clear, made.digest, made.contents, made.num_evicted):
        with pytest.raises(IndexError):
            call(slot)
    for call in (made.store, made.remove):
        with pytest.raises(IndexError):
            call(slot, (1,))
    with pytest.raises(TypeError):
        made.store("0", (1,))
    with pytest.raises(TypeError):
        made.remove_worker(None)


@pytest.mark.parametrize("tier", [-1, 5, 2**70])
def test_tiers_that_are_none(make: Make, tier: int) -> None:
    made = of(make, 1)
    for call in (made.clear, made.digest, made.contents, made.num_evicted):
        with pytest.raises(ValueError, match=r"tier|cannot fit"):
            call(0, tier)
    for call in (made.store, made.remove):
        with pytest.raises(ValueError, match=r"tier|cannot fit"):
            call(0, (1,), tier)
    with pytest.raises(TypeError):
        made.store(0, (1,), None)


def test_calls_that_are_wrong(make: Make) -> None:
    made = of(make, 1)
    for call in (made.store, made.remove):
        for arguments, named in (
            ((), {}),
            ((0,), {}),
            ((0, (), 0, 0), {}),
            ((0, ()), {"slot": 0}),
            ((0, ()), {"x": 1}),
        ):
            with pytest.raises(TypeError):
                call(*arguments, **named)
    with pytest.raises(TypeError):
        make("much")
    with pytest.raises(ValueError, match="65536 or more"):
        make(index.MIN_MAX_BYTES - 1)
    with pytest.raises(ValueError, match="65536 or more"):
        make(max_bytes=-1)
    assert make(2**100).num_pairs == 0


def test_items_that_change_the_index_while_they_are_read(make: Make) -> None:
    made = of(make, 1)
    names: list[Any] = [1, 2]

    class Sly:
        def __index__(self) -> int:
            names.clear()
            made.remove_worker(0)
            return 3

    names.append(Sly())
    with pytest.raises(IndexError):
        made.store(0, names)
    assert made.add_worker() == 0
    assert made.num_blocks == 0
    made.check_integrity()


def test_there_is_room_for_so_many_workers(make: Make) -> None:
    made = of(make, index.MAX_SLOTS, max_bytes=64 << 20)
    with pytest.raises(ValueError, match="room for 8192"):
        made.add_worker()
    last = index.MAX_SLOTS - 1
    for slot in (0, 1, 4000, last):
        made.store(slot, (1, 2))
    for slot in range(1000):
        made.store(slot, (3,), 4)
    made.store(last, (3,), 2)
    found = made.find_tiers((1, 2, 3))
    assert [found[tier, last] for tier in range(5)] == [2, 2, 3, 3, 3]
    assert np.flatnonzero(made.find((1, 2))).tolist() == [0, 1, 4000, last]
    made.check_integrity()


def test_the_cap_holds_and_what_is_used_stays(make: Make, max_bytes: int) -> None:
    made = of(make, 2, max_bytes=max_bytes)
    prompts = [prompt(number * 1000, 100) for number in range(400)]
    for each in prompts:
        made.store(0, each)
        assert made.num_bytes <= max_bytes
        made.find(prompts[0])
    made.store(1, prompts[0])
    assert made.find(prompts[0]).tolist() == [100, 100]
    assert made.find(prompts[-1])[0] == 100
    assert made.find(prompts[1])[0] == 0
    assert 5_000 < made.num_blocks < 35_000
    assert made.num_evicted(0) == 40_000 - made.digest(0)[0]
    assert made.num_evicted(1) == 0
    made.check_integrity()
    made.clear(0)
    assert made.num_evicted(0) == 0
    assert made.find(prompts[0]).tolist() == [0, 100]


def test_of_one_prompt_the_deepest_blocks_go_first(make: Make, max_bytes: int) -> None:
    made = of(make, 1, max_bytes=max_bytes)
    long = prompt(0, 40_000)
    made.store(0, long)
    assert 5_000 < made.num_blocks < 35_000
    assert made.find(long)[0] > 0.75 * made.num_blocks


def test_a_find_is_a_use_the_deepest_the_least(make: Make, max_bytes: int) -> None:
    made = of(make, 1, max_bytes=max_bytes)
    long = prompt(0, 4000)
    made.store(0, long)
    for number in range(1, 200):
        made.store(0, prompt(number * 10_000, 200))
        if number % 3 == 0:
            made.find(long[:500])
    assert made.find(long)[0] in range(500, 3000)


def test_no_room_for_a_single_block_is_no_error(make: Make) -> None:
    made = of(make, 2000, max_bytes=index.MIN_MAX_BYTES)
    made.store(5, (1, 2, 3))
    made.store(5, (1, 2, 3), 1)
    assert made.find((1,))[5] == 0
    assert (made.num_pairs, made.num_evicted(5), made.num_evicted(5, 1)) == (0, 3, 3)
    made.remove(5, (1,))
    made.check_integrity()


def test_memory_moves_between_blocks_and_holders(make: Make, max_bytes: int) -> None:
    made = of(make, 128, max_bytes=max_bytes)
    for number in range(300):  # blocks of one holder each
        made.store(number % 128, prompt(number * 1000, 100))
    alone = made.num_blocks
    shared = [prompt(10**6 + number * 1000, 50) for number in range(40)]
    for slot in range(128):  # few blocks of many holders, each of another number
        for number, each in enumerate(shared):
            made.store(slot, each[: 50 - (slot + number) % 7])
            assert made.num_bytes <= max_bytes
    made.check_integrity()
    assert made.num_blocks < alone
    for slot in range(128):
        made.clear(slot)
    for number in range(300):
        made.store(number % 128, prompt(number * 1000, 100))
        assert made.num_bytes <= max_bytes
    made.check_integrity()
    assert made.num_blocks > 2000


def test_num_bytes_of_the_python_index_is_accurate() -> None:
    made = of(index_python.BlockIndex, 32, max_bytes=1 << 30)
    tracemalloc.start()
    try:
        before, said_before = tracemalloc.get_traced_memory()[0], made.num_bytes
        for slot in range(8):
            made.store(slot, prompt(0, 500))
            made.store(slot, prompt(slot * 10_000 + 1000, 1500))
        taken, said = tracemalloc.get_traced_memory()[0] - before, made.num_bytes - said_before
    finally:
        tracemalloc.stop()
    assert 0.7 < taken / said < 1.3


def test_check_integrity_detects_damage() -> None:
    made = of(index_python.BlockIndex, 1)
    made.store(0, (1, 2))
    made._masks[3] = 1
    with pytest.raises(AssertionError, match="disagree"):
        made.check_integrity()
    del made._masks[3]
    made._workers[0].digests[0] ^= 1
    with pytest.raises(AssertionError, match="digest"):
        made.check_integrity()


def test_without_the_native_module_the_python_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvolt.router.index._index_native", None)
    monkeypatch.delitem(sys.modules, "kvolt.router.index.prefix_index")
    monkeypatch.setattr(kvolt.router, "index", index)  # which the import below changes: put back at the end
    chosen = importlib.import_module("kvolt.router.index.prefix_index")
    assert chosen.BlockIndex is index_python.BlockIndex
    assert not chosen.IS_NATIVE
