"""An engine dies amid an answer: over HTTP it reads as if nothing had happened, whatever was asked for."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace
from tests.unit.engines.lab import ARGUMENTS, MODEL, Answer, Frontend, Lab, until
from tests.unit.frontend.serving import TOOL

from kvolt.core.delta import StepOutput
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sim.engine import SimArguments, SimEngine
from kvolt.frontend.model import ModelOptions
from kvolt.testing import run_virtual


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


class Fuse:
    """Burns with the tokens that are told, and kills one engine."""

    def __init__(self, num_tokens: int | None) -> None:
        self.left = num_tokens

    def burn(self, step: StepOutput) -> bool:
        if self.left is None:
            return False
        self.left -= len(step.plain_tokens) + sum(len(delta.token_ids) for _, delta in step.deltas)
        if self.left > 0:
            return False
        self.left = None
        return True


class Mortal(SimEngine):
    def __init__(self, arguments: SimArguments, fuse: Fuse, hangs: bool = False) -> None:
        super().__init__(EngineSpec(model=MODEL, role=Role.AGGREGATED), arguments)
        self._fuse = fuse
        self._hangs = hangs

    async def steps(self) -> AsyncIterator[StepOutput]:
        async for step in super().steps():
            yield step
            if self._fuse.burn(step):
                if self._hangs:
                    await asyncio.Event().wait()
                raise RuntimeError("a kernel failed")


async def _ask(edge: Frontend, fields: dict[str, Any]) -> Answer:
    is_chat = "messages" in fields
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return await edge.ask(path, {"model": MODEL, **fields})


def asked(
    fields: dict[str, Any], dies_after: int | None, say: str | None = None, **options: Any
) -> tuple[Answer, Frontend]:
    """One answer of two engines that have not computed anything yet, one of which dies after so many tokens."""
    found: list[tuple[Answer, Frontend]] = []
    arguments = replace(ARGUMENTS, context_length=2048, answer_text=say, answer_from_prompt=say is None)

    async def scenario() -> None:
        async with Lab() as lab:
            fuse = Fuse(dies_after)
            for name in ("w0", "w1"):
                await lab.worker(name, Mortal(arguments, fuse))
            edge = await lab.frontend(model_options=ModelOptions(**options))
            await edge.ready()
            await until(lambda: len(edge.models.get(MODEL).client.candidates()) == 2)
            found.append((await _ask(edge, fields), edge))
            assert [str(error) for error in lab.errors] == (
                [] if dies_after is None else ["the engine died (RuntimeError)"]
            )
            lab.errors.clear()
            assert edge.admission.num_running == 0

    run_virtual(scenario)
    return found[0]


_CALL_ID = re.compile(r"call_[0-9a-f]+")


def told(answer: Answer) -> Any:
    """All that the client reads, but for what differs between any two answers."""
    assert answer.status == 200
    bodies = answer.chunks if "event-stream" in answer.headers["content-type"] else [answer.json]
    for body in bodies:
        del body["id"], body["created"]
    # Choices come in their own order each, but not always in the same among them.
    bodies.sort(key=lambda body: body["choices"][0]["index"] if body["choices"] else 99)
    return json.loads(_CALL_ID.sub("call", json.dumps(bodies)))


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "the water"}], "max_tokens": 200}
CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "plain": ({"prompt": "the water", "max_tokens": 8, "seed": 3}, None),
    "reasoning and tools": (
        {**CHAT, "tools": [TOOL]},
        f"<think>so and so</think>well<tool_call>{CALL}</tool_call>",
    ),
    "a stop string": ({**CHAT, "stop": ["sea and", "never"]}, "the water of the sea and the land"),
    "a stop string that stays": (
        {**CHAT, "stop": ["sea and"], "include_stop_str_in_output": True},
        "the water of the sea and the land",
    ),
    "half characters": (CHAT, "é 🌊 ü"),
    "log probabilities": ({**CHAT, "logprobs": True, "top_logprobs": 2}, "the water of the sea 🌊"),
    "echo": ({"prompt": "the water", "max_tokens": 6, "echo": True, "logprobs": 1}, None),
    "the prompt's log probabilities": ({"prompt": "the water", "max_tokens": 4, "prompt_logprobs": 1}, None),
    "choices": ({"prompt": "<say>the sea<or/>the water of the land</say>", "n": 3, "max_tokens": 30}, None),
    "token ids": ({**CHAT, "nvext": {"extra_fields": ["completion_token_ids"]}}, "the water of the sea"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_answer_reads_as_if_nothing_had_happened(name: str, stream: bool) -> None:
    fields, say = CASES[name]
    if stream and "prompt_logprobs" in fields:
        pytest.skip("those are not streamed")
    if stream:
        usage = {"include_usage": True, "continuous_usage_stats": name == "plain"}
        fields = {**fields, "stream": True, "stream_options": usage}
    wanted = told(asked(fields, None, say)[0])
    num_tokens = wanted[-1]["usage"]["completion_tokens"]
    assert num_tokens >= 4
    cuts = range(1, num_tokens) if stream else range(1, num_tokens, 3)
    for cut in cuts:
        answer, edge = asked(fields, cut, say)
        assert told(answer) == wanted, f"cut after {cut}"
        assert edge.sample("kvolt_journey_migrations_total", reason="engine_died") == 1


def test_it_is_counted_once_and_the_gap_is_one_between_tokens() -> None:
    fields = {"prompt": "the water", "max_tokens": 20, "seed": 3, "stream": True}
    _, edge = asked(fields, 7)
    ongoing = {"model": MODEL, "migration_type": "ongoing_request"}
    assert edge.sample("kvolt_frontend_model_migration_total", **ongoing) == 1
    assert edge.sample("kvolt_frontend_model_migration_total", migration_type="new_request") == 0
    took = "kvolt_frontend_model_migration_duration_seconds"
    assert edge.sample(f"{took}_count", **ongoing, outcome="success") == 1
    assert 0 < edge.sample(f"{took}_sum", **ongoing) < 0.1
    assert edge.sample("kvolt_frontend_model_migration_limit", model=MODEL) == 3
    assert edge.sample("kvolt_frontend_time_to_first_token_seconds_count") == 1
    assert edge.sample("kvolt_frontend_inter_token_latency_seconds_count") == 19
    assert edge.sample("kvolt_frontend_output_tokens_total") == 20
    assert edge.sample("kvolt_frontend_requests_total", status="success") == 1


def test_it_can_be_turned_off() -> None:
    fields = {"prompt": "the water", "max_tokens": 20, "seed": 3, "stream": True}
    answer, edge = asked(fields, 7, migration_limit=0)
    assert answer.events[-1]["error"]["code"] == "engine_died"
    assert len(answer.events) == 8
    assert edge.sample("kvolt_frontend_model_migration_total") == 0
    unary = asked({**fields, "stream": False}, 7, migration_limit=0)[0]
    assert unary.status == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("num_workers", "is_whole"), [(2, True), (1, False)])
def test_an_engine_that_hangs_amid_an_answer_is_replaced(
    num_workers: int, is_whole: bool, stream: bool
) -> None:
    """The text is cut short only where no other worker is left."""

    async def scenario() -> None:
        async with Lab() as lab:
            fuse = Fuse(7)
            for number in range(num_workers):
                await lab.worker(f"w{number}", Mortal(ARGUMENTS, fuse, hangs=True))
            edge = await lab.frontend()
            await edge.ready()
            await until(lambda: len(edge.models.get(MODEL).client.candidates()) == num_workers)
            fields = {"prompt": "the water", "max_tokens": 20, "ignore_eos": True, "stream": stream}
            answer = await _ask(
                edge, {**fields, "stream_options": {"include_usage": True}} if stream else fields
            )
            assert answer.status == 200
            bodies = answer.chunks if stream else [answer.json]
            [usage] = [body["usage"] for body in bodies if body.get("usage")]
            assert usage["completion_tokens"] == (20 if is_whole else 7)
            ended_by = [body["nvext"]["ended_by"] for body in bodies if "nvext" in body]
            assert ended_by == ([] if is_whole else [{"reason": "deadline", "stage": "between"}])

    run_virtual(scenario)
