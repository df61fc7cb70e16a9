"""Base class of adapters: life cycle, request checks and step outputs of an external engine.

An adapter implements how its engine is launched, which requests it cannot follow, and how choices are submitted and
aborted (docs/adapters.md has a complete one). It reports output through `_answers` and `_step_queue`.

    new --start--> starting --> running --close, a failed start, an error of a task--> ended --> closed
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineDied, EngineFailed, KvoltError, Overloaded, from_info, to_info
from kvolt.core.ids import RequestId
from kvolt.core.request import Request
from kvolt.engines.external.answers import Answers, Choice
from kvolt.engines.step_queue import StepQueue
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.step_plan import Limits, check_request, check_vocabulary

log = logging.getLogger(__name__)

_STOP_S = 30.0
"""Timeout of an engine's shutdown, and of blocking calls that run then."""
_UNLIMITED_BLOCKS = 1 << 40
"""For engines that do not report their number of blocks."""


class Launched(Protocol):
    """Description of a running engine; adapters add fields."""

    @property
    def card(self) -> ModelCard: ...

    @property
    def info(self) -> EngineInfo: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def vocab_size(self) -> int | None:
        """None if unknown."""


L = TypeVar("L", bound=Launched)
T = TypeVar("T")


class ExternalEngine(ABC, Generic[L]):
    """See the module. For one event loop. Call `close` also after a failure."""

    name: str
    """Registered name, such as `vllm`."""
    title: str
    """Display name, such as `vLLM`."""

    def __init__(self) -> None:
        self._running: L | None = None
        self._task_group = TaskGroup(self.name, self._on_error)
        """Tasks that run as long as the engine; an error in one of them ends the engine."""
        self._answers = Answers()
        self._step_queue = StepQueue()
        self._failure: KvoltError | None = None
        """Why the engine ended; None while it runs or after `close`."""
        self._lifecycle = TaskGroup(f"{self.name} lifecycle", lambda error: None)
        """Start, close and blocking calls; their callers get the errors."""
        self._starting: asyncio.Task[EngineInfo] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._blocking_calls: dict[asyncio.Task[Any], None] = {}
        """Calls in threads, which cannot be interrupted."""
        self._release_loaded: Callable[[], object] | None = None
        """Releases what was loaded. Called in a thread."""

    # --- implemented by adapters

    @property
    @abstractmethod
    def sampling_fields(self) -> frozenset[str]:
        """See `Engine.sampling_fields`."""

    @abstractmethod
    async def _launch(self) -> L:
        """Start the engine and wait until it is ready; see `_load`. Other errors than KvoltError become
        EngineFailed."""

    async def _start_tasks(self, running: L) -> None:
        """Start the tasks that read the engine's output (see `_start_task`)."""

    async def _shut_down(self) -> None:
        """Clean up after all tasks have ended and the engine was released. Also called after a failed start."""

    def _check_supported(self, request: Request, running: L) -> None:
        """Raise Unsupported or InvalidRequest if the engine would not answer as the contract requires."""

    @abstractmethod
    def _submit_choices(self, request: Request, choices: list[Choice]) -> None:
        """Submit choices under their `engine_id`. If this raises, the request fails and all its choices are aborted."""

    @abstractmethod
    def _abort_choices(self, engine_ids: list[str]) -> None:
        """Abort choices. The engine may not know all of them."""

    def _on_end(self) -> None:
        """Called once when the engine has ended (see `_failure`), before the shutdown."""

    @property
    def _num_waiting(self) -> int:
        """Number of waiting sequences."""
        info = self._launched.info
        return self._answers.num_choices - info.capacity.max_num_seqs * len(info.dp_ranks)

    def _has_started(self, request_id: RequestId) -> bool:
        """Whether a request has started. By default, whether it has any output."""
        return self._answers.has_started(request_id)

    # --- life cycle

    @property
    def card(self) -> ModelCard:
        return self._launched.card

    @property
    def _launched(self) -> L:
        if self._running is None:
            raise EngineFailed(f"the {self.name} engine is not started", engine=self.name)
        return self._running

    @property
    def _has_ended(self) -> bool:
        return self._step_queue.is_closed

    async def start(self) -> EngineInfo:
        """Start the engine. If this is cancelled the engine shuts down in the background; `close` waits for it."""
        if self._starting is not None or self._has_ended:
            raise EngineFailed(f"a {self.name} engine can be started only once", engine=self.name)
        self._starting = starting = self._lifecycle.start(self._start(), "start")
        try:
            await asyncio.wait([starting])
        except asyncio.CancelledError:
            self._start_close()
            raise
        error = self._failure or (None if starting.cancelled() else starting.exception())
        if error is None and self._has_ended:
            error = self._death_error()
        if error is not None:
            await self.close()
            raise error
        info: EngineInfo = starting.result()
        return info

    async def _start(self) -> EngineInfo:
        try:
            running = self._running = await self._launch()
            self._answers.eos_token_ids = frozenset(running.card.eos_token_ids)
            await self._start_tasks(running)
        except KvoltError:
            raise
        except Exception as error:
            raise EngineFailed(f"{self.title} did not start: {error}", engine=self.name) from error
        return running.info

    async def _load(self, launch: Callable[[], T], release: Callable[[T], object]) -> T:
        """For `_launch`: run `launch` in a thread. `release` is called once with its result at `close`, in a thread."""

        def load() -> T:
            loaded = launch()
            self._release_loaded = lambda: release(loaded)
            return loaded

        return await self._run_blocking(load)

    async def _run_blocking(self, call: Callable[[], T]) -> T:
        """Run a call in a thread. If the caller is cancelled the call continues; `close` waits for it, for a while."""
        self._check_alive()
        task: asyncio.Task[T] = self._lifecycle.start(asyncio.to_thread(call), "call")
        self._blocking_calls[task] = None
        task.add_done_callback(lambda task: self._blocking_calls.pop(task, None))
        return await asyncio.shield(task)

    def _start_task(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Start a task that must run as long as the engine."""
        self._task_group.start(self._run_until_end(work, name), name)

    async def _run_until_end(self, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        await work()
        raise EngineFailed(f"the task {name!r} ended", engine=self.name)

    def steps(self) -> AsyncIterator[StepOutput]:
        return self._step_queue.read()

    async def close(self) -> None:
        await asyncio.shield(self._start_close())  # a cancelled caller does not stop it

    def _start_close(self) -> asyncio.Task[None]:
        if self._closing is None:
            self._terminate(None)
            self._closing = self._lifecycle.start(self._close(), "close")
        return self._closing

    async def _close(self) -> None:
        if self._starting is not None:
            await asyncio.wait([self._starting])  # cancelled by `_terminate`
        await self._task_group.close()
        while (
            self._blocking_calls and self._release_loaded is None
        ):  # still loading, which cannot be interrupted
            await asyncio.wait([*self._blocking_calls])
        if self._blocking_calls:
            await asyncio.wait([*self._blocking_calls], timeout=_STOP_S)
        release, self._release_loaded = self._release_loaded, None
        try:
            if release is not None:
                async with asyncio.timeout(_STOP_S):
                    await asyncio.to_thread(release)
        except Exception as error:  # including a timeout
            log.warning("engine shutdown failed: engine=%s error=%r", self.title, error)
        try:
            await self._shut_down()
        except Exception:  # the caller of `close` cannot handle it
            log.exception("engine cleanup failed: engine=%s", self.title)

    def _on_error(self, error: BaseException) -> None:
        """A task failed: end the engine."""
        if self._has_ended:
            log.debug("error after the end: engine=%s", self.title, exc_info=error)
            return
        log.error("engine failed: engine=%s", self.title, exc_info=error)
        reason = str(error) or type(error).__name__
        self._terminate(EngineFailed(f"{self.title} failed: {reason}", engine=self.name))

    def _terminate(self, failure: KvoltError | None) -> None:
        if self._has_ended:
            return
        self._failure = failure
        self._answers.clear()
        self._step_queue.close(failure)
        if self._starting is not None:
            self._starting.cancel()  # it may wait for an answer that will not arrive
        try:
            self._on_end()
        except Exception:  # shut down nevertheless
            log.exception("engine end hook failed: engine=%s", self.title)

    def _check_alive(self) -> None:
        if self._has_ended:
            raise self._death_error()

    def _death_error(self) -> KvoltError:
        """Error for requests of an ended engine; another worker may take them. A new one each time, since an exception
        that is raised twice accumulates its traceback."""
        failure = self._failure
        if failure is None:
            return EngineDied("the engine has ended", engine=self.name)
        if isinstance(failure, EngineFailed):
            return EngineDied(failure.message.partition("\n")[0], engine=self.name)
        return from_info(to_info(failure))

    # --- requests

    def submit(self, request: Request) -> None:
        self._check(request)
        choices = self._answers.open(request)
        try:
            self._submit_choices(request, choices)
        except BaseException:
            self._abort_all(self._answers.close(request.request_id))
            raise

    def _check(self, request: Request) -> None:
        self._check_alive()
        running = self._launched
        check_request(request, running.limits, running.info.capacity.kv_total_blocks or _UNLIMITED_BLOCKS)
        if running.vocab_size is not None:
            check_vocabulary(request, running.vocab_size)
        self._check_supported(request, running)
        limit = running.limits.max_waiting
        if self._num_waiting >= limit:
            raise Overloaded(f"the queue of {self.title} is full", queue="engine", limit=limit)

    def abort(self, request_id: RequestId) -> None:
        self._abort_all(self._answers.close(request_id))
        self._step_queue.drop_request(request_id)

    def _fail_request(self, request_id: RequestId, error: KvoltError) -> None:
        """Fail a request with all its choices; reported with the next step."""
        self._abort_all(self._answers.fail(request_id, error))

    def _abort_all(self, engine_ids: list[str]) -> None:
        if engine_ids and not self._has_ended:
            self._abort_choices(engine_ids)

    async def withdraw(self, request_id: RequestId) -> bool:
        if request_id not in self._answers or self._has_started(request_id):
            return False
        self.abort(request_id)
        return True
