"""A real kvolt for the SDKs, and words for what they ask it.

The simulated model says what a prompt tells it to, so that unmodified clients can be shown any answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from openai import BaseModel, OpenAI, RateLimitError, Stream
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionChunk
from tests.integration.processes import MODEL, PATIENCE_S, Bench

Answer = TypeVar("Answer", bound=BaseModel)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}

CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
}

_ARGUMENTS = ("answer_from_prompt=true", "words=null", 'latency={"context_token_s":1e-6}')
SPEAKS = [part for argument in _ARGUMENTS for part in ("--arg", argument)]
"""A step takes a millisecond for each thousand tokens before it: a short answer comes at once, one without a limit
takes minutes, in which it can be cancelled or run out of time."""


@dataclass(frozen=True, slots=True)
class Server:
    """A frontend with two workers, and a second frontend that lets hardly anything in."""

    bench: Bench
    url: str
    narrow_url: str

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def narrow_api(self) -> str:
        return f"{self.narrow_url}/v1"

    def token_ids(self, text: str) -> list[int]:
        answer = httpx.post(f"{self.url}/tokenize", json={"model": MODEL, "prompt": text})
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids


async def start(bench: Bench) -> Server:
    for number in range(2):
        bench.worker(f"worker-{number}", *SPEAKS)
    _, url = await bench.frontend()
    limits = ("max_requests=1", "max_body_bytes=65536", "strict_fields=true")
    narrow = [word for limit in limits for word in ("--set", f"frontend.{limit}")]
    _, narrow_url = await bench.frontend(*narrow, name="narrow")
    async with asyncio.timeout(PATIENCE_S), httpx.AsyncClient() as client:
        for each in (url, narrow_url):
            while (await client.get(f"{each}/health")).json()["workers"] != {MODEL: 2}:
                await asyncio.sleep(0.05)
    return Server(bench, url, narrow_url)


def say(*texts: str) -> list[dict[str, Any]]:
    """Messages that are answered with this text; of several, one for each choice."""
    return [{"role": "user", "content": f"<say>{'<or/>'.join(texts)}</say>"}]


def ask(text: str = "Tell me a story.") -> list[dict[str, Any]]:
    """Messages that are answered with words until the limit."""
    return [{"role": "user", "content": text}]


def call(name: str, arguments: str) -> str:
    """How this model writes a tool call."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def checked(answer: Answer) -> Answer:
    """The same answer. The SDK takes whatever comes; its types say what should have come."""
    type(answer).model_validate(answer.to_dict(mode="json"))
    return answer


@contextmanager
def occupied(narrow: OpenAI) -> Iterator[Stream[ChatCompletionChunk]]:
    """An answer without end, on a frontend that gives one at a time; afterwards there is room again."""
    with narrow.chat.completions.create(model=MODEL, messages=ask(), stream=True) as stream:
        next(stream)
        yield stream
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            narrow.chat.completions.create(model=MODEL, messages=say("x"))
        except RateLimitError:
            assert time.monotonic() < deadline, "who has left is still counted"
        else:
            return


def counts_of(usage: CompletionUsage | None) -> CompletionUsage:
    """Without what was found in a cache: of two alike the second finds more."""
    assert usage is not None
    return usage.model_copy(update={"prompt_tokens_details": None})
