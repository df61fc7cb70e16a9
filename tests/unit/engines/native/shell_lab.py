"""A native engine around the fake core, and someone who reads its steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.unit.engines.native import fake_core

from kvolt.core.delta import StepOutput, plain_delta
from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell.engine import NativeEngine
from kvolt.runtime.tasks import Scope

DEADLINE_S = 30.0


def make_engine(load: str = "load", model: str = "fake", **arguments: Any) -> NativeEngine:
    spec = EngineSpec(model=model, role=Role.AGGREGATED)
    settings = NativeArguments(**{"block_size": 4, "process": "thread", **arguments})
    return NativeEngine(spec, settings, core=f"{fake_core.__name__}:{load}")


def request(
    name: str,
    *,
    prompt: int = 10,
    tokens: int = 8,
    choices: int = 1,
    fault: str | None = None,
    prompt_logprobs: int | None = None,
    lora: str | None = None,
) -> Request:
    return Request(
        request_id=RequestId(name),
        model="fake",
        token_ids=tuple(3 + index % 900 for index in range(prompt)),
        stop=StopConditions(max_tokens=tokens, ignore_eos=True),
        sampling=Sampling(seed=1, num_choices=choices, prompt_logprobs=prompt_logprobs),
        lora=lora,
        extra={"fault": fault} if fault else {},
    )


class Reader:
    """Reads all steps of an engine and sorts them by request."""

    def __init__(self, engine: NativeEngine) -> None:
        self.engine = engine
        self.steps: list[StepOutput] = []
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, list[int]] = {}
        """Lengths of the choices that have ended."""
        self.failed: dict[str, ErrorInfo] = {}
        self.load = WorkerLoad()
        self.error: Exception | None = None
        self._step = asyncio.Event()

    async def run(self) -> None:
        try:
            async for step in self.engine.steps():
                self._take(step)
        except Exception as error:
            self.error = error
        self._step.set()

    def _take(self, step: StepOutput) -> None:
        self.steps.append(step)
        plain = zip(step.plain_ids, map(plain_delta, step.plain_tokens), strict=True)
        for request_id, delta in (*step.deltas, *plain):
            self.tokens.setdefault(request_id, []).extend(delta.token_ids)
            if delta.finish is not None and delta.usage is not None:
                self.ended.setdefault(request_id, []).append(delta.usage.completion_tokens)
        self.failed |= dict(step.failed)
        self.load = step.load or self.load
        self._step.set()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._step.clear()
                await self._step.wait()

    async def finish(self, *names: str) -> None:
        await self.until(lambda: all(name in self.ended for name in names))

    async def lengths(self, name: str, num_choices: int) -> list[int]:
        """Of all choices of a request, as they ended."""
        await self.until(lambda: len(self.ended.get(name, ())) == num_choices)
        return self.ended[name]


@asynccontextmanager
async def running(load: str = "load", **arguments: Any) -> AsyncIterator[tuple[NativeEngine, Reader]]:
    engine = make_engine(load, **arguments)
    async with asyncio.timeout(DEADLINE_S):
        await engine.start()
    reader = Reader(engine)
    async with Scope("lab") as scope:
        scope.start(reader.run(), "steps")
        try:
            yield engine, reader
        finally:
            await engine.close()


def is_alive(pid: int) -> bool:
    """A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until_gone(pid: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while is_alive(pid):
            await asyncio.sleep(0.01)


def pid_of(engine: NativeEngine) -> int:
    pid: int = engine._host.pid  # type: ignore[union-attr]
    return pid
