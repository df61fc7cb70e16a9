"""The vllm engine over the stand-in passes the engine suite: its own launch, its own sockets, another core."""

from __future__ import annotations

import pytest
from tests.unit.engines.vllm.lab import MOVING, Harness, with_args

from kvolt.testing.engines.tiers import TIERS, suites_for

CASES = {tier.name: tier.cases for tier in TIERS if tier.name in ("core", "events", "handoff")}
SCARCE = {"num_gpu_blocks_override": 35}
"""Room for little more than one request of the longest: the others wait, or are preempted."""


async def test_it_offers_these_tiers(model: str) -> None:
    assert list(suites_for(Harness(model).engine())) == [case for cases in CASES.values() for case in cases]


@pytest.mark.parametrize("case", [*CASES["core"], *CASES["events"]], ids=lambda case: case.__name__)
async def test_on_a_real_loop(case, model: str) -> None:
    await case(Harness(model))


@pytest.mark.parametrize("case", [*CASES["core"], *CASES["events"]], ids=lambda case: case.__name__)
async def test_with_few_blocks(case, model: str) -> None:
    await case(Harness(model, with_args(**SCARCE)))


@pytest.mark.parametrize("case", CASES["handoff"], ids=lambda case: case.__name__)
async def test_handoffs(case, model: str) -> None:
    await case(Harness(model, MOVING))
