"""Rendering of chat templates in a separate process.

The process has a limit of its memory (RLIMIT_AS) and, per rendering, of its CPU time (RLIMIT_CPU). A template that
exceeds them fails: its request is rejected, and the next one gets a new process. Renderings run one at a time, so no
other request is affected. A process that was killed from outside is replaced, and the rendering repeated once.

Calls of RenderProcess block; Renderer runs them in a thread.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading

import msgspec

from kvolt.core.errors import InvalidRequest, Unavailable
from kvolt.frontend.off_loop import OffLoop
from kvolt.frontend.openai_api.templating import TemplateInput
from kvolt.runtime.clock import Blocking
from kvolt.runtime.supervisor.process import reap, start_blocking

log = logging.getLogger(__name__)

MEMORY_BYTES = 1024**3
CPU_S = 5
WALL_S = 50.0
"""Time limit of one rendering, for a machine too busy to reach the CPU limit."""

_EXIT_S = 0.5
"""Time for the exit of a process that has closed its socket; its status says why."""
_CLOSE_S = 1.0
"""Time limit of `close`, on the event loop, for a rendering whose process it has killed."""

_MSGPACK, _JSON = b"m", b"j"
_LENGTH_BYTES = 8
_MAX_REPLY_BYTES = 128 * 1024 * 1024
_NO_MEMORY_STATUS = 77
"""Exit status of a process without memory to receive a job or to send its reply."""


class RenderJob(msgspec.Struct, frozen=True):
    """One rendering: template and input."""

    source: str
    bos_token: str
    eos_token: str
    now: float | None
    """Wall time for `strftime_now`; None: the template does not have it."""
    template_input: TemplateInput


class Rendered(msgspec.Struct, frozen=True, kw_only=True):
    text: str = ""
    refusal: str | None = None
    param: str | None = None


class RenderProcess:
    """Manages the process: started on demand, replaced when lost. Thread-safe."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES, cpu_s: int = CPU_S) -> None:
        self._memory_bytes = memory_bytes
        self._cpu_s = cpu_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def render(self, job: RenderJob) -> str:
        """Render; raises InvalidRequest if the template rejects its input or exceeds its memory or time."""
        message = _encoded(job)
        with self._lock:
            reply = self._exchange(message) or self._exchange(message)
        if reply is None:
            raise Unavailable("the process that renders chat templates died twice", reason="render_process")
        rendered = msgspec.msgpack.decode(reply, type=Rendered)
        if rendered.refusal is not None:
            raise InvalidRequest(rendered.refusal, param=rendered.param)
        return rendered.text

    def close(self) -> None:
        """Kill the process. A rendering in another thread ends immediately with Unavailable."""
        self._is_closed = True
        process = self._process
        if process is not None:
            process.kill()
        if self._lock.acquire(timeout=_CLOSE_S):
            try:
                self._on_process_lost()
            finally:
                self._lock.release()

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def _exchange(self, message: bytes) -> bytes | None:
        """Send a job; returns the reply, or None if the process was lost and the template is not the cause."""
        if self._is_closed:
            raise Unavailable("this process is stopping", reason="stopping")
        try:
            connection = self._socket or self._start()
            connection.settimeout(WALL_S)
            send_message(connection, message)
            return receive_message(connection, _MAX_REPLY_BYTES)
        except TimeoutError:
            self._on_process_lost()
            raise _refused(f"it took more than {WALL_S:g} s") from None
        except _TooLarge as error:
            self._on_process_lost()
            raise _refused(f"it made {error.num_bytes} bytes, more than {_MAX_REPLY_BYTES}") from None
        except MemoryError:  # of the frontend, within a message
            self._on_process_lost()
            raise Unavailable("out of memory for a rendered prompt", reason="memory") from None
        except (EOFError, OSError):
            status = self._on_process_lost()
        if status == _NO_MEMORY_STATUS:
            raise _refused("it took too much memory")
        if status == -signal.SIGXCPU:
            raise _refused(f"it took more than {self._cpu_s} s of CPU time")
        if not self._is_closed:
            log.warning("render process lost: status=%s", status)
        return None

    def _start(self) -> socket.socket:
        self._socket, child_socket = socket.socketpair()
        command = [sys.executable, "-m", "kvolt.frontend.templates.process", str(child_socket.fileno())]
        command += [str(self._memory_bytes), str(self._cpu_s)]
        with child_socket:
            self._process = start_blocking(command, pass_fds=(child_socket.fileno(),))
        if self._is_closed:  # `close` ran before this process existed
            self._process.kill()
        return self._socket

    def _on_process_lost(self) -> int | None:
        if self._socket is not None:
            self._socket.close()
        process, self._process, self._socket = self._process, None, None
        return None if process is None else reap(process, _EXIT_S)


