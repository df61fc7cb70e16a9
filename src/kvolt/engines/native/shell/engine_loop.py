"""EngineLoop: handles commands, runs a step, sends its output, and repeats.

Owns the order of work on the engine's side and its end of the socket. Synchronous; imports no torch. Loading
a core and choosing its process or thread is in `process`.
"""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from kvolt.core.delta import StepOutput
from kvolt.core.errors import EngineFailed, ErrorInfo, KvoltError, Unsupported, to_info
from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, Request, StopConditions
from kvolt.engines.contract import HeldKv
from kvolt.engines.framing import FrameSplitter, encode_frame, encode_raw
from kvolt.engines.native.shell.messages import (
    COMPUTED_KV,
    METHODS,
    PREFILL,
    WITHDRAW,
    Abort,
    Answer,
    Call,
    Command,
    EngineFacts,
    Reply,
    Start,
    StepEncoder,
    Stop,
    Submit,
    decode_command,
    decode_start,
)
from kvolt.runtime.clock import Clock
from kvolt.transfer.memory.device_memory import DeviceHandle

if TYPE_CHECKING:
    from kvolt.engines.native.core import EngineCore

log = logging.getLogger(__name__)

_READ_BYTES = 64 * 1024
_STALLED_S = 0.01
"""Poll interval of a core that has work but cannot run any of it."""
_LATER = (PREFILL, COMPUTED_KV)
"""Calls that a later step answers: their last argument is called with the result or an ErrorInfo."""
_ANY_REQUEST = Request(request_id=RequestId(""), model="", token_ids=(), stop=StopConditions(max_tokens=1))
"""A request without adapter and salt."""


def engine_facts(core: EngineCore) -> EngineFacts:
    return EngineFacts(
        limits=core.scheduler.limits,
        keys=core.keys_of(_ANY_REQUEST),
        layout=core.capabilities.kv_layout(),
        loras=core.capabilities.loras(),
        vocab_size=core.runner.model.config.vocab_size,
        device_memory=_device_memory(core),
        device=str(core.runner.device),
    )


def _device_memory(core: EngineCore) -> DeviceHandle | None:
    """Handle of the first rank's memory."""
    try:
        return core.runner.slab.device_handle()
    except Unsupported as error:
        log.warning("KV blocks cannot be sent to other workers: %s", error)
        return None


class ShellClosed(Exception):
    """The other end of the socket is closed."""


class Pipe:
    """The engine's end of the socket. Raises ShellClosed when the other end is gone. `send` is thread-safe."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self._cutter = FrameSplitter()
        self._lock = threading.Lock()

    def send(self, message: Answer) -> None:
        data = encode_frame(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise ShellClosed from error

    def receive(self, wait_s: float | None) -> list[memoryview]:
        """The available messages; waits up to `wait_s` for the first (None: forever)."""
        if wait_s != 0.0 and not self._poll.poll(None if wait_s is None else wait_s * 1000):
            return []
        messages: list[memoryview] = []
        while True:
            try:
                data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ShellClosed from error
            if not data:
                raise ShellClosed
            messages += self._cutter.feed(data)
            if len(data) < _READ_BYTES:
                return messages

    def receive_start(self) -> Start:
        while True:
            for message in self.receive(None):
                return decode_start(message)  # no message follows it before it is answered

    def close(self) -> None:
        self._socket.close()


class EngineLoop:
    """See the module."""

    def __init__(self, pipe: Pipe, core: EngineCore, clock: Clock) -> None:
        self._pipe = pipe
        self._core = core
        self._clock = clock
        self._encoder = StepEncoder()
        self._num_seen = 0
        self._stopped = False
        self._failed: list[tuple[RequestId, ErrorInfo]] = []
        self._reported_load = WorkerLoad()
        self._has_dropped = False
        """Whether a request was dropped since the last report."""

    def run(self) -> None:
        """Run until Stop or ShellClosed. Exceptions of a step propagate."""
        core = self._core
        wait_s = self._wait_s(has_moved=True)
        while True:
            for message in self._pipe.receive(wait_s):
                self._num_seen += 1
                self._handle(decode_command(message))
            if self._stopped:
                return
            output = core.step()
            if output is not None or self._failed:
                self._send_step(output or StepOutput(load=core.load()))
            elif not core.has_work:
                self._send_idle_load()
            wait_s = self._wait_s(has_moved=output is not None)

    def _wait_s(self, *, has_moved: bool) -> float | None:
        if self._core.has_work:
            return 0.0 if has_moved else _STALLED_S
        expiry = self._core.capabilities.prefills.next_expiry
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
        """Errors of a request fail only that request."""
        request_id = request.request_id
        try:
            self._core.submit(request)
        except KvoltError as error:
            self._core.scheduler.prefetched.release_expected(request_id)
            self._failed.append((request_id, to_info(error)))
        except Exception as error:
            log.exception("request rejected by an engine error: request_id=%s", request_id)
            with contextlib.suppress(Exception):
                self._core.abort(request_id)  # it may be partly registered
            message = f"the engine failed to accept the request ({type(error).__name__})"
            self._failed.append((request_id, to_info(EngineFailed(message, engine="native"))))

    def _call(self, call: Call) -> None:
        try:
            method = METHODS[call.method]
            arguments = method.decode_arguments(call.arguments)
            owner = self._core if method is WITHDRAW else self._core.capabilities
            call_it = getattr(owner, method.name)
            if method in _LATER:
                call_it(*arguments, partial(self._reply, call.number))
                return
            answer = Reply(call.number, encode_raw(call_it(*arguments)))
        except KvoltError as error:
            answer = Reply(call.number, error=to_info(error))
        except Exception as error:
            log.exception("engine call failed: method=%s", call.method)
            message = f"{call.method} failed ({type(error).__name__})"
            answer = Reply(call.number, error=to_info(EngineFailed(message, engine="native")))
        self._pipe.send(answer)

    def _reply(self, number: int, result: Handoff | HeldKv | ErrorInfo) -> None:
        if isinstance(result, ErrorInfo):
            self._pipe.send(Reply(number, error=result))
        else:
            self._pipe.send(Reply(number, encode_raw(result)))

    # --- output

    def _send_step(self, output: StepOutput) -> None:
        if self._failed:
            output = msgspec.structs.replace(output, failed=(*output.failed, *self._failed))
            self._failed.clear()
        if output.load is not None:
            self._reported_load = output.load
        self._has_dropped = False
        self._pipe.send(self._encoder.step(self._num_seen, output))

    def _send_idle_load(self) -> None:
        """Report the load after requests were dropped between steps: otherwise the last step's load would
        stand.

        Also sent if the load did not change: a request dropped while its grammar compiled was in no load, but
        its waiter must learn that the engine is idle.
        """
        load, reported = self._core.load(), self._reported_load
        if self._has_dropped or (load.running, load.waiting, load.kv_used_blocks) != (
            reported.running,
            reported.waiting,
            reported.kv_used_blocks,
        ):
            self._send_step(StepOutput(load=load))
