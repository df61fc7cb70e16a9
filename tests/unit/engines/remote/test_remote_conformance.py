"""The remote engine passes the core tier, in front of a small model that speaks as vLLM or as SGLang do."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.engines.remote.fake_server import length_of_answer

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.remote import RemoteArguments, RemoteEngine
from kvolt.testing.engines.answer_cases import prompt_logprobs_come_once
from kvolt.testing.engines.suite import CASES, NotRun
from kvolt.testing.model_server import ModelServer, model_folder

SPEC = EngineSpec(model="x", role=Role.AGGREGATED)


class RemoteHarness:
    def __init__(self, server: ModelServer, folder: Path) -> None:
        self._server = server
        self._arguments = RemoteArguments(
            url=server.url,
            tokenizer=str(folder),
            max_num_seqs=12,
            probe_interval_s=3600.0,  # no stats: what the engine counts itself is what is looked at
        )

    def engine(self) -> RemoteEngine:
        return RemoteEngine(SPEC, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return next(
            prompt
            for start in range(3, 600)
            for prompt in [tuple(range(start, start + 12))]
            if 2 <= (first := length_of_answer(prompt, 1)) <= 40
            and 2 <= (second := length_of_answer(prompt, 2)) <= 40
            and first != second
        )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
async def test_the_core_tier(case, kind: str, tmp_path: Path) -> None:
    if case is prompt_logprobs_come_once:
        pytest.skip("a server behind HTTP is not asked for them: Unsupported")
    async with ModelServer(kind) as server:
        try:
            await case(RemoteHarness(server, model_folder(tmp_path)))
        except NotRun as reason:
            pytest.fail(f"not run: {reason}")
