"""A real vLLM passes the engine suite: what every engine must do, and what it tells of its blocks."""

from __future__ import annotations

from typing import Any

import pytest

from kvolt.testing.engines.harness import NotRun
from kvolt.testing.engines.tiers import TIERS

CASES = [case for tier in TIERS if tier.name in ("core", "events") for case in tier.cases]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_aggregated(case: Any, harness: Any) -> None:
    try:
        await case(harness)
    except NotRun as reason:
        pytest.skip(str(reason))
