"""An SglangEngine without SGLang: a host that keeps what it is told and says what a real one has said (recorded)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.ids import RequestId
from kvolt.core.request import Request, Role, Sampling, StopConditions
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sglang.host.messages import (
    Answer,
    Batch,
    Command,
    Facts,
    Generate,
    RankLoad,
    Ready,
    Row,
    Start,
    Stop,
    decode_answer,
    decode_command,
)
from kvolt.engines.sim.model import EOS, SPECIAL, tokenizer_json

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())
FACTS = replace(
    msgspec.convert(RECORDED["facts"], Facts),
    kv_sources=(),  # no sockets, unless a test has some
    metrics_folder=None,
)
PROMPT = tuple(range(20, 60))


def recorded_batches(name: str) -> list[Batch]:
    """What SGLang said of a recorded request."""
    batches = [msgspec.convert(each["message"], Batch) for each in RECORDED["messages"]]
    return [batch for batch in batches if batch.rows[0].rid.startswith(f"{name}/")]


def request(name: str = "r", **fields: Any) -> Request:
    given: dict[str, Any] = {
        "request_id": RequestId(name),
        "model": "tiny",
        "token_ids": PROMPT,
        "stop": StopConditions(max_tokens=3, ignore_eos=True),
        "sampling": Sampling(temperature=0.0),
    }
    return Request(**{**given, **fields})


def row(rid: str, *tokens: int, finish: dict[str, Any] | None = None, cached: int = 0) -> Row:
    return Row(rid, list(tokens), finish, cached)


LENGTH = {"type": "length", "length": 3}


class FakeHost:
    """Over no socket, but in the bytes that would go over it."""

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()

    def __init__(self, facts: Facts = FACTS) -> None:
        self.facts = facts
        self.commands: list[Command] = []
        self.lost = asyncio.Event()
        self.how = "exited with code 0"
        self._is_over = asyncio.Event()
        self._on_answer: Callable[[Answer], None] | None = None

    async def start(self, on_answer: Callable[[Answer], None]) -> FakeHost:
        self._on_answer = on_answer
        return self

    @property
    def link(self) -> FakeHost:
        return self

    def send(self, command: Command) -> None:
        self.commands.append(decode_command(msgspec.msgpack.encode(command)))
        if isinstance(command, Start):
            self.say(Ready(self.facts))
        elif isinstance(command, Stop):
            self.kill()

    def say(self, answer: Answer) -> None:
        assert self._on_answer is not None
        self._on_answer(decode_answer(msgspec.msgpack.encode(answer)))

    def rows(self, *rows: Row, used_tokens: int = 48) -> None:
        self.say(Batch(list(rows), [RankLoad(0, 0, 0, used_tokens)]))

    @property
    def asked(self) -> list[Generate]:
        return [each for each in self.commands if isinstance(each, Generate)]

    async def wait_exit(self) -> str:
        await self._is_over.wait()
        return self.how

    def kill(self) -> None:
        self._is_over.set()
        self.lost.set()

    def close(self) -> None:
        pass


def model_folder(folder: Path) -> Path:
    """All of a model that is read outside SGLang."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[EOS]}))
    return folder


class Lab:
    """A started engine, its host, and the steps as they are read."""

    def __init__(self, engine: SglangEngine, host: FakeHost) -> None:
        self.engine = engine
        self.host = host
        self._steps = engine.steps()

    async def step(self) -> StepOutput:
        async with asyncio.timeout(5):
            return await anext(self._steps)


@asynccontextmanager
async def started(
    folder: Path,
    facts: Facts = FACTS,
    *,
    role: Role = Role.AGGREGATED,
    **arguments: Any,
) -> AsyncIterator[Lab]:
    host = FakeHost(facts)
    spec = EngineSpec(model=str(model_folder(folder / "model")), role=role)
    given = SglangArguments(served_name="tiny", **arguments)
    engine = SglangEngine(spec, given, new_host=host.start)
    await engine.start()
    try:
        yield Lab(engine, host)
    finally:
        await engine.close()
