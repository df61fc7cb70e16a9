"""Entry point of the engine process: loads a core and runs its loop.

    python -m kvolt.engines.native.shell.process SOCKET_FD [MEMORY_FD of each rank]

Ends when the shell closes the socket, in any state. torch is imported by loading the core and not earlier,
after the number of threads is set. `serve` also runs in a thread.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvolt.core.errors import ConfigError, EngineFailed, KvoltError, to_info
from kvolt.engines.native.shell.engine_loop import EngineLoop, Pipe, ShellClosed, engine_facts
from kvolt.engines.native.shell.messages import Fatal, Loaded, Log, Start
from kvolt.runtime.clock import SystemClock
from kvolt.runtime.host.cores import thread_env
from kvolt.runtime.stop import exit_at_once

if TYPE_CHECKING:
    from kvolt.engines.native.core import EngineCore


def serve(pipe: Pipe, start: Start, memory_fds: Sequence[int], *, is_own_process: bool = False) -> int:
    """Load a core and run it; returns the exit code. Reports the cause of an early end. Raises ShellClosed if
    the shell is gone."""
    try:
        core = _load(start, memory_fds)
    except ShellClosed:
        raise
    except KvoltError as error:
        return _fail(pipe, error, "")
    except Exception as error:
        return _fail(pipe, _unexpected("loading the model", error), traceback.format_exc())
    if is_own_process:
        # Exclude loaded objects from garbage collection, which would delay steps.
        gc.collect()
        gc.freeze()
        gc.enable()
    try:
        pipe.send(Loaded(core.card, core.info, engine_facts(core)))
        EngineLoop(pipe, core, SystemClock()).run()
    except ShellClosed:
        raise
    except Exception as error:
        return _fail(pipe, _unexpected("a step", error), traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            core.close()
    return 0


def _load(start: Start, memory_fds: Sequence[int]) -> EngineCore:
    def memory(rank: int, num_bytes: int) -> int | None:
        """The shell's memory resized to `num_bytes`; the caller closes the descriptor."""
        if rank >= len(memory_fds):
            return None
        os.ftruncate(memory_fds[rank], num_bytes)
        return os.dup(memory_fds[rank])

    module, _, name = start.core.partition(":")
    try:
        load = getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the native engine needs {error.name}, which is not installed",
            key="engine",
            remedy="pip install 'kvolt[native]'",
        ) from error
    core: EngineCore = load(start.spec, start.arguments, memory)
    return core


def _unexpected(what: str, error: Exception) -> EngineFailed:
    first_line = str(error).partition("\n")[0][:500]
    return EngineFailed(f"{what} failed: {type(error).__name__}: {first_line}", engine="native")


def _fail(pipe: Pipe, error: KvoltError, trace: str) -> int:
    pipe.send(Fatal(to_info(error), trace))
    return 2 if isinstance(error, ConfigError) else 1


class _LogToShell(logging.Handler):
    """Sends all log records to the shell, which writes them."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))  # the shell adds the rest
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(ShellClosed):  # this process ends in a moment
            self._pipe.send(Log(record.levelno, record.name, self.format(record)))


def _exit_with(shell: int) -> None:
    """Exit this process when the other end of the socket is closed."""
    poll = select.poll()
    poll.register(shell, 0)  # no events requested: only a hang-up is reported
    poll.poll()
    exit_at_once(1)


def main(argv: list[str]) -> int:
    socket_fd, *memory_fds = map(int, argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(
            number, signal.SIG_IGN
        )  # signals may reach the whole group, and the shell must drain first
    faulthandler.enable()
    gc.disable()  # loading creates many objects and no garbage; `serve` enables it
    for descriptor in (socket_fd, *memory_fds):
        os.set_inheritable(descriptor, False)  # child processes must not keep them open
    end = socket.socket(fileno=socket_fd)
    threading.Thread(target=_exit_with, args=(socket_fd,), name="shell-watch", daemon=True).start()
    pipe = Pipe(end)
    try:
        start = pipe.receive_start()
        logging.basicConfig(level=start.log_level, handlers=[_LogToShell(pipe)])
        if start.arguments.threads is not None:
            # Thread pools read it when they are created, at the first import.
            for name, value in thread_env(range(start.arguments.threads)).items():
                os.putenv(name, value)
        return serve(pipe, start, memory_fds, is_own_process=True)
    except ShellClosed:
        return 1


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    exit_at_once(code)  # threads and destructors of libraries need not run
