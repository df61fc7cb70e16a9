"""vLLM's stand-in as a harness of the engine suite: a folder for a model, and prompts that it knows."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.unit.engines.vllm.fake_core import ENDS, EOS, OTHER_EOS, VOCAB_SIZE, Core, next_token
from tests.unit.engines.vllm.stand_in import AsyncLLM, SamplingParams

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.model import SPECIAL, tokenizer_json
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.engines.vllm.launch import NIXL, Launched, launch
from kvolt.testing.engines.harness import Run, engine_run

ARGUMENTS = VllmArguments(served_name="tiny", hold_s=1.0)
MOVING = replace(ARGUMENTS, engine_args={"kv_transfer_config": {"kv_connector": NIXL, "kv_role": "kv_both"}})


def with_args(arguments: VllmArguments = ARGUMENTS, **changed: Any) -> VllmArguments:
    return replace(arguments, engine_args={**arguments.engine_args, **changed})


def make_model(folder: Path) -> str:
    """As much of a model as there is without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    texts: dict[str, dict[str, Any]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "eos_token_id": EOS,
            "bos_token_id": 1,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 256,
        },
        "generation_config.json": {
            "eos_token_id": [EOS, OTHER_EOS],
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
        },
        "tokenizer_config.json": {"eos_token": SPECIAL[EOS], "bos_token": None, "chat_template": "{{ x }}"},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def ending_prompt() -> tuple[int, ...]:
    """One whose answers with seeds 1 and 2 end by themselves, at lengths of their own."""
    for last in range(10, 900):
        prompt = (ENDS, 9, last)
        lengths = [_length(prompt, seed) for seed in (1, 2)]
        if all(3 <= length <= 30 for length in lengths) and lengths[0] != lengths[1]:
            return prompt
    raise AssertionError("no such prompt")


def _length(prompt: tuple[int, ...], seed: int) -> int:
    params, tokens = SamplingParams(seed=seed), list(prompt)
    while len(tokens) < 100:
        tokens.append(next_token(tokens, params, len(tokens) - len(prompt), "")[0])
        if tokens[-1] in (EOS, OTHER_EOS):
            break
    return len(tokens) - len(prompt)


class Harness:
    deadline_s = 20.0

    def __init__(
        self,
        model: str,
        arguments: VllmArguments = ARGUMENTS,
        role: Role = Role.AGGREGATED,
        launcher: Callable[..., Launched] = launch,
    ) -> None:
        self._spec = EngineSpec(model=model, role=role)
        self._arguments = arguments
        self._launcher = launcher

    def engine(self) -> VllmEngine:
        def launcher(*given: Any) -> Launched:
            launched = self._launcher(*given)
            launched.llm.engine_core.num_batches = lambda: sum(feed.num_batches for feed in engine._kv._feeds)
            return launched

        engine = VllmEngine(self._spec, self._arguments, launcher=launcher)
        return engine

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return ending_prompt()


def core_of(engine: VllmEngine) -> Core:
    core = engine._core
    assert isinstance(core, Core)
    return core


@asynccontextmanager
async def running(harness: Harness) -> AsyncIterator[tuple[Run, Core]]:
    async with engine_run(harness) as run:
        yield run, core_of(run.engine)  # type: ignore[arg-type]


def only_llm() -> AsyncLLM:
    [llm] = AsyncLLM.made
    return llm
