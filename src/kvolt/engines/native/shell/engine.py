"""NativeEngine: the Engine of the contract, in the worker's process. The core runs in a `host`.

Owns the engine's life cycle as the worker sees it, the synchronous checks of `submit`, and the queue of
unread steps, from which outputs of aborted requests are removed. Never waits for a step. All other work is
done by the core, behind `link`; calls that concern no request's life are in `core_calls`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import (
    EngineDied,
    EngineFailed,
    InvalidRequest,
    KvoltError,
    Overloaded,
    Unsupported,
    from_info,
    to_info,
)
from kvolt.core.ids import RequestId
from kvolt.core.latency import LatencyModel
from kvolt.core.request import Handoff, Request
from kvolt.engines.contract import (
    COMMON_SAMPLING_FIELDS,
    EngineSpec,
    features_of,
)
from kvolt.engines.engine_process import EngineHost, exit_report
from kvolt.engines.native.arguments import NativeArguments
from kvolt.engines.native.shell import messages
from kvolt.engines.native.shell.core_calls import CoreCalls
from kvolt.engines.native.shell.host import ThreadHost, start_process
from kvolt.engines.native.shell.in_flight import InFlight
from kvolt.engines.native.shell.link import EngineLink
from kvolt.engines.native.shell.messages import (
    Abort,
    Answer,
    Fatal,
    Loaded,
    Log,
    Start,
    Step,
    Stop,
    Submit,
)
from kvolt.engines.step_queue import mentions_request, without_requests
from kvolt.runtime.supervisor.process import end_child
from kvolt.runtime.tasks import TaskGroup
from kvolt.scheduler.step_pace import StepPace
from kvolt.scheduler.step_plan import check_request, check_vocabulary

log = logging.getLogger(__name__)

CORE = "kvolt.engines.native.loading:load_core"
_STOP_S = 5.0
"""Time between Stop and SIGKILL, for the current step to end."""
_EXIT_S = 5.0
"""Time between the end of the socket and the exit of the process."""
_MAX_UNREAD_STEPS = 1024
"""Number of unread steps at which the socket is no longer read, which stops the engine."""


class NativeEngine(CoreCalls):
    """See the module. For one event loop. Must be closed, even after it died."""

    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "allowed_token_ids", "prompt_logprobs"}

    def __init__(self, spec: EngineSpec, arguments: NativeArguments, *, core: str = CORE) -> None:
        """`core`: loader of the core, as `module:function`; tests use others."""
        super().__init__(spec, arguments, EngineLink(self._on_answer, self._on_connection_lost))
        self._core = core
        self._host: EngineHost | None = None
        self._task_group = TaskGroup("native-engine")
        self._loading: asyncio.Future[Loaded] | None = None
        self._pace: StepPace | None = None
        """Latency model as corrected in the engine process, from the same steps."""
        self._in_flight = InFlight()
        self._steps: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._fatal: Fatal | None = None
        self._failure: KvoltError | None = None
        """Why it ended; None if it was closed."""
        self._closed: asyncio.Event | None = None
        """Created by the first `close` and set at its end."""

    # --- life cycle

    @property
    def card(self) -> ModelCard:
        return self._known.card

    @property
    def latency(self) -> LatencyModel | None:
        return None if self._pace is None else self._pace.model

    async def start(self) -> EngineInfo:
        """Raises the errors of loading. Takes as long as loading; a cancelled call leaves nothing."""
        if self._loading is not None or self._is_over:
            raise EngineFailed("a native engine can be started only once", engine="native")
        self._loading = asyncio.get_running_loop().create_future()
        try:
            await self._launch()
            loaded = await self._loading
            await self._open_device(loaded)
        except BaseException:
            await self.close()
            raise
        info = loaded.info
        return msgspec.structs.replace(info, features=info.features or features_of(self))

    async def _launch(self) -> None:
        if hasattr(os, "memfd_create"):
            for _ in range(self._arguments.tensor_parallel):
                self._memories.append(os.memfd_create("kvolt-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        shell_end, host_end = socket.socketpair()
        try:
            await self._link.connect(shell_end)
        except BaseException:
            host_end.close()
            raise
        if self._arguments.process == "thread":
            self._host = ThreadHost(host_end, self._memories)
        else:
            self._host = await start_process(host_end, self._memories)
        if self._is_over:  # closed concurrently, before the host was known
            await end_child(self._host)
            self._link.close()
            return
        self._task_group.start(self._watch(self._host), "watch")
        level = logging.getLogger().getEffectiveLevel()
        self._link.send(Start(self._spec, self._arguments, self._core, level))

    async def steps(self) -> AsyncIterator[StepOutput]:
        while True:
            while self._steps:
                step = self._steps.popleft()
                if len(self._steps) < _MAX_UNREAD_STEPS // 2:
                    self._link.set_paused(False)
                yield step
            if self._failure is not None:
                raise self._failure
            if self._is_over:
                return
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        if self._closed is not None:
            await self._closed.wait()
            return
        self._closed = asyncio.Event()
        self._end(None)
        self._steps.clear()
        try:
            grace_s = 0.0
            if self._loaded is not None:
                self._link.command(Stop())
                grace_s = _STOP_S
            if self._host is not None:
                await end_child(self._host, grace_s)
        finally:
            self._link.close()
            await self._task_group.close()
            for slab in self._slabs:
                slab.close()
            while self._memories:
                os.close(self._memories.pop())
            self._closed.set()

    async def _watch(self, host: EngineHost) -> None:
        """Wait for the exit of the host and end with its cause."""
        how, output = await exit_report(host, self._link.lost)
        if self._fatal is not None:
            self._end(from_info(self._fatal.error))
            return
        when = "" if self._loaded is not None else " while loading"
        error = f"the engine process {how}{when}{output}"
        self._end(EngineFailed(error, engine="native", exit_code=host.exit_code))

    def _on_connection_lost(self) -> None:
        """The host has closed its socket and is about to exit."""
        if self._host is not None and not self._is_over:
            asyncio.get_running_loop().call_later(_EXIT_S, self._host.kill)

    def _end(self, failure: KvoltError | None) -> None:
        """End once: fail all waiting calls and the reader."""
        if self._is_over:
            return
        self._is_over, self._failure = True, failure
        error = failure or _closed_error()
        if self._loading is not None and not self._loading.done():
            self._loading.set_exception(error)
            self._loading.exception()  # marks it as retrieved, in case it is not awaited
        self._link.fail(_as_request_error(error))
        self._in_flight.clear()
        self._changed.set()

    # --- messages

    def _on_answer(self, answer: Answer) -> None:
        match answer:
            case Step():
                self._on_step(answer)
            case Log(level, name, text):
                logging.getLogger(name).log(level, "%s", text)
            case Loaded():
                self._loaded = answer
                self._loras = dict(answer.facts.loras)
                self._pace = None if answer.info.latency is None else StepPace(answer.info.latency)
                if self._loading is not None and not self._loading.done():
                    self._loading.set_result(answer)
            case Fatal():
                self._fatal = answer
                if answer.trace:
                    log.error("the engine failed:\n%s", answer.trace)

    def _on_step(self, step: Step) -> None:
        if self._pace is not None and step.load is not None and step.load.step is not None:
            self._pace.observe(step.load.step)
        output = None if self._is_over else self._in_flight.filter_step(step)
        if output is not None:
            self._steps.append(output)
            self._changed.set()
            if len(self._steps) >= _MAX_UNREAD_STEPS:
                self._link.set_paused(True)

    # --- requests

    def submit(self, request: Request) -> None:
        self._check(request)
        self._link.check_room()
        self._in_flight.add(request, self._link.command(Submit(request)))

    def _check(self, request: Request) -> None:
        if self._is_over:  # a new exception each time: re-raising one grows its traceback
            raise _as_request_error(self._failure or _closed_error())
        info, facts = self._known.info, self._known.facts
        check_request(request, facts.limits, info.capacity.kv_total_blocks)
        if request.media:
            raise Unsupported("the native engine does not support media", feature="media")
        check_vocabulary(request, facts.vocab_size)
        if request.lora and request.lora not in self._loras:
            known = ", ".join(self._loras) or "none"
            raise InvalidRequest(f"no adapter {request.lora!r} is loaded (loaded: {known})", param="lora")
        if self._in_flight.find(request.request_id) is not None:
            raise InvalidRequest(f"request {request.request_id} is already known", param="request_id")
        if self._in_flight.num_sequences - info.capacity.max_num_seqs >= self._arguments.max_waiting:
            raise Overloaded("the engine's queue is full", queue="engine", limit=self._arguments.max_waiting)

    def abort(self, request_id: RequestId) -> None:
        if self._in_flight.find(request_id) is not None:
            self._in_flight.drop(request_id, self._link.command(Abort(request_id)))
        for index, step in enumerate(self._steps):  # outputs that were not read yet
            if mentions_request(step, request_id):
                self._steps[index] = without_requests(step, {request_id})

    async def withdraw(self, request_id: RequestId) -> bool:
        entry = self._in_flight.find(request_id)
        if entry is None:
            return False

        def on_value(is_withdrawn: bool) -> None:
            if is_withdrawn and self._in_flight.find(request_id) is entry:
                self._in_flight.drop(request_id, number)

        number = self._link.num_sent + 1
        return await self._link.call(messages.WITHDRAW, request_id, on_value=on_value)

    # --- Prefill

    async def prefill(self, request: Request) -> Handoff:
        self._check(request)
        try:
            return await self._link.call(messages.PREFILL, request)
        except asyncio.CancelledError:
            self._link.post(messages.RELEASE_PREFILL, request.request_id)
            raise

    async def release_prefill(self, request_id: RequestId) -> None:
        await self._link.call(messages.RELEASE_PREFILL, request_id)


def _as_request_error(error: KvoltError) -> KvoltError:
    """The error for requests that were in the engine or arrive too late: they can be retried on another
    worker."""
    if isinstance(error, EngineFailed):
        return EngineDied(error.message.partition("\n")[0], engine="native")
    return from_info(to_info(error))


def _closed_error() -> EngineFailed:
    return EngineFailed("the engine was closed", engine="native")
