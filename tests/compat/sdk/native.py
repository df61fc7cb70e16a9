"""A real kvolt with a real model: a frontend and a worker whose engine computes random weights.

The model says nonsense, so what a test asks of it is form: that a grammar holds, that probabilities are
probabilities, that the same seed says the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import httpx
import openai
from pydantic import BaseModel, Field
from tests.integration.processes import Bench, until_ready

from kvolt.testing.tiny_models import tiny_checkpoint

MODEL = "tiny"
CONTEXT_LENGTH = 2048
KV_BLOCKS = 96
BLOCK_SIZE = 16
"""Fewer tokens fit than the context has: a chat that names no limit must be answered all the same."""

_ENGINE = {
    "served_name": MODEL,
    "dtype": "float32",
    "threads": 1,
    "kv_blocks": KV_BLOCKS,
    "block_size": BLOCK_SIZE,
    "measure_steps": "false",
}


def engine_flags(**more: object) -> list[str]:
    """Of `kvolt worker`: small, exact, one thread."""
    return [part for key, value in {**_ENGINE, **more}.items() for part in ("--arg", f"{key}={value}")]


class Weather(BaseModel):
    """What a caller wants filled in. Bounded, so that a model that never thinks of an end comes to one."""

    city: Annotated[str, Field(max_length=12)]
    days: Annotated[int, Field(ge=1, le=14)]
    kind: Literal["sun", "rain", "snow"]


WEATHER = openai.pydantic_function_tool(Weather, name="get_weather")
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "strict": True,
        "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
    },
}
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "get_weather"}}

LONG_ENOUGH = 500
"""Tokens in which the longest Weather closes, with all the white space that a grammar lets it have."""


@dataclass(frozen=True, slots=True)
class Native:
    """A frontend and its worker."""

    bench: Bench
    url: str
    admin: dict[str, str]
    """URL of each process's admin server."""

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    def token_ids(self, text: str) -> list[int]:
        answer = httpx.post(f"{self.url}/tokenize", json={"model": MODEL, "prompt": text})
        ids: list[int] = answer.raise_for_status().json()["tokens"]
        return ids

    def token_id(self, text: str) -> int:
        [found] = self.token_ids(text)
        return found


async def start(bench: Bench) -> Native:
    folder = tiny_checkpoint(bench.folder / "checkpoint", max_position_embeddings=CONTEXT_LENGTH)
    start_worker(bench, folder)
    _, url = await bench.frontend()
    await until_ready(url, timeout_s=50)
    views = await bench.until_seen("frontend", "worker")
    return Native(bench, url, {name: f"http://{view.admin}" for name, view in views.items()})


def start_worker(bench: Bench, folder: Path) -> None:
    bench.start("worker", str(folder), "--name", "worker", *engine_flags(), name="worker")


def ask(text: str = "Tell me a story.") -> list[Any]:
    return [{"role": "user", "content": text}]
