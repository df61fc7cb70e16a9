"""For `make test-vllm`, which has vLLM in an environment of its own."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvolt.core.request import Role
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.testing.engines.harness import engine_run
from kvolt.testing.tiny_models import tiny_checkpoint

sys.path.insert(0, str(Path(__file__).parent))

from kept import SMALL, Kept, VllmHarness
from tests.ending import prompt_that_ends


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
    async with engine_run(VllmHarness(kept)) as run:
        return await prompt_that_ends(run)


@pytest.fixture
async def harness(kept: Kept, ending: tuple[int, ...]) -> VllmHarness:
    await kept.make_ready()
    return VllmHarness(kept, ending)
