"""Child processes: start, output, exit and end.

`ChildProcess` is for code on an event loop, `start_blocking` and `reap` for other code. No other module creates
processes that run beside this one, except by `multiprocessing`, whose processes end with their pipe.

If this process is killed (SIGKILL, out of memory), none of its code runs any more, so its children are ended from
outside:

* Linux: each child asks the kernel for SIGKILL at its parent's death (`die_with_parent`). For the kernel the parent
  is the *thread* that started it, so that thread must live as long as the child.
* All systems: a small guard process waits on a pipe that breaks when its owner dies, then kills each child's process
  group, including processes that the children started (`OrphanGuard`, of the supervisor). macOS has only this one.

A process that creates its own session escapes both.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

from kvolt.runtime.supervisor.output import LineReader
from kvolt.runtime.supervisor.plan import describe_exit

log = logging.getLogger(__name__)

_LAST_OUTPUT_S = 1.0
_REAP_S = 5.0
"""Time between SIGKILL and the exit; a process that is blocked in the kernel is abandoned."""


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


class Child(Protocol):
    """What `end_child` needs of a child."""

    async def wait_exit(self) -> str:
        """Wait for the exit and for all output; returns a short description of the exit."""

    def kill(self) -> None:
        """Kill it now if possible. Idempotent."""


class ChildProcess:
    """A process that ends with this one."""

    def __init__(
        self,
        process: Process,
        output: LineReader | None,
        pipe: asyncio.ReadTransport | None,
        *,
        leads_group: bool,
    ) -> None:
        self.output = output
        self._process = process
        self._pipe = pipe
        self._leads_group = leads_group
        self._is_group_killed = False
        """Whether its group was killed after its own exit."""

    @classmethod
    async def start(
        cls,
        argv: Sequence[str],
        output: LineReader | None,
        *,
        env: Mapping[str, str] | None = None,
        affinity: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
        leads_group: bool = False,
    ) -> Self:
        """Start a process. OSError if that is impossible; cancelling leaves no process behind.

        `output` reads what it writes; None: it uses this process's terminal. With `leads_group` it leads a session, so
        that Ctrl-C does not reach it, and a process group that ends with it.
        """
        program = shutil.which(argv[0], path=(os.environ if env is None else env).get("PATH"))
        if program is None:
            raise FileNotFoundError(2, f"program not found: {argv[0]}")
        command = die_with_parent([program, *argv[1:]], affinity)
        # uvloop has no `process_group`.
        options: dict[str, Any] = {"env": env, "pass_fds": pass_fds, "start_new_session": leads_group}
        if output is None:
            process = await asyncio.create_subprocess_exec(*command, **options)
            return cls(process, None, None, leads_group=leads_group)
        # An own pipe: with asyncio's, `wait` would not return while a helper of the child holds it open.
        read_end, write_end = os.pipe()
        try:
            pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: output, os.fdopen(read_end, "rb", 0)
            )
            try:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=write_end, stderr=write_end, **options
                )
            except BaseException:
                pipe.close()
                raise
        finally:
            os.close(write_end)
        return cls(process, output, pipe, leads_group=leads_group)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal number; None while it runs."""
        return self._process.returncode

    async def wait_exit(self) -> str:
        """Wait for the exit and for all output; returns a short description of the exit."""
        code = await self._process.wait()
        if self._leads_group:
            self.kill()
        if self.output is not None:
            with contextlib.suppress(TimeoutError):  # a grandchild may keep the pipe open
                async with asyncio.timeout(_LAST_OUTPUT_S):
                    await self.output.ended.wait()
        if self._pipe is not None:
            self._pipe.close()
        return describe_exit(code)

    def terminate(self) -> None:
        """Send SIGTERM to the process, not to its group."""
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, and its group if it leads one. Idempotent.

        A process group id stays reserved while the group has members and may be reused afterwards, so the
        group is killed once after the exit and not again.
        """
        if self._is_group_killed:
            return
        self._is_group_killed = self.exit_code is not None
        if not self._leads_group:
            self._send_signal(signal.SIGKILL)
            return
        # Already ended, or (macOS) only zombies are left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process. Not by asyncio: its `Popen` would reap a process that has just ended, and the
        exit code would be lost to `wait_exit`."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


async def end_child(child: Child, grace_s: float = 0.0) -> None:
    """Wait for the exit; kill the child after `grace_s`, or if the caller is cancelled. Idempotent."""
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await child.wait_exit()
    finally:
        child.kill()
        try:
            async with asyncio.timeout(_REAP_S):
                await child.wait_exit()
        except TimeoutError:
            log.error("process did not exit after SIGKILL, abandoned: timeout=%g s", _REAP_S)


def start_blocking(argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that ends with the calling thread. `options`: as of Popen."""
    return subprocess.Popen(die_with_parent(argv), stdin=subprocess.DEVNULL, **options)


def reap(process: subprocess.Popen[Any], grace_s: float = 0.0) -> int:
    """Wait for the exit, kill the process after `grace_s`, and return its exit code."""
    try:
        return process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


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
            async with asyncio.timeout(_REAP_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
