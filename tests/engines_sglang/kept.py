"""A real SGLang for the tests of this folder. It takes half a minute to start: one is kept for many tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from kvolt.core.card import EngineInfo
from kvolt.core.request import Role
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.engine import SglangEngine
from kvolt.engines.sglang.host.messages import (
    Abort,
    Answer,
    Command,
    Done,
    Fatal,
    Flush,
    KvSource,
    Ready,
    Start,
    Stop,
)
from kvolt.engines.sglang.host_supervisor import HostProcess

SMALL: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "grammar_backend": "xgrammar",
    "dtype": "float32",
    "disable_overlap_schedule": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 2048,
    "page_size": 16,
    "max_running_requests": 16,
    "chunked_prefill_size": 256,
    "sleep_on_idle": True,
    "enable_deterministic_inference": True,
}
_ALL = ""
"""The beginning of every name."""
_OURS = 0
_SUBSCRIBED_S = 0.3


class KeptHost:
    """A host process that outlives the engines around it."""

    def __init__(self) -> None:
        self._process: HostProcess | None = None
        self._ready: asyncio.Future[Ready] | None = None
        self._flushed: asyncio.Future[None] | None = None
        self._lease: Lease | None = None

    async def start(self, start: Start) -> None:
        self._ready = asyncio.get_running_loop().create_future()
        self._process = await HostProcess.start_host(self._on_answer)
        self._process.link.send(start)
        self._watch = asyncio.ensure_future(self._process.wait_exit())
        self._watch.add_done_callback(self._on_end)
        await self._ready

    def _on_end(self, _: object) -> None:
        assert self._process is not None
        error = RuntimeError("SGLang has ended:\n" + "\n".join(self._process.last_lines))
        for waiting in (self._ready, self._flushed):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        if self._lease is not None:
            self._lease.last_lines = self._process.last_lines
            self._lease.kill()

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Ready() if self._ready is not None:
                self._ready.set_result(answer)
            case Fatal(info) if self._ready is not None and not self._ready.done():
                self._ready.set_exception(RuntimeError(info.message))
            case Done(call, _) if call == _OURS and self._flushed is not None:
                self._flushed.set_result(None)
            case _ if self._lease is not None:
                self._lease.on_answer(answer)

    async def make_ready(self) -> None:
        """No requests, and nothing cached."""
        assert self._process is not None
        self._lease = None
        self._flushed = asyncio.get_running_loop().create_future()
        self._process.link.send(Abort(_ALL))
        self._process.link.send(Flush(_OURS, 30.0))
        await self._flushed

    async def lend(self, on_answer: Callable[[Answer], None]) -> Lease:
        assert self._process is not None
        assert self._ready is not None
        self._lease = Lease(self._process, self._ready.result(), on_answer)
        return self._lease

    async def close(self) -> None:
        if self._process is not None:
            self._process.link.send(Stop())
            await self._watch


class Lease:
    """The kept host, as one engine has it."""

    exit_code: int | None = None
    last_lines: tuple[str, ...] = ()

    def __init__(self, process: HostProcess, ready: Ready, on_answer: Callable[[Answer], None]) -> None:
        self._process = process
        self._ready = ready
        self._is_over = asyncio.Event()
        self.on_answer = on_answer
        self.lost = asyncio.Event()

    @property
    def link(self) -> Lease:
        return self

    def send(self, command: Command) -> None:
        match command:
            case Start():
                # What was told of other engines' blocks is not to be repeated for this one.
                facts = self._ready.facts
                sources = tuple(KvSource(each.endpoint, "") for each in facts.kv_sources)
                self.on_answer(Ready(replace(facts, kv_sources=sources)))
            case Stop():
                self.kill()
            case _:
                self._process.link.send(command)

    async def wait_exit(self) -> str:
        await self._is_over.wait()
        return "ended"

    def kill(self) -> None:
        self._is_over.set()
        self.lost.set()

    def close(self) -> None:
        self.kill()


class _Subscribed(SglangEngine):
    """Begins when its subscription is known: nothing is repeated for it."""

    async def start(self) -> EngineInfo:
        info = await super().start()
        await asyncio.sleep(_SUBSCRIBED_S)
        return info


@dataclass
class SglangHarness:
    host: KeptHost
    spec: EngineSpec
    arguments: SglangArguments
    ending: tuple[int, ...] = ()
    deadline_s: float = 240.0

    def engine(self) -> SglangEngine:
        return _Subscribed(self.spec, self.arguments, new_host=self.host.lend)

    def prompt(self, num_tokens: int) -> tuple[int, ...]:
        return tuple(range(3, 3 + num_tokens))

    def ending_prompt(self) -> tuple[int, ...]:
        return self.ending


def spec_of(model: Path) -> EngineSpec:
    return EngineSpec(model=str(model), role=Role.AGGREGATED)
