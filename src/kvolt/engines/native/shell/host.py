"""Host of an engine core: a separate process, or a thread of the shell. Owns its start and exit."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence

from kvolt.engines.engine_process import EngineProcess
from kvolt.engines.native.shell.engine_loop import Pipe, ShellClosed
from kvolt.engines.native.shell.process import serve

log = logging.getLogger(__name__)

_MODULE = "kvolt.engines.native.shell.process"
_LAST_OUTPUT_S = 1.0


async def start_process(end: socket.socket, memory_fds: Sequence[int]) -> EngineProcess:
    """Start an engine process. It ends with this process: see `runtime.supervisor.process`, and its own watch thread.

    Takes ownership of `end`, even on failure. A cancelled call leaves nothing behind."""
    with end:
        descriptors = [end.fileno(), *memory_fds]
        return await EngineProcess.start_module(_MODULE, descriptors, name="engine process")


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
