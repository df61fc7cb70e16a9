"""A remote engine in front of a fake server, and what came out of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.remote import RemoteArguments, RemoteEngine
from kvolt.testing.engines.harness import Run, engine_run

SPEC = EngineSpec(model="x", role=Role.AGGREGATED)
SAID = [442, 613, 219, 300, 157, 230]
"""What the recorded servers answered to the prompt of `record.GREEDY`."""
PATHS = {"vllm": "/v1/completions", "sglang": "/generate"}
NEVER_S = 3600.0


class Lab:
    deadline_s = 10.0

    def __init__(self, url: str, folder: Path, **arguments: Any) -> None:
        given: dict[str, Any] = {"url": url, "tokenizer": str(folder), "probe_interval_s": NEVER_S}
        self._arguments = RemoteArguments(**given | arguments)
        self.made: list[RemoteEngine] = []

    def engine(self) -> RemoteEngine:
        engine = RemoteEngine(SPEC, self._arguments)
        self.made.append(engine)
        return engine

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(10, 10 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        raise NotImplementedError


@asynccontextmanager
async def attached(url: str, folder: Path, **arguments: Any) -> AsyncIterator[tuple[Run, RemoteEngine]]:
    lab = Lab(url, folder, **arguments)
    async with engine_run(lab) as run:
        yield run, lab.made[0]


def greedy(name: str = "r", **stop: Any) -> Request:
    return Request(
        request_id=RequestId(name),
        model="tiny",
        token_ids=tuple(range(10, 110)),
        stop=StopConditions(**{"max_tokens": 6, "ignore_eos": True} | stop),
        sampling=Sampling(temperature=0.0),
    )
