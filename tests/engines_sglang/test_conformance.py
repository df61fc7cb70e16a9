"""A real SGLang passes the engine suite: what every engine must do, and what it tells of its blocks."""

from __future__ import annotations

import pytest
from kept import SglangHarness

from kvolt.testing.engines.harness import Case, NotRun
from kvolt.testing.engines.tiers import TIERS

CASES = [case for tier in TIERS if tier.name in ("core", "events") for case in tier.cases]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_aggregated(case: Case, harness: SglangHarness) -> None:
    try:
        await case(harness)
    except NotRun as reason:
        pytest.skip(str(reason))
