"""Process shutdown: stop signals, graceful stop, and cleanup of child processes if the parent dies.

`StopSignal` and `graceful_stop` are for every process. `die_with_parent` and `OrphanGuard` are for a process that
starts others: if it is killed (SIGKILL, out of memory), none of its code runs any more, so its children have to be
ended from outside:

* Linux: each child asks the kernel for SIGKILL at its parent's death (`die_with_parent`). For the kernel the parent
  is the *thread* that started it, so children are started from the event loop's thread only.
* All systems: a small guard process waits on a pipe that breaks when its owner dies, then kills each child's process
  group, including processes that the children started. macOS has only this one.

A process that creates its own session escapes both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

log = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_STEP_TIMEOUT_S = 5.0
_GUARD_END_TIMEOUT_S = 5.0

Step = Callable[[], Awaitable[object]]


def exit_at_once(code: int) -> None:
    """End this process immediately, without cleanup."""
    os._exit(code)


class StopSignal:
    """Graceful stop at the first SIGTERM or SIGINT, immediate exit at the second.

    Without `install` it is a plain event, for tests and for processes that stop by themselves. Only signals count as
    a second one: a stop requested in code may be followed by one signal.
    """

    def __init__(self, exit_now: Callable[[int], None] = exit_at_once) -> None:
        self._exit_now = exit_now
        self._event = asyncio.Event()
        self._reason: str | None = None
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why the stop was requested; the first reason wins."""
        return self._reason

    def request_stop(self, reason: str) -> None:
        """Request a graceful stop. Idempotent."""
        if self._reason is None:
            self._reason = reason
            self._event.set()

    async def wait(self) -> str:
        """Wait for a stop request and return its reason."""
        await self._event.wait()
        assert self._reason is not None
        return self._reason

    def install(self) -> None:
        """Install the signal handlers on the running loop (main thread only)."""
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            self._previous_handlers[number] = signal.getsignal(number)
            self._loop.add_signal_handler(number, self._on_signal, number)

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for number, handler in self._previous_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers.clear()

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("stop requested: signal=%s; a second signal exits immediately", number.name)
            self.request_stop(number.name)
            return
        log.warning("second stop signal: signal=%s; exiting immediately", number.name)
        self._exit_now(128 + number)


async def graceful_stop(stop_accepting: Step, drain: Step, cancel: Step, drain_timeout_s: float) -> bool:
    """Stop accepting work, drain until the deadline, cancel the rest. Returns True if nothing was cancelled.

    `cancel` is always called, also after a complete drain, a failed step or a cancellation of this call, and must be
    idempotent. The error of a failed step is raised after all three steps.
    """
    drained = False
    try:
        log.info("stopping: no longer accepting work")
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            await stop_accepting()
    finally:
        try:
            log.info("draining: timeout=%g s", drain_timeout_s)
            drained = await _finishes_within(drain, drain_timeout_s)
        finally:
            log.info("drained" if drained else "drain timed out; cancelling remaining work")
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await cancel()
    return drained


async def _finishes_within(step: Step, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await step()
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True


# Wrapper that runs first in a child process and then execs the real program: `preexec_fn` would run Python between
# fork and exec, which is unsafe in a parent with threads. Costs about 20 ms.
_CHILD_WRAPPER = """
import os, signal, sys
parent, cores, argv = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
except (ImportError, AttributeError, OSError):
    pass
if os.getppid() != parent:
    os._exit(137)
if cores and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
os.execvp(argv[0], argv)
"""

_GUARD = """
import os, signal, sys
for name in ("SIGINT", "SIGTERM", "SIGHUP"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
groups = {}
for line in sys.stdin:
    if line[0] == "+":
        groups[int(line[1:])] = None
    else:
        groups.pop(int(line[1:]), None)
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""


def _bare_python(program: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", program]


def die_with_parent(argv: Sequence[str], affinity: Sequence[int] = ()) -> list[str]:
    """Return a command that runs `argv` (by exec: same pid) and is killed by the kernel when this process dies.

    Also pins it to the cores in `affinity`. On systems that support neither it only runs `argv`.
    """
    cores = ",".join(str(core) for core in affinity)
    return [*_bare_python(_CHILD_WRAPPER), str(os.getpid()), cores, *argv]


class OrphanGuard:
    """A process that kills the watched process groups when this process ends, in whatever way."""

    def __init__(self, process: Process, pipe: int) -> None:
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls) -> OrphanGuard:
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *_bare_python(_GUARD), stdin=read_end, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(process, write_end)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        self._send(f"+{group}\n")

    def unwatch(self, group: int) -> None:
        """Stop watching an empty group: its number may be reused."""
        self._send(f"-{group}\n")

    def _send(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())  # short, so the write is atomic
        except BrokenPipeError:
            log.warning("orphan guard died: pid=%d; a killed supervisor may leave processes behind", self.pid)

    async def close(self) -> None:
        """End the guard. It kills the groups that are still watched."""
        os.close(self._pipe)
        try:
            async with asyncio.timeout(_GUARD_END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
