"""A prompt computed by one real vLLM, its answer by another: its KV goes by NIXL, and nobody can tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from kept import SMALL, Kept, VllmHarness

from kvolt.core.request import Role
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.engines.vllm.launch import NIXL
from kvolt.testing.engines.harness import NotRun
from kvolt.testing.engines.tiers import TIERS

CASES = [case for tier in TIERS if tier.name == "handoff" for case in tier.cases]


@dataclass
class Several(VllmHarness):
    """A case has up to three engines at a time, each another one."""

    others: list[Kept] = field(default_factory=list)
    number: int = 0

    def engine(self) -> VllmEngine:
        engines = [self.kept, *self.others]
        self.number += 1
        return engines[(self.number - 1) % len(engines)].engine()


@pytest.fixture(scope="module")
async def three(tiny: Path) -> AsyncIterator[list[Kept]]:
    engine_args = SMALL | {"kv_transfer_config": {"kv_connector": NIXL, "kv_role": "kv_both"}}
    arguments = VllmArguments(served_name="tiny", engine_args=engine_args, hold_s=3.0)
    kept = [Kept(Role.AGGREGATED, arguments, tiny) for _ in range(3)]
    for each in kept:
        await each.make_ready()
    yield kept
    for each in kept:
        await each.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_handoff(case: Any, three: list[Kept], ending: tuple[int, ...]) -> None:
    for each in three:
        await each.make_ready()
    try:
        await case(Several(three[0], ending, others=three[1:]))
    except NotRun as reason:
        pytest.skip(str(reason))
