"""An answer without HTTP and without workers: deltas in, events or a body out."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

from kvolt.core.delta import Delta, StageTimes
from kvolt.engines.sim.model import tokenizer_json, word_token_ids
from kvolt.frontend.answers.answer import Answer, AnswerSpec
from kvolt.frontend.answers.streaming import StreamingAnswer, StreamingReceiver, TokenFanOut
from kvolt.frontend.answers.whole import WholeAnswer
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.openai_api.serializer import ChatSerializer, CompletionSerializer
from kvolt.journey.journey import Journey
from kvolt.runtime.http.writer import ResponseWriter, TickWrites

WORDS = word_token_ids()


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(tokenizer_json())


def encode(text: str) -> tuple[int, ...]:
    return tuple(vocabulary().tokenizer.encode(text, add_special_tokens=False).ids)


def text_of(*token_ids: int) -> str:
    return vocabulary().decode(token_ids)


class Watch:
    """An observer that remembers, and a clock that moves on by a second with each look."""

    def __init__(self) -> None:
        self.num_firsts = 0
        self.gaps: list[tuple[float, int]] = []
        self._time = 100.0

    def on_first_token(self) -> None:
        self.num_firsts += 1

    def on_token_gap(self, seconds: float, num_tokens: int) -> None:
        self.gaps.append((seconds, num_tokens))

    def now(self) -> float:
        self._time += 1.0
        return self._time


class FakeJourney:
    """Remembers what an answer wants of it."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.held = 0
        instance = SimpleNamespace(id="w1", process="worker-1")
        self.decision = SimpleNamespace(instance=instance, dp_rank=None)
        self.instances = [instance]
        self.num_retries = 0
        self.decode_wait_s: float | None = None
        self.prefill_decision = None
        self.stages = StageTimes()

    def cancel(self) -> None:
        self.cancelled += 1

    def hold(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1


def make_plan(chat: bool = True, prompts: int = 1, watch: Watch | None = None, **fields: Any) -> AnswerSpec:
    watch = watch or Watch()
    numbers = iter(range(1000))
    serializer = ChatSerializer(lambda: f"call_{next(numbers)}") if chat else CompletionSerializer()
    return AnswerSpec(
        request_id="r",
        created=7,
        model="m",
        serializer=serializer,
        vocabulary=vocabulary(),
        prompts=[(1, 2, 3)] * prompts,
        observer=watch,
        now=watch.now,
        **fields,
    )


def with_journeys(answer: Answer, count: int) -> list[FakeJourney]:
    journeys = [FakeJourney() for _ in range(count)]
    for journey in journeys:
        answer.add_journey(cast(Journey, journey))
    return journeys


class Wire:
    """The transport of a connection; what has left it."""

    def __init__(self) -> None:
        self.raw = b""
        self.num_writes = 0

    def write(self, data: bytes) -> None:
        self.raw += data
        self.num_writes += 1


class Live:
    """A LiveAnswer with its writer, its journeys and the fan that steps go through."""

    def __init__(self, plan: AnswerSpec, chunked: bool = True) -> None:
        self.wire = Wire()
        self.writer = ResponseWriter(
            cast(asyncio.Transport, self.wire),
            TickWrites(asyncio.get_running_loop()),
            b"HEAD\r\n\r\n",
            chunked,
            True,
        )
        self._chunked = chunked
        self.fan = TokenFanOut(plan.now)
        self.answer = StreamingAnswer(plan, self.writer, self.fan)
        self.journeys = with_journeys(self.answer, len(plan.prompts))

    @property
    def receivers(self) -> list[StreamingReceiver]:
        return self.answer.receivers

    def give(self, *deltas: Delta, prompt: int = 0) -> None:
        for delta in deltas:
            self.receivers[prompt].on_item(delta)

    def step(self, token_id: int, prompt: int = 0) -> None:
        """A plain token, as in a step of a worker."""
        self.fan.on_step([self.receivers[prompt]], [token_id])

    async def body(self) -> bytes:
        """All that has left, without head and framing."""
        await asyncio.sleep(0)
        self.writer.flush()
        head, _, rest = self.wire.raw.partition(b"HEAD\r\n\r\n")
        assert head == b""
        if not self._chunked:
            return rest
        body = b""
        while rest:
            size, _, rest = rest.partition(b"\r\n")
            length = int(size, 16)
            assert rest[length : length + 2] == b"\r\n"
            body, rest = body + rest[:length], rest[length + 2 :]
            assert length or not rest, "something came after the last chunk"
        return body

    async def events(self) -> list[Any]:
        found = [event for event in (await self.body()).decode().split("\n\n") if event.startswith("data: ")]
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in found]

    async def choices(self) -> list[dict[str, Any]]:
        """Of all events before [DONE]."""
        return [choice for event in await self.events() if event != "[DONE]" for choice in event["choices"]]

    async def text(self, index: int = 0) -> str:
        return "".join(shown(choice) for choice in await self.choices() if choice["index"] == index)


class Whole:
    """A WholeAnswer with its journeys."""

    def __init__(self, plan: AnswerSpec) -> None:
        numbers = iter(range(1000))
        self.fan = TokenFanOut(plan.now)
        self.answer = WholeAnswer(plan, lambda: f"call_{next(numbers)}", self.fan)
        self.journeys = with_journeys(self.answer, len(plan.prompts))

    def give(self, *deltas: Delta, prompt: int = 0) -> None:
        for delta in deltas:
            self.answer.receivers[prompt].on_item(delta)

    def step(self, token_id: int, prompt: int = 0) -> None:
        self.fan.on_step([self.answer.receivers[prompt]], [token_id])

    def end(self, prompt: int = 0) -> None:
        self.answer.receivers[prompt].on_end(None)

    @property
    def body(self) -> Any:
        return json.loads(self.answer.body())

    @property
    def choices(self) -> list[dict[str, Any]]:
        return list(self.body["choices"])


def shown(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return str((choice.get("message") or choice.get("delta") or {}).get("content") or "")
