"""EngineLoop: commands, one step, what came of it, and again, for whatever core computes.

Owns the order of things on the engine's side, and its end of the socket. Synchronous; imports no torch. Where it
runs and how a core is loaded is in `process`.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from kvolt.core.block_key import BlockKeyContext
from kvolt.core.card import EngineInfo, ModelCard
from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineFailed, ErrorInfo, KvoltError, Unsupported, to_info
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, StopConditions
from kvolt.engines.child_messages import FrameCutter, frame, raw
from kvolt.engines.contract import KvHeld
from kvolt.engines.native.shell.messages import (
    COMPUTED_KV,
    METHODS,
    PREFILL,
    WITHDRAW,
    Abort,
    Answer,
    Call,
    Command,
    Facts,
    Reply,
    Start,
    StepWording,
    Stop,
    Submit,
    decode_command,
    decode_start,
)
from kvolt.runtime.clock import Clock
from kvolt.scheduler.scheduler import Scheduler
from kvolt.transfer.memory.device_memory import DeviceHandle

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_STALLED_S = 0.01
"""Between looks at a core that has work, but nothing that can run now."""
_LATER = (PREFILL, COMPUTED_KV)
"""Calls that a later step answers."""
_ANY_REQUEST = Request(request_id=RequestId(""), model="", token_ids=(), stop=StopConditions(max_tokens=1))
"""Without an adapter and without a salt."""


class Core(Protocol):
    """What is served: `core.EngineCore`, or what a test puts in its place."""

    card: ModelCard
    info: EngineInfo
    keys_of: Callable[[Request], BlockKeyContext]
    scheduler: Scheduler
    runner: Any
    """Knows the model's config."""
    capabilities: Any
    """Has a method for each of `messages.METHODS` but withdraw; `prefill` and `computed_kv` take a callable besides,
    which a later step calls with what was asked for or the ErrorInfo. `next_expiry`: when a hold runs out, by the
    monotonic clock, or None; `step` then releases it."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: RequestId) -> None: ...

    def withdraw(self, request_id: RequestId) -> bool: ...

    def step(self) -> StepOutput | None:
        """None when nothing ran and there is nothing to tell."""
        ...

    def load(self) -> WorkerLoad: ...

    def close(self) -> None: ...


def facts_of(core: Core) -> Facts:
    return Facts(
        limits=core.scheduler.limits,
        keys=core.keys_of(_ANY_REQUEST),
        layout=core.capabilities.kv_layout(),
        loras=core.capabilities.loras(),
        vocab_size=core.runner.model.config.vocab_size,
        device_memory=_device_memory(core),
        device=str(core.runner.device),
    )


def _device_memory(core: Core) -> DeviceHandle | None:
    """Of the first rank."""
    try:
        handle: DeviceHandle | None = core.runner.slab.device_handle()
    except Unsupported as error:
        log.warning("KV blocks cannot go to other workers: %s", error)
        return None
    return handle


class ShellGone(Exception):
    """The other end of the socket is closed: there is nobody to compute for."""


class Pipe:
    """The engine's end of the socket; ShellGone when it is of no more use. `send` is for any thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._cutter = FrameCutter()
        self._lock = threading.Lock()

    def send(self, message: Answer) -> None:
        data = frame(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise ShellGone from error

    def receive(self, wait_s: float | None) -> list[memoryview]:
        """Messages that are here; waits for the first up to `wait_s` (None: for ever)."""
        if wait_s != 0.0 and not self._poll.poll(None if wait_s is None else wait_s * 1000):
            return []
        found: list[memoryview] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except OSError as error:
                raise ShellGone from error
            if not data:
                raise ShellGone
            found += self._cutter.feed(data)
            if len(data) < _READ_BYTES:
                return found

    def receive_start(self) -> Start:
        while True:
            for message in self.receive(None):
                return decode_start(message)  # nothing follows it until it is answered

    def close(self) -> None:
        self._socket.close()


class EngineLoop:
    """Commands, a step, what came of it; again and again."""

    def __init__(self, pipe: Pipe, core: Core, clock: Clock) -> None:
        self._pipe = pipe
        self._core = core
        self._clock = clock
        self._wording = StepWording()
        self._num_seen = 0
        self._stopped = False
        self._failed: list[tuple[RequestId, ErrorInfo]] = []
        self._told_load = WorkerLoad()
        self._has_dropped = False
        """Whether a request was taken away since something was told."""

    def run(self) -> None:
        """Until Stop, or ShellGone. What a step raises is the end as well."""
        core = self._core
        wait_s = self._patience_s(has_moved=True)
        while True:
            for message in self._pipe.receive(wait_s):
                self._num_seen += 1
                self._handle(decode_command(message))
            if self._stopped:
                return
            output = core.step()
            if output is not None or self._failed:
                self._tell(output or StepOutput(load=core.load()))
            elif not core.has_work:
                self._tell_rest()
            wait_s = self._patience_s(has_moved=output is not None)

    def _patience_s(self, *, has_moved: bool) -> float | None:
        if self._core.has_work:
            return 0.0 if has_moved else _STALLED_S
        expiry = self._core.capabilities.next_expiry
        return None if expiry is None else max(expiry - self._clock.monotonic(), _STALLED_S)

    # --- commands

    def _handle(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Abort(request_id):
                self._core.abort(request_id)
                self._has_dropped = True
            case Call():
                self._call(command)
            case Stop():
                self._stopped = True

    def _submit(self, request: Request) -> None:
        """Whatever is wrong with a request is its own failure only."""
        request_id = request.request_id
        try:
            self._core.submit(request)
        except KvoltError as error:
            self._core.scheduler.cancel_arrivals(request_id)
            self._failed.append((request_id, to_info(error)))
        except Exception as error:
            log.exception("the engine failed to take %s", request_id)
            with contextlib.suppress(Exception):
                self._core.abort(request_id)  # it may have got half of it
            message = f"the engine failed to take the request ({type(error).__name__})"
            self._failed.append((request_id, to_info(EngineFailed(message, engine="native"))))

    def _call(self, call: Call) -> None:
        number = call.number
        try:
            method = METHODS[call.method]
            arguments = method.decode_arguments(call.arguments)
            owner = self._core if method is WITHDRAW else self._core.capabilities
            call_it = getattr(owner, method.name)
            if method in _LATER:
                call_it(*arguments, done=lambda found: self._reply(number, found))
                return
            value = raw(call_it(*arguments))
        except KvoltError as error:
            self._reply(number, to_info(error))
        except Exception as error:
            log.exception("the engine failed at %s", call.method)
            message = f"{call.method} failed ({type(error).__name__})"
            self._reply(number, to_info(EngineFailed(message, engine="native")))
        else:
            self._pipe.send(Reply(number, value))

    def _reply(self, number: int, found: Handoff | KvHeld | ErrorInfo) -> None:
        if isinstance(found, ErrorInfo):
            self._pipe.send(Reply(number, error=found))
        else:
            self._pipe.send(Reply(number, raw(found)))

    # --- telling

    def _tell(self, output: StepOutput) -> None:
        if self._failed:
            output = msgspec.structs.replace(output, failed=(*output.failed, *self._failed))
            self._failed.clear()
        if output.load is not None:
            self._told_load = output.load
        self._has_dropped = False
        self._pipe.send(self._wording.step(self._num_seen, output))

    def _tell_rest(self) -> None:
        """What was stopped between steps is in no step's load: without this the last one would stand.

        Also where no load has changed: a request that went while its grammar was compiled was in none, but who
        waited for a step of it has to hear that the engine is at rest, and not stuck.
        """
        load, told = self._core.load(), self._told_load
        if self._has_dropped or (load.running, load.waiting, load.kv_used_blocks) != (
            told.running,
            told.waiting,
            told.kv_used_blocks,
        ):
            self._tell(StepOutput(load=load))
