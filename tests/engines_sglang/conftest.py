"""For `make test-sglang`, which has SGLang in an environment of its own (`setup.sh` makes it)."""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

# Read by SGLang and torch in the processes that tests start. Compiled on a CPU, its sampler takes a minute.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))

from kept import SMALL, KeptHost, SglangHarness, spec_of
from tests.ending import prompt_that_ends

from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.host.messages import Start
from kvolt.testing.engines.harness import engine_run
from kvolt.testing.tiny_models import tiny_checkpoint

_LEVEL = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One engine, so one loop; those that start others come first, while it is not there yet."""
    items.sort(key=lambda item: item.path.stem not in ("test_life", "test_lora", "test_serving"))
    for item in items:
        if Path(__file__).parent in item.path.parents and inspect.iscoroutinefunction(item.function):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With many tokens that end an answer: by one alone a random model would hardly ever end."""
    ends = {"eos_token_id": list(range(2, 900, 14))}
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", generation=ends)


@pytest.fixture(scope="session")
def arguments() -> SglangArguments:
    return SglangArguments(served_name="tiny", engine_args=dict(SMALL))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def host(tiny: Path, arguments: SglangArguments) -> AsyncIterator[KeptHost]:
    with tempfile.TemporaryDirectory(prefix="kvolt-sglang-") as folder:
        host = KeptHost()
        try:
            await host.start(Start(spec_of(tiny), arguments, str(tiny), folder, _LEVEL))
            yield host
        finally:
            await host.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def ending(host: KeptHost, tiny: Path, arguments: SglangArguments) -> tuple[int, ...]:
    async with engine_run(SglangHarness(host, spec_of(tiny), arguments)) as run:
        return await prompt_that_ends(run)


@pytest_asyncio.fixture(loop_scope="session")
async def harness(
    host: KeptHost, tiny: Path, arguments: SglangArguments, ending: tuple[int, ...]
) -> SglangHarness:
    await host.make_ready()
    return SglangHarness(host, spec_of(tiny), arguments, ending)