class Renderer:
    """Renderings of a frontend, in order of arrival."""

    def __init__(self, blocking: Blocking) -> None:
        self._process = RenderProcess()
        self._lane = OffLoop(blocking, "templates")

    async def render(self, job: RenderJob) -> str:
        return await self._lane.run(lambda: self._process.render(job))

    def close(self) -> None:
        self._process.close()


def _encoded(job: RenderJob) -> bytes:
    """Encode as msgpack, which copies strings unchanged; as JSON, ten times slower, for integers beyond 64 bits."""
    try:
        return _MSGPACK + msgspec.msgpack.encode(job)
    except OverflowError:
        return _JSON + msgspec.json.encode(job)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the chat template was stopped: {reason}", param="messages")


def send_message(connection: socket.socket, message: bytes) -> None:
    connection.sendall(len(message).to_bytes(_LENGTH_BYTES, "big"))
    connection.sendall(message)


class _TooLarge(Exception):
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


def receive_message(connection: socket.socket, max_bytes: int) -> bytes:
    """Receive a message; raises EOFError if the other side closed."""
    num_bytes = int.from_bytes(_receive(connection, _LENGTH_BYTES), "big")
    if num_bytes > max_bytes:
        raise _TooLarge(num_bytes)
    return bytes(_receive(connection, num_bytes))


def _receive(connection: socket.socket, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    view = memoryview(data)
    while view:
        received = connection.recv_into(view)
        if not received:
            raise EOFError
        view = view[received:]
    return data


# --- in the render process


def _serve(connection: socket.socket, cpu_s: int) -> None:
    decoders = {
        _MSGPACK: msgspec.msgpack.Decoder(RenderJob).decode,
        _JSON: msgspec.json.Decoder(RenderJob).decode,
    }
    while True:
        try:
            message = receive_message(connection, sys.maxsize)
        except (EOFError, OSError):
            return  # the frontend has exited
        used = sum(os.times()[:2])
        _set_limit(resource.RLIMIT_CPU, int(used) + cpu_s + 1)
        try:
            reply = msgspec.msgpack.encode(_rendered(decoders[message[:1]](memoryview(message)[1:])))
        except MemoryError:
            reply = _refusal("the chat template was stopped: it took too much memory")
        except Exception as error:  # such as an unpaired surrogate, which cannot be encoded
            reply = _refusal(f"the chat template failed: {type(error).__name__}: {str(error)[:500]}")
        del message
        send_message(connection, reply)


def _refusal(reason: str) -> bytes:
    printable = reason.encode("utf-8", "backslashreplace").decode()
    return msgspec.msgpack.encode(Rendered(refusal=printable, param="messages"))


def _rendered(job: RenderJob) -> Rendered:
    from kvolt.frontend.templates.template import ChatTemplate

    now = job.now
    wall = None if now is None else lambda: now
    template = ChatTemplate(job.source, job.bos_token, job.eos_token, wall=wall)
    try:
        text = template.render_input(job.template_input)
    except InvalidRequest as error:
        return Rendered(refusal=error.message, param=str(error.fields.get("param", "messages")))
    return Rendered(text=text)


def _set_limit(kind: int, limit: int) -> None:
    """Set a soft resource limit of this process, at most its hard limit."""
    hard = resource.getrlimit(kind)[1]
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    try:
        resource.setrlimit(kind, (soft, hard))
    except (OSError, ValueError) as error:
        log.warning("render process limit not set: kind=%d limit=%d reason=%s", kind, soft, error)


def main(arguments: list[str]) -> None:
    descriptor, memory_bytes, cpu_s = map(int, arguments)
    _set_limit(resource.RLIMIT_AS, memory_bytes)
    _set_limit(resource.RLIMIT_CORE, 0)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is handled by the frontend, which closes the connection
    try:
        _serve(socket.socket(fileno=descriptor), cpu_s)
    except MemoryError:  # between renderings: within a message
        os._exit(_NO_MEMORY_STATUS)


if __name__ == "__main__":
    main(sys.argv[1:])
