"""Who there is: a row for each rank of each worker, kept while it is there; candidates as arrays."""

from __future__ import annotations

import math
from typing import Any

from kvolt.core.card import Capacity, EngineInfo
from kvolt.core.ids import CardHash, InstanceId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Role
from kvolt.router.policy.load import LoadBook
from kvolt.router.policy.roster import Place, Roster

A, B, C = InstanceId("a"), InstanceId("b"), InstanceId("c")


def info(**given: Any) -> EngineInfo:
    return EngineInfo(
        engine="sim",
        role=Role.AGGREGATED,
        model="m",
        card=CardHash("c"),
        block_size=16,
        capacity=Capacity(max_num_seqs=8, max_batch_tokens=100, kv_total_blocks=50),
        **given,
    )


class Seen:
    """A roster, and whom it told of."""

    def __init__(self) -> None:
        self.rows: set[int] = set()
        self.new_models: list[int] = []
        self.roster = Roster(LoadBook(), self.rows.add, self.rows.remove, self.new_models.append)


def test_each_rank_is_a_place_of_its_own() -> None:
    seen = Seen()
    seen.roster.set_workers({A: info(dp_ranks=(0, 1, 1)), B: info(dp_ranks=()), C: None})
    assert sorted(seen.roster.places) == [(A, 0), (A, 1), (B, 0), (C, 0)]
    assert set(seen.roster.places.values()) == seen.rows
    field = seen.roster.field((A, B, C))
    assert field.places == ((A, 0), (A, 1), (B, 0), (C, 0))
    assert [seen.roster.places[place] for place in field.places] == field.rows.tolist()
    assert field.total_blocks.tolist() == [50, 50, 50, 0]
    assert field.max_seqs.tolist() == [8, 8, 8, math.inf]
    assert field.max_batch_tokens.tolist() == [100, 100, 100, math.inf]
    assert seen.roster.field((A, C), dp_rank=1).places == ((A, 1),)


def test_a_worker_that_registers_another_step_model_is_told_by_its_rows() -> None:
    seen, slow = Seen(), LatencyModel(base_s=0.1)
    seen.roster.set_workers({A: info(dp_ranks=(0, 1)), B: info(latency=slow), C: None})
    seen.roster.set_workers({A: info(dp_ranks=(0, 1), taints=("gpu",)), B: info(latency=slow), C: None})
    assert seen.new_models == []
    seen.roster.set_workers({A: info(dp_ranks=(0, 1), latency=slow), B: info(latency=slow), C: None})
    assert seen.new_models == [seen.roster.places[Place(A, 0)], seen.roster.places[Place(A, 1)]]


def test_who_stays_keeps_its_row_and_who_goes_gives_it_back() -> None:
    seen = Seen()
    seen.roster.set_workers({A: info(dp_ranks=(0, 1)), B: info()})
    row = seen.roster.places[Place(B, 0)]
    before = seen.roster.field((A, B))
    seen.roster.set_workers({B: info(taints=("gpu",)), C: None})
    assert seen.roster.places[Place(B, 0)] == row
    assert len(seen.rows) == 2
    field = seen.roster.field((A, B))
    assert field is not before
    assert (field.places, field.taints) == (((B, 0),), (frozenset({"gpu"}),))


def test_the_same_candidates_are_worked_out_once() -> None:
    seen = Seen()
    seen.roster.set_workers({A: None, B: None})
    everyone = (A, B)
    field = seen.roster.field(everyone)
    assert seen.roster.field(everyone) is field
    assert seen.roster.field([A, B]) is field
    assert seen.roster.field((A,)) is not field
    for number in range(100):
        seen.roster.field((A, InstanceId(str(number))))
    assert len(seen.roster._fields) <= 64
    again = seen.roster.field(everyone)
    assert again.places == field.places


def test_a_list_that_changes_is_looked_at_again() -> None:
    seen = Seen()
    seen.roster.set_workers({A: None, B: None})
    allowed = [A]
    assert seen.roster.field(allowed).places == ((A, 0),)
    allowed.append(B)
    assert seen.roster.field(allowed).places == ((A, 0), (B, 0))
