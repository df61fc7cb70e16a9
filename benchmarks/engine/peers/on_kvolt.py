"""kvolt's native engine in the seat, through the engine contract: submitted like a worker does, read from `steps`.

usage: on_kvolt.py FOLDER THREADS [ARGUMENT=VALUE ...]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from importlib.metadata import version
from itertools import count

import seat

import kvolt
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import Engine, EngineSpec
from kvolt.engines.registry import build_engine, parse_argument


class Seated:
    """An engine and the loop it lives in; the loop runs only while there is a batch."""

    def __init__(self, engine: Engine, runner: asyncio.Runner) -> None:
        self._engine = engine
        self._runner = runner
        self._steps = engine.steps()
        self._numbers = count()

    def generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> seat.Answers:
        return self._runner.run(self._generate(prompts, num_output))

    async def _generate(self, prompts: Sequence[Sequence[int]], num_output: int) -> seat.Answers:
        sampling = Sampling(temperature=0.0)
        stop = StopConditions(max_tokens=num_output, ignore_eos=True)
        model = self._engine.card.name
        sequence_of = {RequestId(f"bench-{next(self._numbers)}"): at for at in range(len(prompts))}
        answers = seat.Answers(len(prompts))
        for request_id, prompt in zip(sequence_of, map(tuple, prompts), strict=True):
            self._engine.submit(
                Request(request_id=request_id, model=model, token_ids=prompt, sampling=sampling, stop=stop)
            )
        left = len(prompts) * num_output
        while left:
            output = await anext(self._steps)
            at = answers.now()
            if output.failed:
                raise SystemExit(f"the engine gave up: {output.failed[0][1]}")
            for request_id, token in zip(output.plain_ids, output.plain_tokens, strict=True):
                answers.add(sequence_of[request_id], (token,), at)
            for request_id, delta in output.deltas:
                answers.add(sequence_of[request_id], delta.token_ids, at)
            left -= len(output.plain_tokens) + sum(len(delta.token_ids) for _, delta in output.deltas)
        return answers


def main(folder: str, threads: int, texts: Sequence[str]) -> None:
    arguments = {"device": "cpu", "threads": threads, **dict(parse_argument(text) for text in texts)}
    with asyncio.Runner() as runner:
        try:
            engine = build_engine("native", EngineSpec(model=folder, role=Role.AGGREGATED), arguments)
            info = runner.run(engine.start())
        except KvoltError as error:
            raise SystemExit(f"{error}") from None
        try:
            about = {
                "kvolt": kvolt.__version__,
                "torch": version("torch"),
                "arguments": arguments,
                "block_size": info.block_size,
                "max_batch_tokens": info.capacity.max_batch_tokens,
            }
            seat.serve(about, Seated(engine, runner).generate)
        finally:
            runner.run(engine.close())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:-1])
