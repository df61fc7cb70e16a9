"""The native engine through the engine suite: with a core without torch, in a thread and in a process, and as it is,
with a tiny random model."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.native.shell_lab import Reader, make_engine, request

from kvolt.core.request import Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell.engine import NativeEngine
from kvolt.runtime.tasks import Scope
from kvolt.testing.engines.cancel_cases import abort_storms
from kvolt.testing.engines.event_cases import CASES as EVENTS
from kvolt.testing.engines.harness import NotRun
from kvolt.testing.engines.suite import CASES as CORE
from kvolt.testing.engines.tiers import TIERS, suites_for

ALL = [case for tier in TIERS for case in tier.cases]


def test_it_has_to_pass_all_tiers() -> None:
    assert list(suites_for(make_engine())) == ALL


# --- the shell


class FakeHarness:
    def __init__(self, process: str) -> None:
        self._process = process

    def engine(self) -> NativeEngine:
        return make_engine(process=self._process)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return (17, 18, 19, 20, 21, 22)


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
async def test_in_a_thread(case: Any) -> None:
    await case(FakeHarness("thread"))


@pytest.mark.parametrize("case", [*CORE, *EVENTS], ids=lambda case: case.__name__)
async def test_in_a_process(case: Any) -> None:
    await case(FakeHarness("own"))


# --- the whole engine


class NativeHarness:
    deadline_s = 55.0

    def __init__(self, folder: Path, ending: tuple[int, ...] = (), process: str = "thread") -> None:
        self._folder = folder
        self._ending = ending
        self._process = process

    def engine(self) -> NativeEngine:
        arguments = NativeArguments(
            served_name="tiny",
            device="cpu",
            dtype="float32",
            block_size=4,
            kv_blocks=160,
            context_length=256,
            max_num_seqs=16,
            max_batch_tokens=64,
            process="own" if self._process == "own" else "thread",
            measure_steps=self._process == "own",  # which takes longer than most cases
        )
        return NativeEngine(EngineSpec(model=str(self._folder), role=Role.AGGREGATED), arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return self._ending


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with many tokens that end an answer: by one alone a random model would hardly ever end."""
    pytest.importorskip("torch")
    from kvolt.testing.tiny_models import tiny_checkpoint

    ends = {"eos_token_id": list(range(2, 900, 14))}
    return tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny", generation=ends)


@pytest.fixture(scope="module")
def ending(folder: Path) -> tuple[int, ...]:
    """Looked for, since what a random model says is not the same on every machine."""
    return asyncio.run(_find_ending(NativeHarness(folder).engine()))


async def _find_ending(engine: NativeEngine) -> tuple[int, ...]:
    await engine.start()
    reader = Reader(engine)
    async with Scope("find") as scope:
        scope.start(reader.run(), "steps")
        try:
            for start in range(3, 200):
                prompt = tuple(range(start, start + 6))
                asked = request(f"r{start}")
                engine.submit(
                    replace(
                        asked,
                        token_ids=prompt,
                        stop=StopConditions(max_tokens=60),
                        sampling=Sampling(seed=1, num_choices=2),
                    )
                )
                lengths = await reader.lengths(asked.request_id, 2)
                if 3 <= min(lengths) < max(lengths) < 30:
                    return prompt
        finally:
            await engine.close()
    raise AssertionError("no prompt ends shortly")


@pytest.fixture
def short_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from kvolt.engines.native import capabilities

    monkeypatch.setattr(capabilities, "HOLD_S", 2.0)


@pytest.mark.usefixtures("short_holds")
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.__name__)
async def test_with_a_model(case: Any, folder: Path, ending: tuple[int, ...]) -> None:
    try:
        await case(NativeHarness(folder, ending))
    except NotRun as reason:
        pytest.skip(str(reason))


async def test_with_a_model_in_a_process(folder: Path) -> None:
    await abort_storms(NativeHarness(folder, process="own"))
