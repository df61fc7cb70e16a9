"""The trtllm engine over the stand-in passes the engine suite, but for what it refuses by name."""

from __future__ import annotations

import pytest
from tests.unit.engines.trtllm.lab import Harness, with_blocks

from kvolt.core.errors import Unsupported
from kvolt.testing.engines import answer_cases as engine_answer_cases
from kvolt.testing.engines import event_cases as engine_event_cases
from kvolt.testing.engines.harness import NotRun
from kvolt.testing.engines.tiers import TIERS, suites_for

CASES = [case for tier in TIERS if tier.name in ("core", "events", "handoff") for case in tier.cases]
REFUSED = {
    engine_event_cases.clear_removes_all_blocks: "clear_kv",
    engine_event_cases.clear_while_computing: "clear_kv",
    engine_event_cases.aborted_blocks_are_published_correctly: "clear_kv",
}
"""What TensorRT-LLM has no means for."""
UNDECLARED = engine_answer_cases.prompt_logprobs_come_once
"""Needs a sampling field that the engine does not declare."""
POSSIBLE = [case for case in CASES if case not in REFUSED and case is not UNDECLARED]


async def test_it_offers_these_tiers(model: str) -> None:
    assert list(suites_for(Harness(model).engine())) == CASES


@pytest.mark.parametrize("case", POSSIBLE, ids=lambda case: case.__name__)
async def test_on_a_real_loop(case, model: str) -> None:
    await case(Harness(model))


@pytest.mark.parametrize("case", POSSIBLE, ids=lambda case: case.__name__)
async def test_with_few_blocks(case, model: str) -> None:
    """Room for little more than one request of the longest: the others wait, or are put out of the cache."""
    await case(Harness(model, with_blocks(34)))


@pytest.mark.parametrize(
    ("case", "feature"), REFUSED.items(), ids=lambda value: getattr(value, "__name__", value)
)
async def test_what_it_cannot_is_refused(case, feature: str, model: str) -> None:
    with pytest.raises(Unsupported) as refused:
        await case(Harness(model))
    assert refused.value.fields["feature"] == feature


async def test_a_case_that_needs_an_undeclared_field_is_not_run(model: str) -> None:
    with pytest.raises(NotRun, match="does not support prompt_logprobs"):
        await UNDECLARED(Harness(model))
