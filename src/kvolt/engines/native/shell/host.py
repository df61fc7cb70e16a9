"""Where an engine core runs: a process of its own, or a thread of the shell's.

Owns its start and its end. Knows nothing of what is said over the socket.
"""

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
from kvolt.engines.native.shell.engine_loop import Pipe, ShellGone
from kvolt.engines.native.shell.process import serve

log = logging.getLogger(__name__)

_MODULE = "kvolt.engines.native.shell.process"
_LAST_OUTPUT_S = 1.0


class Host(Protocol):
    """A core that was started."""

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal's number; None while it runs, and for a thread."""
        ...

    @property
    def last_lines(self) -> tuple[str, ...]:
        """What it wrote last, for people."""
        ...

    async def ended(self) -> str:
        """Wait for its end; how it came, in a few words. All it wrote is there then."""
        ...

    def kill(self) -> None:
        """End it now, as far as that is possible. Again and after its end: no error."""
        ...


class ProcessHost(ChildProcess):
    """It ends with this process, however that ends: see `stop.die_with_parent`, and the process's own watch."""

    @classmethod
    async def start(cls, end: socket.socket, memory_fds: Sequence[int]) -> Self:
        """Takes over `end`, also when it fails. Cancelling leaves nothing behind."""
        with end:
            return await cls.of_module(_MODULE, [end.fileno(), *memory_fds], name="engine process")


class ThreadHost:
    """It cannot be killed: it ends after the step that it is at. A daemon, so that no exit waits for it."""

    exit_code = None
    last_lines: tuple[str, ...] = ()

    def __init__(self, end: socket.socket, memory_fds: Sequence[int]) -> None:
        """Takes over `end`."""
        self._end = end
        self._memory_fds = [os.dup(each) for each in memory_fds]  # they may outlive the shell's
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="native-engine", daemon=True)
        self._thread.start()

    async def ended(self) -> str:
        await self._ended.wait()
        self._thread.join(_LAST_OUTPUT_S)  # it has nothing left to do but to return
        return "ended"

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _run(self) -> None:
        pipe = Pipe(self._end)
        try:
            serve(pipe, pipe.receive_start(), self._memory_fds)
        except ShellGone:
            pass
        except BaseException:
            log.exception("the engine's thread failed")
        finally:
            pipe.close()
            for descriptor in self._memory_fds:
                os.close(descriptor)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._ended.set)
