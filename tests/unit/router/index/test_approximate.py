"""ApproximateIndex: TTL, capacity of workers, memory limit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvolt.core.ids import InstanceId
from kvolt.router.index.approximate import (
    GENERATIONS,
    MAX_WORKER_RANKS,
    ApproximateIndex,
    ApproximateOptions,
)

A, B = InstanceId("a"), InstanceId("b")


def held(holders: ApproximateIndex, instance_id: InstanceId, hashes: tuple[int, ...], now: float) -> int:
    slot = holders.slot_of(instance_id)
    assert slot is not None
    return int(holders.find(hashes, now)[slot])


def two() -> ApproximateIndex:
    holders = ApproximateIndex(ApproximateOptions(ttl_s=120.0))
    assert holders.add_worker(A)
    assert holders.add_worker(B)
    return holders


def test_what_was_computed_is_held_from_its_first_block_on() -> None:
    holders = two()
    holders.record_prefill(A, 0, (1, 2, 3), 0.0)
    holders.record_prefill(B, 0, (1,), 0.0)
    assert [held(holders, each, (1, 2, 3, 4), 1.0) for each in (A, B)] == [3, 1]
    assert held(holders, A, (2, 3), 1.0) == 2, "the index knows no order of its own"
    assert held(holders, A, (9, 1), 1.0) == 0
    holders.check_integrity()


def test_an_entry_ends_with_its_time_and_not_long_before() -> None:
    holders = two()
    holders.record_prefill(A, 0, (1, 2), 7.0)
    assert held(holders, A, (1, 2), 7.0 + 89.0) == 2
    assert held(holders, A, (1, 2), 7.0 + 120.0) == 0
    assert holders.num_entries == 0


def test_use_renews_and_a_prompt_in_two_generations_is_found_whole() -> None:
    holders = two()
    holders.record_prefill(A, 0, (1, 2, 3), 0.0)
    holders.record_prefill(A, 0, (1, 2), 80.0)
    assert held(holders, A, (1, 2, 3), 81.0) == 3
    assert held(holders, A, (1, 2, 3), 130.0) == 2
    assert held(holders, A, (1, 2, 3), 500.0) == 0


def test_a_late_call_expires_all_generations() -> None:
    holders = two()
    for at in range(0, 120, 10):
        holders.record_prefill(A, 0, (at,), float(at))
    assert held(holders, A, (110,), 1e6) == 0
    holders.record_prefill(A, 0, (5, 6), 1e6)
    assert held(holders, A, (5, 6), 1e6 + 89.0) == 2
    holders.check_integrity()


def test_more_than_a_worker_has_room_for_pushes_out_what_was_used_longest_ago() -> None:
    holders = ApproximateIndex()
    holders.add_worker(A, 0, total_blocks=30)
    for number in range(20):
        holders.record_prefill(A, 0, tuple(range(10 * number, 10 * number + 10)), 0.001 * number)
    counted = [held(holders, A, tuple(range(10 * at, 10 * at + 10)), 1.0) for at in range(20)]
    assert counted[-3:] == [10, 10, 10], "as much as it has room for is held"
    assert sum(counted) <= 30 * GENERATIONS / (GENERATIONS - 1)
    holders.check_integrity()


def test_beyond_the_cap_the_oldest_go_the_deepest_first() -> None:
    holders = ApproximateIndex(ApproximateOptions(max_bytes=64 * 1024))
    holders.add_worker(A)
    for number in range(200):
        holders.record_prefill(A, 0, tuple(range(100 * number, 100 * number + 50)), 0.0)
        assert holders.num_bytes <= 64 * 1024
    assert held(holders, A, tuple(range(50)), 0.0) == 0
    assert held(holders, A, tuple(range(19900, 19950)), 0.0) == 50


def test_a_dropped_rank_loses_its_blocks_and_frees_its_slot() -> None:
    holders = two()
    for each in (A, B):
        holders.record_prefill(each, 0, (1, 2), 0.0)
    slot = holders.slot_of(A)
    holders.drop_worker(A)
    holders.drop_worker(A)
    assert holders.slot_of(A) is None
    assert holders.num_entries == 2
    holders.record_prefill(A, 0, (1,), 0.0)
    assert holders.num_entries == 2, "unknown"
    other = InstanceId("c")
    holders.add_worker(other)
    assert holders.slot_of(other) == slot
    assert [held(holders, each, (1, 2), 0.0) for each in (other, B)] == [0, 2]
    holders.record_prefill(other, 0, (1,), 29.0)
    assert held(holders, other, (1, 2), 31.0) == 1, "the deadline of the previous owner does not apply"
    holders.check_integrity()


def test_ranks_have_slots_of_their_own() -> None:
    holders = ApproximateIndex()
    holders.add_worker(A, 0)
    holders.add_worker(A, 1)
    assert holders.add_worker(A, 1), "a known one is no error"
    holders.record_prefill(A, 1, (1,), 0.0)
    assert holders.find((1,), 0.0).tolist() == [0, 1]
    assert holders.num_worker_ranks == 2


def test_ranks_are_bounded() -> None:
    holders = ApproximateIndex()
    assert holders.find((1,), 0.0).tolist() == []
    for number in range(MAX_WORKER_RANKS):
        assert holders.add_worker(InstanceId(f"w{number}"))
    assert not holders.add_worker(A)
    assert holders.slot_of(A) is None
    holders.record_prefill(A, 0, (), 0.0)


PLACES = st.integers(0, 3)
PROMPTS = st.tuples(st.integers(0, 3), st.integers(1, 6))
STEPS = st.one_of(
    st.tuples(st.just("computed"), PLACES, PROMPTS, st.floats(0.0, 50.0)),
    st.tuples(st.just("drop"), PLACES, PROMPTS, st.floats(0.0, 50.0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STEPS, max_size=40))
def test_it_is_between_a_model_of_three_quarters_of_the_time_and_one_of_all(
    steps: list[tuple[str, int, tuple[int, int], float]],
) -> None:
    """The plain model: when each block was last used where."""
    holders = ApproximateIndex(ApproximateOptions(ttl_s=120.0))
    used: dict[tuple[str, int], float] = {}
    now = 0.0
    for what, number, (family, length), pause_s in steps:
        now += pause_s
        instance_id = InstanceId(f"w{number}")
        holders.add_worker(instance_id)
        hashes = tuple(100 * family + depth for depth in range(length))
        if what == "computed":
            holders.record_prefill(instance_id, 0, hashes, now)
            used.update({(instance_id, each): now for each in hashes})
        else:
            holders.drop_worker(instance_id)
            used = {key: at for key, at in used.items() if key[0] != instance_id}
        for worker in range(4):
            worker_id = InstanceId(f"w{worker}")
            if holders.slot_of(worker_id) is None:
                continue
            prompt = tuple(100 * family + depth for depth in range(6))
            ages = [now - used.get((worker_id, each), -1e9) for each in prompt]
            least = next((at for at, age in enumerate(ages) if age >= 90.0), 6)
            most = next((at for at, age in enumerate(ages) if age >= 120.0), 6)
            assert least <= held(holders, worker_id, prompt, now) <= most
    holders.check_integrity()


@pytest.mark.parametrize("total_blocks", [0, 1])
def test_a_worker_that_holds_next_to_nothing_breaks_nothing(total_blocks: int) -> None:
    holders = ApproximateIndex()
    holders.add_worker(A, 0, total_blocks)
    for number in range(10):
        holders.record_prefill(A, 0, (number, number + 100), 0.0)
    assert held(holders, A, (9, 109), 0.0) == 2
    holders.check_integrity()
