"""Structured concurrency with a deterministic order: the only module that creates tasks.

`asyncio.TaskGroup` keeps its tasks in a set and cancels them in address order, so that two runs with one seed differ.
Both classes here keep start order, and both wait at exit until every task has ended.

* `Scope`: tasks that succeed or fail together. The first failure cancels the others and is raised at exit.
* `TaskGroup`: independent tasks (requests, connections). A failure is passed to `on_error` and ends only its task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

log = logging.getLogger(__name__)

Work = Coroutine[Any, Any, Any]


class Scope:
    """Tasks that succeed or fail together; use as `async with Scope("name") as scope`.

    Leaving the block waits for all tasks; leaving it by an exception cancels them in start order.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._parent: asyncio.Task[Any] | None = None
        self._failure: BaseException | None = None
        self._idle: asyncio.Event = asyncio.Event()
        self._stopping = False
        self._exiting = False
        self._woke_parent = False

    async def __aenter__(self) -> Self:
        self._parent = asyncio.current_task()
        return self

    def start(self, work: Work, name: str) -> asyncio.Task[Any]:
        if self._parent is None:
            work.close()
            raise RuntimeError(f"scope {self._name} is not open")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}/{name}")
        self._tasks[task] = None
        self._idle.clear()
        task.add_done_callback(self._done)
        if self._stopping:
            task.cancel()
        return task

    def cancel(self) -> None:
        """Cancel all tasks, oldest first; the block then exits without an error."""
        self._stopping = True
        for task in list(self._tasks):
            task.cancel()

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if not self._tasks:
            self._idle.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and self._failure is not None:
            log.error("task failed: task=%s", task.get_name(), exc_info=error)  # only the first one is raised
        elif error is not None:
            self._failure = error
            self.cancel()
            if self._parent is not None and not self._exiting and not self._parent.done():
                self._woke_parent = True
                self._parent.cancel()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._exiting = True
        if error is not None:
            self.cancel()
        interrupted = isinstance(error, asyncio.CancelledError) and not self._woke_parent
        while self._tasks:
            try:
                await self._idle.wait()
            except asyncio.CancelledError:
                if not self._woke_parent:
                    interrupted = True
                self.cancel()
        self._parent, parent = None, self._parent
        if self._woke_parent and parent is not None:
            # Swallow only the cancellation that this scope sent to wake its parent.
            interrupted = parent.uncancel() > 0 or interrupted
        if interrupted:
            if isinstance(error, asyncio.CancelledError):
                return False
            raise asyncio.CancelledError
        if error is not None and not isinstance(error, asyncio.CancelledError):
            return False
        if self._failure is not None:
            raise self._failure
        return isinstance(error, asyncio.CancelledError) and self._woke_parent


class TaskGroup:
    """Independent tasks that end when the group is closed. The caller bounds their number."""

    def __init__(self, name: str, on_error: Callable[[BaseException], None] | None = None) -> None:
        self._name = name
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._on_error = on_error
        self._idle: asyncio.Event | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def closed(self) -> bool:
        return self._closed

    def start(self, work: Work, name: str) -> asyncio.Task[Any]:
        if self._closed:
            work.close()
            raise RuntimeError(f"task group {self._name} is closed")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._name}/{name}")
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task, None)
        if self._idle is not None and len(self._tasks) <= 1:  # the remaining task may be the waiting one
            self._idle.set()
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        if self._on_error is not None:
            self._on_error(error)
        else:
            log.error("task failed: task=%s", task.get_name(), exc_info=error)

    async def drain(self) -> None:
        """Wait until no task is left except the caller's own; cancels nothing."""
        current = asyncio.current_task()
        while any(task is not current for task in self._tasks):
            if self._idle is None or self._idle.is_set():
                self._idle = asyncio.Event()
            await self._idle.wait()

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuse new tasks, wait `drain_s` for running ones, cancel the rest in start order, and wait for them.

        A task that closes its own group is not waited for.
        """
        self._closed = True
        if drain_s > 0 and self._tasks:
            try:
                async with asyncio.timeout(drain_s):
                    await self.drain()
            except TimeoutError:
                pass
        current = asyncio.current_task()
        others = [task for task in self._tasks if task is not current]
        for task in others:
            task.cancel()
        for task in others:
            await asyncio.wait([task])
