"""TensorRT-LLM's stand-in as a harness of the engine suite: a folder for a model, and prompts that it knows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.unit.engines.trtllm import stand_in

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.model import tokenizer_json
from kvolt.engines.trtllm.arguments import Seeds, TrtllmArguments
from kvolt.engines.trtllm.engine import TrtllmEngine

BLOCK_SIZE = 16
LLM_ARGS: dict[str, Any] = {
    "max_seq_len": 256,
    "max_batch_size": 48,
    "max_num_tokens": 64,
    "enable_chunked_prefill": True,
    "cache_transceiver_config": {"backend": "DEFAULT"},
    "kv_cache_config": {"max_tokens": 200 * BLOCK_SIZE, "tokens_per_block": BLOCK_SIZE},
}
ARGUMENTS = TrtllmArguments(llm_args=LLM_ARGS, hold_s=1.0, poll_s=0.005, seeds=Seeds.BY_POSITION)


def with_llm_args(arguments: TrtllmArguments = ARGUMENTS, **changed: Any) -> TrtllmArguments:
    return replace(arguments, llm_args={**arguments.llm_args, **changed})


def with_blocks(num_blocks: int, arguments: TrtllmArguments = ARGUMENTS) -> TrtllmArguments:
    cache = {**arguments.llm_args["kv_cache_config"], "max_tokens": num_blocks * BLOCK_SIZE}
    return with_llm_args(arguments, kv_cache_config=cache)


def make_model(folder: Path) -> str:
    """As much of a model as there is without weights."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "eos_token_id": stand_in.EOS,
        "bos_token_id": 1,
        "vocab_size": stand_in.VOCAB_SIZE,
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def ending_prompt() -> tuple[int, ...]:
    """One whose answers with seeds 1 and 2 end by themselves, at lengths of their own."""
    for last in range(10, 900):
        prompt = (stand_in.ENDS, 5, last)
        lengths = [_length(prompt, seed) for seed in (1, 2)]
        if all(3 <= length <= 40 for length in lengths) and lengths[0] != lengths[1]:
            return prompt
    raise AssertionError("no such prompt")


def _length(prompt: tuple[int, ...], seed: int) -> int:
    params = stand_in.SamplingParams(end_id=stand_in.EOS, top_p=1.0, temperature=1.0, seed=seed)
    tokens = list(prompt)
    while tokens[-1] != stand_in.EOS and len(tokens) < 100:
        tokens.append(stand_in.next_token(tokens, params, 0)[0])
    return len(tokens) - len(prompt)


class Harness:
    deadline_s = 15.0

    def __init__(
        self, model: str, arguments: TrtllmArguments = ARGUMENTS, role: Role = Role.AGGREGATED
    ) -> None:
        self._spec = EngineSpec(model=model, role=role)
        self._arguments = arguments

    def engine(self) -> TrtllmEngine:
        return TrtllmEngine(self._spec, self._arguments)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(100, 100 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return ending_prompt()
