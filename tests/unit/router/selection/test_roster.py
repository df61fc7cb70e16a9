"""WorkerTable: a row for each worker rank, and candidate sets as arrays."""

from __future__ import annotations

import math
from typing import Any

from msgspec.structs import replace

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.ids import CardHash, InstanceId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.router.policy.load import WorkerLoads
from kvolt.router.selection.roster import WorkerTable
from kvolt.router.worker_rank import WorkerDpRank

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def info(**slots_or_none: Any) -> EngineInfo:
    return EngineInfo(
        engine="sim",
        role=Role.AGGREGATED,
        model="m",
        card=CardHash("c"),
        block_size=16,
        capacity=Capacity(max_num_seqs=8, max_batch_tokens=100, kv_total_blocks=50),
        **slots_or_none,
    )


class Seen:
    """A roster, and whom it values of."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.new_models: list[int] = []
        self.roster = WorkerTable(WorkerLoads(), self.rows.add, self.rows.remove, self.new_models.append)


def test_each_rank_is_a_row_of_its_own() -> None:
    seen = Seen()
    seen.roster.set_workers({A: info(dp_ranks=(0, 1, 1)), B: info(dp_ranks=()), C: None})
    assert sorted(seen.roster.rows) == [(A, 0), (A, 1), (B, 0), (C, 0)]
    assert set(seen.roster.rows.values()) == seen.rows
    field = seen.roster.candidates((A, B, C))
    assert field.worker_ranks == ((A, 0), (A, 1), (B, 0), (C, 0))
    assert [seen.roster.rows[place] for place in field.worker_ranks] == field.rows.tolist()
    assert field.total_blocks.tolist() == [50, 50, 50, 0]
    assert field.max_seqs.tolist() == [8, 8, 8, math.inf]
    assert field.max_batch_tokens.tolist() == [100, 100, 100, math.inf]
    assert seen.roster.candidates((A, C), dp_rank=1).worker_ranks == ((A, 1),)


def test_a_worker_without_step_capacity_counts_with_one_token() -> None:
    """Prompts are divided into steps of that size."""
    seen = Seen()
    unlimited = Capacity(max_num_seqs=8, max_batch_tokens=0, kv_total_blocks=50)
    seen.roster.set_workers({A: replace(info(), capacity=unlimited)})
    assert seen.roster.candidates((A,)).max_batch_tokens.tolist() == [1]


def test_another_step_model_is_reported_by_row() -> None:
    seen, slow = Seen(), LatencyModel(base_s=0.1)
    seen.roster.set_workers({A: info(dp_ranks=(0, 1)), B: info(latency=slow), C: None})
    seen.roster.set_workers({A: info(dp_ranks=(0, 1), taints=("gpu",)), B: info(latency=slow), C: None})
    assert seen.new_models == []
    seen.roster.set_workers({A: info(dp_ranks=(0, 1), latency=slow), B: info(latency=slow), C: None})
    assert seen.new_models == [seen.roster.rows[WorkerDpRank(A, 0)], seen.roster.rows[WorkerDpRank(A, 1)]]


def test_remaining_workers_keep_their_rows_and_removed_ones_free_them() -> None:
    seen = Seen()
    seen.roster.set_workers({A: info(dp_ranks=(0, 1)), B: info()})
    row = seen.roster.rows[WorkerDpRank(B, 0)]
    before = seen.roster.candidates((A, B))
    seen.roster.set_workers({B: info(taints=("gpu",)), C: None})
    assert seen.roster.rows[WorkerDpRank(B, 0)] == row
    assert len(seen.rows) == 2
    field = seen.roster.candidates((A, B))
    assert field is not before
    assert (field.worker_ranks, field.taints) == (((B, 0),), (frozenset({"gpu"}),))


def test_the_same_candidates_are_worked_out_once() -> None:
    seen = Seen()
    seen.roster.set_workers({A: None, B: None})
    everyone = (A, B)
    field = seen.roster.candidates(everyone)
    assert seen.roster.candidates(everyone) is field
    assert seen.roster.candidates([A, B]) is field
    assert seen.roster.candidates((A,)) is not field
    for number in range(100):
        seen.roster.candidates((A, InstanceId(str(number))))
    assert len(seen.roster._candidate_sets) <= 64
    again = seen.roster.candidates(everyone)
    assert again.worker_ranks == field.worker_ranks


def test_a_list_that_changes_is_looked_at_again() -> None:
    seen = Seen()
    seen.roster.set_workers({A: None, B: None})
    allowed = [A]
    assert seen.roster.candidates(allowed).worker_ranks == ((A, 0),)
    allowed.append(B)
    assert seen.roster.candidates(allowed).worker_ranks == ((A, 0), (B, 0))
