"""HostLife: a host from its start to its end: what it is told and asked, and why it ended.

Owns the process, the folder that it works in, and who waits for its answers. Knows no requests: batches go to the
engine, and so does the reason of an end that nobody asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvolt.core.errors import EngineFailed, KvoltError, from_info
from kvolt.engines.contract import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.calls import Calls
from kvolt.engines.sglang.host.messages import (
    Answer,
    Batch,
    Command,
    Done,
    Facts,
    Fatal,
    Flush,
    LoadLora,
    Ready,
    Start,
    Stop,
    UnloadLora,
)
from kvolt.engines.sglang.process import Host, NewHost
from kvolt.runtime.tasks import Crew

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""From Stop to SIGKILL."""
_LAST_WORDS_S = 1.0

CallCommand = Flush | LoadLora | UnloadLora


class HostLife:
    """See the module. Starts once; `close` it, also after it was over by itself."""

    def __init__(
        self, new_host: NewHost, on_batch: Callable[[Batch], None], on_failure: Callable[[KvoltError], None]
    ) -> None:
        self._new_host = new_host
        self._on_batch = on_batch
        self._on_failure = on_failure
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = Calls("sglang")
        self._ready: asyncio.Future[Facts] | None = None
        self._is_ready = False
        self._crew = Crew("sglang-host", self._on_error)
        self._fatal: KvoltError | None = None
        """What it said before it ended."""
        self.host: Host | None = None

    async def start(self, spec: EngineSpec, arguments: SglangArguments, model: Path) -> Facts:
        """Errors of loading as they were raised. `close` it where they are."""
        self._ready = asyncio.get_running_loop().create_future()
        self.host = await self._new_host(self._on_answer)
        self._folder = tempfile.TemporaryDirectory(prefix="kvolt-sglang-")
        self._crew.start(self._watch(self.host), "watch")
        level = logging.getLogger().getEffectiveLevel()
        self.host.link.send(Start(spec, arguments, str(model), self._folder.name, level))
        facts = await self._ready
        self._is_ready = True
        return facts

    async def _watch(self, host: Host) -> None:
        """Until it ends, however that comes. What it said last is read before."""
        how = await host.ended()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await host.link.lost.wait()
        said = "".join(f"\n  {line}" for line in host.last_lines)
        error = self._fatal or EngineFailed(f"SGLang's host {how}", engine="sglang")
        if isinstance(error, EngineFailed) and said:
            error = EngineFailed(f"{error.message}; it wrote last:{said}", engine="sglang")
        self._on_failure(error)

    def _on_error(self, error: BaseException) -> None:
        log.error("the host of SGLang is not watched any more", exc_info=error)
        self._on_failure(
            EngineFailed(f"SGLang's host is not watched: {type(error).__name__}", engine="sglang")
        )

    def end(self, death: KvoltError) -> None:
        """Nothing is answered any more: who has asked it something is told so."""
        self._calls.fail(death)

    async def close(self) -> None:
        host = self.host
        try:
            if host is not None:
                host.link.send(Stop())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_STOP_S if self._is_ready else 0):
                        await host.ended()
        finally:
            if host is not None:
                await _end_now(host)
            await self._crew.close()
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.cleanup()

    # --- what is said

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Batch():
                self._on_batch(answer)
            case Done(call, error):
                self._calls.done(call, error)
            case Ready(facts):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(facts)
            case Fatal(info):
                self._fatal = from_info(info)

    def send(self, command: Command) -> None:
        """Nothing is sent where nobody is there."""
        if self.host is not None:
            self.host.link.send(command)

    async def call(self, command: Callable[[int], CallCommand], timeout_s: float) -> str | None:
        """None, or why it was refused. DeadlineExceeded, EngineDied."""
        return await self._calls.ask(lambda call: self.send(command(call)), timeout_s)


async def _end_now(host: Host) -> None:
    host.kill()
    await host.ended()
    host.link.close()
