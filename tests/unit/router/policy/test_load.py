"""WorkerLoads: reservations counted and released once, corrected by first tokens and reports."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.ids import InstanceId
from kvolt.core.load import WorkerLoad
from kvolt.router.policy.load import WorkerLoads, projected_load
from kvolt.router.worker_rank import ReservedLoad, WorkerDpRank


def figures(loads: WorkerLoads, row: int) -> tuple[float, float, float, float, float]:
    return (
        float(loads.prefill_tokens[row]),
        float(loads.blocks[row]),
        float(loads.requests[row]),
        float(loads.decoding[row]),
        float(loads.context_tokens[row]),
    )


def test_a_reservation_counts_as_prompt_then_as_answer_then_not_at_all() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    reservation_id = loads.reserve(row, 100, 60, 9.0, prefill_s=2.0, now=10.0)
    assert figures(loads, row) == (60, 9, 1, 0, 0)
    assert loads.idle_at[row] == 12.0
    assert loads.mark_first_token(reservation_id, 12.0) is not None
    assert figures(loads, row) == (0, 9, 1, 1, 100)
    assert loads.release(reservation_id, 20.0) is not None
    assert figures(loads, row) == (0, 0, 0, 0, 0)
    assert loads.num_reservations == 0


def test_a_prompt_among_decoding_requests_takes_a_step_longer() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    first = loads.reserve(row, 10, 10, 1.0, 2.0, 0.0, step_s=0.5)
    assert loads.idle_at[row] == 2.0, "no step was running"
    loads.mark_first_token(first, 2.0)
    second = loads.reserve(row, 10, 10, 1.0, 2.0, 3.0, step_s=0.5)
    assert loads.idle_at[row] == 5.5
    loads.reserve(row, 10, 10, 1.0, 2.0, 4.0, step_s=0.5)
    assert loads.idle_at[row] == 7.5, "the steps of the one before it are counted already"
    loads.mark_first_token(second, 5.2)
    assert loads.idle_at[row] == 7.2


def test_each_end_counts_once() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    reservation_id = loads.reserve(row, 100, 100, 9.0, 2.0, 0.0)
    assert loads.mark_first_token(reservation_id, 1.0) is not None
    assert loads.mark_first_token(reservation_id, 2.0) is None
    assert loads.release(reservation_id, 3.0) is not None
    assert loads.release(reservation_id, 4.0) is None
    assert loads.mark_first_token(reservation_id, 5.0) is None
    assert figures(loads, row) == (0, 0, 0, 0, 0)


def test_prompts_queue_behind_each_other_and_a_late_one_delays_the_rest() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    first = loads.reserve(row, 10, 10, 1.0, 2.0, 0.0)
    second = loads.reserve(row, 10, 10, 1.0, 3.0, 1.0)
    assert loads.idle_at[row] == 5.0
    loads.mark_first_token(first, 3.5)  # a second and a half later than it should
    assert loads.idle_at[row] == 6.5
    loads.mark_first_token(second, 6.0)
    assert loads.idle_at[row] == 6.0


def test_a_cancelled_prompt_frees_its_time() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    loads.reserve(row, 10, 10, 1.0, 2.0, 0.0)
    second = loads.reserve(row, 10, 10, 1.0, 3.0, 0.0)
    loads.release(second, 1.0)
    assert loads.idle_at[row] == 2.0


def test_a_half_computed_prompt_frees_the_other_half() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    only = loads.reserve(row, 10, 10, 1.0, 2.0, 0.0)
    loads.release(only, 1.5)
    assert loads.idle_at[row] == 1.5


def test_a_removed_worker_drops_its_reservations_and_clears_its_row() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    reservation_id = loads.reserve(row, 10, 10, 1.0, 2.0, 0.0)
    loads.drop_row(row)
    assert loads.num_reservations == 0
    assert loads.add_row() == row
    assert figures(loads, row) == (0, 0, 0, 0, 0)
    assert loads.release(reservation_id, 1.0) is None, "of the worker that was"


def test_there_may_be_more_rows_than_at_first() -> None:
    loads = WorkerLoads()
    rows = [loads.add_row() for _ in range(100)]
    reservation_ids = [loads.reserve(row, row, row, 1.0, 1.0, 0.0) for row in rows]
    assert [float(loads.prefill_tokens[row]) for row in rows] == rows
    assert all(loads.release(reservation_id, 0.0) is not None for reservation_id in reservation_ids)


def test_reported_load_beyond_own_reservations_is_external() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    reservation_id = loads.reserve(row, 10, 10, 4.0, 1.0, 0.0)
    loads.on_report(row, WorkerLoad(running=3, waiting=1, kv_used_blocks=20))
    assert (loads.requests[row], loads.blocks[row]) == (4.0, 20.0)
    loads.on_report(row, WorkerLoad(running=1, kv_used_blocks=9))
    assert (loads.requests[row], loads.blocks[row]) == (1.0, 4.0), "only ours is there"
    loads.release(reservation_id, 1.0)
    assert (loads.requests[row], loads.blocks[row]) == (0.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from("bgf"), st.integers(0, 9), st.floats(0, 5)), max_size=60))
def test_nothing_is_left_when_all_is_over(moves: list[tuple[str, int, float]]) -> None:
    loads = WorkerLoads()
    rows = [loads.add_row(), loads.add_row()]
    reservation_ids: list[int] = []
    now = 0.0
    for move, number, passed_s in moves:
        now += passed_s
        if move == "b":
            reservation_ids.append(
                loads.reserve(rows[number % 2], 10 + number, number, number, passed_s, now)
            )
        elif reservation_ids:
            reservation_id = reservation_ids[number % len(reservation_ids)]
            if move == "g":
                loads.mark_first_token(reservation_id, now)
            else:
                loads.release(reservation_id, now)
                reservation_ids.remove(reservation_id)
    for reservation_id in reservation_ids:
        assert loads.release(reservation_id, now) is not None
    for row in rows:
        assert figures(loads, row) == pytest.approx((0, 0, 0, 0, 0))
        assert loads.idle_at[row] <= now + 1e-6 or not moves


def replica_load(requests: float, decoding: float = 0.0, queue_s: float = 0.0) -> ReservedLoad:
    return ReservedLoad(InstanceId("w"), 0, requests, decoding, 30.0, 12.0, 70.0, queue_s)


def test_replica_load_counts_but_is_not_own_load() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    place = WorkerDpRank(InstanceId("w"), 0)
    ours = loads.reserve(row, 10, 8, 4.0, 1.0, 0.0)
    loads.set_replica_load(row, replica_load(3, 2, queue_s=5.0), 0.0)
    assert figures(loads, row) == (38, 16, 4, 2, 70)
    assert loads.queue_s(np.array([row]), 2.0).tolist() == [3.0]
    assert loads.queue_s(np.array([row]), 0.5).tolist() == [5.0]
    assert loads.own_loads({place: row}, 0.25) == [ReservedLoad(place.instance_id, 0, 1, 0, 8, 4, 0, 0.75)]
    loads.mark_first_token(ours, 1.0)
    assert loads.own_loads({place: row}, 1.0) == [ReservedLoad(place.instance_id, 0, 1, 1, 0, 4, 10, 0)]
    loads.release(ours, 1.0)
    assert loads.own_loads({place: row}, 1.0) == []
    loads.set_replica_load(row, ReservedLoad(place.instance_id), 1.0)
    assert figures(loads, row) == (0, 0, 0, 0, 0)


def test_a_report_and_replica_load_are_not_added() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    loads.on_report(row, WorkerLoad(running=3, kv_used_blocks=20))
    loads.set_replica_load(row, replica_load(2, 1), 0.0)
    assert figures(loads, row) == (30, 20, 3, 2, 70), "one of the three is of an unknown sender"
    loads.on_report(row, WorkerLoad(running=1, kv_used_blocks=2))
    assert figures(loads, row) == (30, 12, 2, 1, 70), "the report may be the older one"
    loads.on_report(row, WorkerLoad())
    loads.set_replica_load(row, replica_load(0), 0.0)
    assert loads.requests[row] == 0


def test_used_blocks_are_reported_plus_incoming_ones() -> None:
    loads = WorkerLoads()
    row = loads.add_row()
    first = loads.reserve(row, 100, 50, 10.0, 1.0, 0.0)
    assert loads.used_blocks[row] == 10.0, "nothing was heard of it"
    loads.on_report(row, WorkerLoad(running=1, kv_used_blocks=7))
    assert loads.used_blocks[row] == 7.0 + 5.0, "half of its prompt is there"
    loads.mark_first_token(first, 1.0)
    assert loads.used_blocks[row] == 7.0
    second = loads.reserve(row, 100, 100, 20.0, 1.0, 1.0)
    assert loads.used_blocks[row] == 27.0
    loads.release(second, 2.0)
    assert loads.used_blocks[row] == 7.0
    loads.release(first, 3.0)
    assert loads.used_blocks[row] == 0.0, "whatever the last report was: no request is there"


def test_load_evens_out_over_an_answer() -> None:
    requests, tokens = projected_load(np.array([0.0, 4.0, 20.0]), np.array([0.0, 0.0, 0.0]))
    assert requests[0] == requests[1] == 8.0, "requests that come go there until it is at the average"
    assert requests[2] == pytest.approx(8.0 + 0.5 * (1 - 8 / 21) * 12)
    assert tokens.tolist() == [0.0, 0.0, 0.0]


def test_arrival_rate_and_prefill_share_decay() -> None:
    loads = WorkerLoads()
    row, idle = loads.add_row(), loads.add_row()
    for second in range(100):
        for _ in range(4):
            loads.reserve(row, 100, 100, 10.0, 0.05, float(second))
    assert loads.arrivals_per_s(99.5) == pytest.approx(4.0, rel=0.1)
    busy = loads.prefill_share(np.array([row, idle]), 99.5)
    assert busy.tolist() == pytest.approx([0.2, 0.0], rel=0.1)
    assert loads.arrivals_per_s(200.0) == pytest.approx(0.0, abs=1e-3)
