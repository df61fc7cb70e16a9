"""Life cycle of the host process: start, calls, shutdown, and the reason of an unexpected end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from kvolt.core.errors import DeadlineExceeded, EngineFailed, KvoltError, from_info
from kvolt.engines.contract import EngineSpec
from kvolt.engines.engine_process import EngineHost, EngineProcess, MessageLink, exit_report
from kvolt.engines.sglang.arguments import SglangArguments
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
    decode_answer,
)
from kvolt.runtime.supervisor.process import end_child
from kvolt.runtime.tasks import TaskGroup

log = logging.getLogger(__name__)

_STOP_S = 10.0
"""Time between Stop and SIGKILL."""
_MODULE = "kvolt.engines.sglang.host.host"

CallCommand = Flush | LoadLora | UnloadLora


class HostLink(Protocol):
    """Connection to a host. Its messages go to the callback given at start."""

    lost: asyncio.Event
    """Set when the connection is lost."""

    def send(self, command: Command) -> None: ...

    def close(self) -> None: ...


class SupervisedHost(EngineHost, Protocol):
    """Interface of a host; replaced in tests."""

    @property
    def link(self) -> HostLink: ...


NewHost = Callable[[Callable[[Answer], None]], Awaitable[SupervisedHost]]
"""Starts a host that sends its messages to the callback."""


class HostProcess(EngineProcess):
    """The host process. It leads a process group, so all of its processes end with it."""

    link: MessageLink

    @classmethod
    async def start_host(cls, on_answer: Callable[[Answer], None]) -> HostProcess:
        """Start the process. Cancelling this stops it."""
        link = MessageLink(lambda message: on_answer(decode_answer(message)))
        ours, theirs = socket.socketpair()
        with theirs:
            await link.connect(ours)
            try:
                host = await cls.start_module(_MODULE, [theirs.fileno()], name="sglang", leads_group=True)
            except BaseException:
                link.close()
                raise
        host.link = link
        return host


class HostSupervisor:
    """See the module. Can be started once. Call `close` also after a failure."""

    def __init__(
        self, new_host: NewHost, on_batch: Callable[[Batch], None], on_failure: Callable[[KvoltError], None]
    ) -> None:
        self._new_host = new_host
        self._on_batch = on_batch
        self._on_failure = on_failure
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._pending: dict[int, asyncio.Future[str | None]] = {}
        """Calls without an answer, by number."""
        self._num_calls = 0
        self._ready: asyncio.Future[Facts] | None = None
        self._is_ready = False
        self._task_group = TaskGroup("sglang-host", self._on_error)
        self._fatal: KvoltError | None = None
        """Error that the host sent before it ended."""
        self.host: SupervisedHost | None = None

    async def start(self, spec: EngineSpec, arguments: SglangArguments, model: Path) -> Facts:
        """Start the host and load the model. Call `close` if this raises."""
        self._ready = asyncio.get_running_loop().create_future()
        self.host = await self._new_host(self._on_answer)
        self._folder = tempfile.TemporaryDirectory(prefix="kvolt-sglang-")
        self._task_group.start(self._watch(self.host), "watch")
        level = logging.getLogger().getEffectiveLevel()
        self.host.link.send(Start(spec, arguments, str(model), self._folder.name, level))
        facts = await self._ready
        self._is_ready = True
        return facts

    async def _watch(self, host: SupervisedHost) -> None:
        """Wait for the host's end; reads its last messages first."""
        how, output = await exit_report(host, host.link.lost)
        error = self._fatal or EngineFailed(f"SGLang's host {how}", engine="sglang")
        if isinstance(error, EngineFailed):
            error = EngineFailed(f"{error.message}{output}", engine="sglang")
        self._on_failure(error)

    def _on_error(self, error: BaseException) -> None:
        log.error("SGLang host supervision failed", exc_info=error)
        self._on_failure(
            EngineFailed(f"supervision of SGLang's host failed: {type(error).__name__}", engine="sglang")
        )

    def fail_calls(self, death: KvoltError) -> None:
        """Fail all pending calls."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(death)

    async def close(self) -> None:
        try:
            if self.host is not None:
                self.host.link.send(Stop())
                await end_child(self.host, _STOP_S if self._is_ready else 0.0)
        finally:
            if self.host is not None:
                self.host.link.close()
            await self._task_group.close()
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    self._folder.cleanup()

    # --- messages

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Batch():
                self._on_batch(answer)
            case Done(call, error):
                pending = self._pending.get(call)
                if pending is not None and not pending.done():
                    pending.set_result(error)
            case Ready(facts):
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(facts)
            case Fatal(info):
                self._fatal = from_info(info)

    def send(self, command: Command) -> None:
        """Send a command; ignored if there is no host."""
        if self.host is not None:
            self.host.link.send(command)

    async def call(self, command: Callable[[int], CallCommand], timeout_s: float) -> str | None:
        """Call the host. Returns None, or the reason of a refusal. DeadlineExceeded, or the error of `fail_calls`."""
        self._num_calls += 1
        number = self._num_calls
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._pending[number] = answer
        self.send(command(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded("sglang did not answer", stage="total", after_s=timeout_s) from None
        finally:
            del self._pending[number]
