"""What vLLM itself answers, asked as its users ask it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from kept import Kept


class OwnAnswers:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._number = 0

    async def tokens(self, prompt: tuple[int, ...], lora: Any = None, **params: Any) -> list[int]:
        from vllm.sampling_params import SamplingParams

        self._number += 1
        given = {"prompt_token_ids": list(prompt)}
        outputs = [
            output
            async for output in self._llm.generate(
                given, SamplingParams(**params), f"own-{self._number}", lora_request=lora
            )
        ]
        return list(outputs[-1].outputs[0].token_ids)


@asynccontextmanager
async def own_answers(kept: Kept) -> AsyncIterator[OwnAnswers]:
    """While no engine of ours reads what it says."""
    await kept.make_ready()
    assert kept.launched is not None
    llm = kept.launched.llm
    yield OwnAnswers(llm)
    llm.output_handler.cancel()  # begun by its `generate`: outputs are ours again
    llm.output_handler = None
