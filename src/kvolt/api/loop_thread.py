"""An event loop in a thread of its own, for callers without one and for notebooks, whose loop is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from functools import partial
from typing import Any, Generic, TypeVar

import uvloop

from kvolt.core.errors import Cancelled, KvoltError, Unavailable
from kvolt.runtime.tasks import TaskGroup

T = TypeVar("T")

_CANCEL_S = 30.0
"""Time that cancelled work has to clean up."""


class LoopThread:
    """Runs coroutines of other threads. Call `close` at the end; the thread does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = uvloop.new_event_loop()
        self._calls = TaskGroup(name, on_error=lambda error: None)  # raised to the caller
        self._is_closed = False
        self._lock = threading.RLock()
        """Orders calls before `close`: none is passed to a loop that stops. Reentrant: signal handlers may close."""
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. Ctrl-C cancels it, and returns when it has cleaned up."""
        call = _Call(work)
        try:
            self._submit(call)
        except KvoltError:
            work.close()
            raise
        try:
            return call.outcome.result()
        except BaseException:
            if not call.outcome.done():  # interrupted here, not failed there
                self._interrupt(call)
            raise

    def _submit(self, call: _Call[Any]) -> None:
        if not self._is_closed and not self._thread.is_alive():
            raise Unavailable(
                f"{self._name} belongs to another process: create it after the fork", reason="forked"
            )
        with self._lock:
            if self._is_closed:
                raise Unavailable(f"{self._name} is closed", reason="closed")
            self._loop.call_soon_threadsafe(self._start, call)

    def _start(self, call: _Call[T]) -> None:
        call.task = self._calls.start(call.work, "call")
        call.task.add_done_callback(partial(self._end, call))

    def _end(self, call: _Call[T], task: asyncio.Task[T]) -> None:
        if task.cancelled():
            call.outcome.set_exception(Cancelled(f"{self._name} was closed during the call"))
        elif (error := task.exception()) is not None:
            call.outcome.set_exception(error)
        else:
            call.outcome.set_result(task.result())

    def _interrupt(self, call: _Call[Any]) -> None:
        with self._lock:
            if not self._is_closed:  # `close` cancels it otherwise
                self._loop.call_soon_threadsafe(call.cancel)
        futures.wait([call.outcome], _CANCEL_S)

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, cancel the others, and stop. Call once.

        Does not wait when called on this thread, which a garbage collection may do. Does nothing after a fork.
        """
        if not self._thread.is_alive():
            work.close()
            return
        with self._lock:
            self._is_closed = True
            asyncio.run_coroutine_threadsafe(self._close(work), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _close(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            await self._calls.close()
            self._loop.call_soon(self._loop.stop)  # after the results have reached their threads

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class _Call(Generic[T]):
    """A coroutine and its outcome, which is set when it has ended and cleaned up."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.work = work
        self.outcome: futures.Future[T] = futures.Future()
        self.task: asyncio.Task[T] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()
