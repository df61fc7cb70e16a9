"""For `make test-vllm`, which has vLLM in an environment of its own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.testing.engine_harness import engine_run
from kvolt.testing.tiny_models import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from kept import SMALL, Kept, VllmHarness


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With many tokens that end an answer: by one alone a random model would hardly ever end."""
    ends = {"eos_token_id": list(range(2, 900, 14))}
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", generation=ends, head_dim=32)


@pytest.fixture(scope="session")
async def kept(tiny: Path) -> AsyncIterator[Kept]:
    kept = Kept(Role.AGGREGATED, VllmArguments(served_name="tiny", engine_args=dict(SMALL)), tiny)
    await kept.make_ready()
    yield kept
    await kept.close()


@pytest.fixture(scope="session")
async def ending(kept: Kept) -> tuple[int, ...]:
    """Looked for, since what a random model says is not the same on every machine."""
    async with engine_run(VllmHarness(kept)) as run:
        for start in range(3, 200):
            asked = Request(
                request_id=RequestId(f"r{start}"),
                model=run.info.model,
                token_ids=tuple(range(start, start + 6)),
                stop=StopConditions(max_tokens=60),
                sampling=Sampling(seed=1, num_choices=2),
            )
            answer = await run.answer(asked)
            lengths = sorted(map(len, answer.tokens.values()))
            if 3 <= lengths[0] < lengths[1] < 30:
                return asked.token_ids
    raise AssertionError("no prompt ends shortly")


@pytest.fixture
async def harness(kept: Kept, ending: tuple[int, ...]) -> VllmHarness:
    await kept.make_ready()
    return VllmHarness(kept, ending)
