"""Host of an engine core: a separate process, or a thread of the shell. Owns its start and exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence
from typing import Protocol, Self

from kvolt.engines.child_process import ChildProcess
from kvolt.engines.native.shell.engine_loop import Pipe, ShellClosed
from kvolt.engines.native.shell.process import serve

log = logging.getLogger(__name__)

_MODULE = "kvolt.engines.native.shell.process"
_LAST_OUTPUT_S = 1.0


class Host(Protocol):
    """A running core."""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal number; None while it runs, and for a thread."""
        ...

    @property
    def last_lines(self) -> tuple[str, ...]:
        """The last lines of its output."""
        ...

    async def wait_exit(self) -> str:
        """Wait for the exit and for all output; returns a short description of the exit."""
        ...

    def kill(self) -> None:
        """Stop it now if possible. Idempotent."""
        ...


class ProcessHost(ChildProcess):
    """An engine process. Ends with this process: see `stop.die_with_parent`, and the watch thread of the
    process."""

    @classmethod
    async def start(cls, end: socket.socket, memory_fds: Sequence[int]) -> Self:
        """Takes ownership of `end`, even on failure. A cancelled call leaves nothing behind."""
        with end:
            return await cls.start_module(_MODULE, [end.fileno(), *memory_fds], name="engine process")


class ThreadHost:
    """A daemon thread. Cannot be killed: it ends after its current step."""

    exit_code = None
    last_lines: tuple[str, ...] = ()

    def __init__(self, end: socket.socket, memory_fds: Sequence[int]) -> None:
        """Takes ownership of `end`."""
        self._end = end
        self._memory_fds = [os.dup(each) for each in memory_fds]  # they may outlive the shell's descriptors
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    async def wait_exit(self) -> str:
        await self._ended.wait()
        self._thread.join(_LAST_OUTPUT_S)  # only its return is left
        return "ended"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pipe = Pipe(self._end)
        try:
            serve(pipe, pipe.receive_start(), self._memory_fds)
        except ShellClosed:
            pass
        except BaseException:
            log.exception("the engine's thread failed")
        finally:
            pipe.close()
            for descriptor in self._memory_fds:
                os.close(descriptor)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
