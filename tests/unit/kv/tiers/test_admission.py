"""What is worth keeping: by its depth, and by whose it is."""

from __future__ import annotations

import pytest
from tests.unit.kv.tiers.tier_lab import keys, sequence

from kvolt.core.request import RoutingHints
from kvolt.kv.tiers.admission import TierAdmission
from kvolt.kv.tiers.lower_tier import KnownKeys


def test_all_is_kept_where_nothing_is_said() -> None:
    admission = TierAdmission()
    admission.add_request(keys(sequence("a", 4)), RoutingHints(tenant="x"))
    assert list(admission.admitted_indexes(sequence("a", 4))) == [0, 1, 2, 3]
    assert len(admission) == 0, "nothing is remembered for it"
    assert list(admission.admitted_indexes([])) == []


def test_only_beginnings_are_kept() -> None:
    admission = TierAdmission(depth=3)
    blocks = sequence("a", 6)
    assert list(admission.admitted_indexes(blocks)) == [0, 1, 2]
    assert list(admission.admitted_indexes(blocks[2:])) == [0]
    assert list(admission.admitted_indexes(blocks[4:])) == []


def test_only_some_tenants_are_kept_and_their_answers() -> None:
    admission = TierAdmission(tenants=["gold"])
    mine, others = sequence("mine", 6), sequence("others", 4)
    admission.add_request(keys(mine[:4]), RoutingHints(tenant="gold"))
    admission.add_request(keys(others), RoutingHints(tenant="tin"))
    admission.add_request(keys(others), RoutingHints())
    assert list(admission.admitted_indexes(mine[:4])) == [0, 1, 2, 3]
    assert list(admission.admitted_indexes(mine[4:5])) == [0], "an answer's first block follows the prompt"
    assert list(admission.admitted_indexes(mine[5:])) == [0], "and the next that one"
    assert list(admission.admitted_indexes(others)) == []
    admission.add_request(keys(others[:2]), RoutingHints(tenant="gold"))
    assert list(admission.admitted_indexes(others[:2])) == [0, 1], "now one of them asks for it, too"


@pytest.mark.parametrize(("priority", "is_kept"), [(4, False), (5, True), (6, True)])
def test_only_what_is_urgent_enough(priority: int, is_kept: bool) -> None:
    admission = TierAdmission(min_priority=5, depth=2)
    blocks = sequence("a", 4)
    admission.add_request(keys(blocks), RoutingHints(priority=priority))
    assert list(admission.admitted_indexes(blocks)) == ([0, 1] if is_kept else [])


def test_what_is_remembered_is_bounded() -> None:
    admission = TierAdmission(tenants=["gold"])
    admission._admitted = KnownKeys(5)
    for name in "abc":
        admission.add_request(keys(sequence(name, 4)), RoutingHints(tenant="gold"))
    assert len(admission) == 5
