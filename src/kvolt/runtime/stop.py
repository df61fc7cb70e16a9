"""How a process ends: asked politely, told twice, or left behind by its parent.

`StopSignal` and `graceful_stop` are for every process. `die_with_parent` and `OrphanGuard` are for
the one that starts others: when it is killed (SIGKILL, out of memory), nothing of it can run any more,
so whatever is to end its children must stand outside of it.

* Linux: each child asks the kernel for SIGKILL at its parent's death (`die_with_parent`). The kernel
  means the parent's *thread* that started it, so children are started from the loop's thread only.
* Everywhere: a tiny guard process waits on a pipe that breaks with its owner, then kills each child's
  process group, which also ends what the children started. On macOS this is the only one of the two.

What makes a session of its own escapes both.
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
    """End this process now, with no clean-up at all."""
    os._exit(code)


class StopSignal:
    """The first SIGTERM or SIGINT asks for a graceful stop; the second ends the process at once.

    Without `install` it is a plain event for tests and for a process that ends by its own decision.
    Only signals count towards the second: a stop requested in code may be followed by one polite signal.
    """

    def __init__(self, exit_now: Callable[[int], None] = exit_at_once) -> None:
        self._exit_now = exit_now
        self._event = asyncio.Event()
        self._reason: str | None = None
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why the stop was requested; the first reason stays."""
        return self._reason

    def request_stop(self, reason: str) -> None:
        """Ask for a graceful stop. Asking again changes nothing."""
        if self._reason is None:
            self._reason = reason
            self._event.set()

    async def wait(self) -> str:
        """The reason, once a stop is requested. Cancelling the wait leaves nothing behind."""
        await self._event.wait()
        assert self._reason is not None
        return self._reason

    def install(self) -> None:
        """Take over the signals on the running loop (main thread only)."""
        self._loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            self._before[number] = signal.getsignal(number)
            self._loop.add_signal_handler(number, self._on_signal, number)

    def restore(self) -> None:
        """Give the signals back to whoever had them before `install`."""
        loop, self._loop = self._loop, None
        if loop is None:
            return
        for number, handler in self._before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            log.info("%s: stopping; a second signal ends the process at once", number.name)
            self.request_stop(number.name)
            return
        log.warning("%s again: ending at once", number.name)
        self._exit_now(128 + number)


async def graceful_stop(stop_accepting: Step, drain: Step, cancel: Step, drain_timeout_s: float) -> bool:
    """Stop accepting, finish what runs up to a deadline, cancel the rest. True when nothing was cut off.

    `cancel` is called in any case, also after a full drain and when an earlier step fails or this call is
    cancelled; it must then find nothing left to do. A failed step is raised after all three were tried.
    """
    drained = False
    try:
        log.info("stop: no longer accepting")
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            await stop_accepting()
    finally:
        try:
            log.info("stop: finishing what runs, for at most %g s", drain_timeout_s)
            drained = await _within(drain, drain_timeout_s)
        finally:
            log.info("stop: everything was finished" if drained else "stop: cancelling what is left")
            async with asyncio.timeout(_STEP_TIMEOUT_S):
                await cancel()
    return drained


async def _within(step: Step, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            await step()
    except TimeoutError:
        if not deadline.expired():
            raise
        return False
    return True


# The first program in a child's process, replaced by the real one at its end: `preexec_fn` would run
# Python between fork and exec, which is unsafe once the parent has threads. Costs about 20 ms.
_FIRST_IN_CHILD = """
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
    """The command that runs `argv` (by exec: same pid) so that the kernel ends it with this process.

    Also pins it to the cores in `affinity`. Where the system knows neither, it just runs `argv`.
    """
    cores = ",".join(str(core) for core in affinity)
    return [*_bare_python(_FIRST_IN_CHILD), str(os.getpid()), cores, *argv]


class OrphanGuard:
    """A process that kills the watched process groups when this process is gone, however it went."""

    def __init__(self, process: Process, pipe: int) -> None:
        self._process = process
        self._pipe = pipe

    @classmethod
    async def start(cls) -> OrphanGuard:
        reads, writes = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *_bare_python(_GUARD), stdin=reads, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True
            )
        except BaseException:
            os.close(writes)
            raise
        finally:
            os.close(reads)
        return cls(process, writes)

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, group: int) -> None:
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Call it once the group is empty: its number may be given to someone else then."""
        self._tell(f"-{group}\n")

    def _tell(self, line: str) -> None:
        try:
            os.write(self._pipe, line.encode())  # short, so it is written whole or not at all
        except BrokenPipeError:
            log.warning(
                "the orphan guard (pid %d) is gone: a killed supervisor may leave processes", self.pid
            )

    async def close(self) -> None:
        """End the guard. It kills what is still watched."""
        os.close(self._pipe)
        try:
            async with asyncio.timeout(_GUARD_END_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
