"""A client's deadline ends the work on its prompt: at the next cut of an engine that cuts prompts by predicted time."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, Frontend, Lab, RunningWorker, is_empty, sim, until
from tests.unit.frontend.serving import served

from kvolt.core.latency import LatencyModel
from kvolt.scheduler.step_pace import LONGEST_STEP_S, StepPace

TOKEN_S = 0.02
SLOW = replace(ARGUMENTS, context_length=4096, latency=LatencyModel(base_s=0.01, prefill_token_s=TOKEN_S))
PROMPT = [3 + number % 200 for number in range(1464)]
"""29 s at this engine, which would compute it in one step."""


def test_a_deadline_stops_a_long_prompt_within_two_cuts() -> None:
    async def body(_lab: Lab, edge: Frontend, running: RunningWorker) -> None:
        engine = running.engine
        engine._scheduler.planner.pace = StepPace(SLOW.latency)
        loop = asyncio.get_running_loop()
        deadline = {"x-kvolt-timeout-ms": "5000"}
        answer = await edge.complete(deadline, prompt=PROMPT, max_tokens=4)
        assert (answer.status, answer.json["error"]["code"]) == (504, "timeout")
        stopped_at = loop.time()
        await until(lambda: is_empty(engine))
        assert loop.time() - stopped_at <= 2 * LONGEST_STEP_S
        asked_at = loop.time()
        assert (await edge.complete(prompt=PROMPT[:16], max_tokens=1)).status == 200
        assert loop.time() - asked_at < 2 * LONGEST_STEP_S

    served(body, lambda: sim(SLOW))
