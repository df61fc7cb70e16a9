"""Real vLLM engines for the tests of this folder. They take half a minute to start: they are kept for many tests."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.vllm.arguments import VllmArguments
from kvolt.engines.vllm.engine import VllmEngine
from kvolt.engines.vllm.launch import Launched, launch, socket_folder
from kvolt.runtime.clock import SystemClock

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 256,
    "block_size": 32,
    "num_gpu_blocks_override": 96,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
}


class KeptLlm:
    """An AsyncLLM that outlives the engines around it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def shutdown(self, timeout: float | None = None) -> None:
        pass


@dataclass
class Kept:
    """Launched once; each engine that is made of it begins with an empty cache and no requests."""

    role: Role
    arguments: VllmArguments
    model: Path
    launched: Launched | None = None
    sockets: Any = field(default_factory=socket_folder)

    async def make_ready(self) -> None:
        if self.launched is None:
            spec = EngineSpec(model=str(self.model), role=self.role)
            folder = Path(self.sockets.name)
            self.launched = await asyncio.to_thread(launch, spec, self.arguments, folder, SystemClock())
            return
        core = self.launched.llm.engine_core
        await core.pause_scheduler_async("abort", True)
        await core.resume_scheduler_async()

    def engine(self) -> VllmEngine:
        spec = EngineSpec(model=str(self.model), role=self.role)
        return VllmEngine(spec, self.arguments, launcher=self._again)

    def _again(self, *_: object) -> Launched:
        assert self.launched is not None, "make_ready first"
        kept = self.launched
        return Launched(
            llm=KeptLlm(kept.llm),
            card=kept.card,
            info=kept.info,
            limits=kept.limits,
            vocab_size=kept.vocab_size,
            events=kept.events,
            moves_kv=kept.moves_kv,
            processors=kept.processors,
            takes_embeds=kept.takes_embeds,
        )

    async def close(self) -> None:
        if self.launched is not None:
            await asyncio.to_thread(self.launched.llm.shutdown, 10.0)
            self.launched = None
        self.sockets.cleanup()


@dataclass
class VllmHarness:
    kept: Kept
    ending: tuple[int, ...] = ()
    deadline_s: float = 240.0
    settle_s: float = 0.15
    """vLLM tells of its blocks by a socket of its own, a moment after the step."""

    def engine(self) -> VllmEngine:
        return self.kept.engine()

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return self.ending
