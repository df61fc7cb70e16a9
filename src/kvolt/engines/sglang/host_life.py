"""HostLife: a host from its start to its end: what it is told and asked, and why it is over.

Owns the process, the folder that it works in, and who waits for its answers. Knows no requests: batches go to the
engine, which is also told when it is over, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

from kvolt.core.errors import EngineDied, EngineFailed, KvoltError, from_info, to_info
from kvolt.engines.registry import EngineSpec
from kvolt.engines.sglang.arguments import SglangArguments
from kvolt.engines.sglang.calls import Calls
from kvolt.engines.sglang.messages import (
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
        self, new_host: NewHost, on_batch: Callable[[Batch], None], on_end: Callable[[], None]
    ) -> None:
        self._new_host = new_host
        self._on_batch = on_batch
        self._on_end = on_end
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._calls = Calls("sglang")
        self._ready: asyncio.Future[Facts] | None = None
        self._is_ready = False
        self._crew = Crew("sglang-host", self.fail)
        self._fatal: KvoltError | None = None
        """What it said before it ended."""
        self.host: Host | None = None
        self.failure: KvoltError | None = None
        """Why it is over; None when it was closed."""
        self.is_over = False

    async def start(self, spec: EngineSpec, arguments: SglangArguments, model: Path) -> Facts:
        """Errors of loading as they were raised. `close` it where they are."""
        self.check()
        self._ready = asyncio.get_running_loop().create_future()
        host = await self._new_host(self._on_answer)
        if self.is_over:  # it was closed meanwhile, and who closed it knew of no host
            await _end_now(host)
            self.check()
        self.host = host
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
        self._end(error)

    def fail(self, error: BaseException) -> None:
        """One of our tasks ended by an error: nothing goes on without it."""
        log.error("the sglang engine failed", exc_info=error)
        self._end(EngineFailed(f"the sglang adapter failed ({type(error).__name__})", engine="sglang"))

    def _end(self, failure: KvoltError | None) -> None:
        """Once: nothing is computed any more. Who waits is told."""
        if self.is_over:
            return
        self.is_over, self.failure = True, failure
        error = failure or EngineFailed("the engine was closed", engine="sglang")
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()  # it may be that nobody waits yet
        self._calls.fail(_as_death(error))
        self._on_end()

    async def close(self) -> None:
        self._end(None)
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

    def check(self) -> None:
        """EngineDied where it is over."""
        if self.is_over:  # a new one each time: an exception that is raised twice grows its traceback
            raise _as_death(self.failure or EngineFailed("the engine was closed", engine="sglang"))

    def send(self, command: Command) -> None:
        """Nothing is sent where nobody is there."""
        if self.host is not None:
            self.host.link.send(command)

    async def call(self, command: Callable[[int], CallCommand], timeout_s: float) -> str | None:
        """None, or why it was refused. DeadlineExceeded, EngineDied."""
        self.check()
        if self.host is None:
            raise EngineFailed("the sglang engine is not started", engine="sglang")
        return await self._calls.ask(lambda call: self.send(command(call)), timeout_s)


async def _end_now(host: Host) -> None:
    host.kill()
    await host.ended()
    host.link.close()


def _as_death(error: KvoltError) -> KvoltError:
    """As requests are told that were with the engine, or come too late: another worker may do better."""
    if isinstance(error, EngineFailed):
        return EngineDied(error.message.partition("\n")[0], engine="sglang")
    return from_info(to_info(error))
