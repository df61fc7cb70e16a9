"""An event loop in a thread of its own, for callers without one and for notebooks, whose loop is busy."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent import futures
from typing import Any, TypeVar

import uvloop

from kvolt.core.errors import Cancelled, Unavailable

T = TypeVar("T")

_CANCEL_S = 30.0
"""Time that cancelled work has to clean up."""


class LoopThread:
    """Runs coroutines of other threads. Call `close` at the end; the thread does not keep the interpreter alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop = uvloop.new_event_loop()
        self._running: set[asyncio.Task[Any]] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run_loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. Ctrl-C cancels it, and returns when it has cleaned up."""
        if self._is_closed:
            work.close()
            raise Unavailable(f"{self._name} is closed", reason="closed")
        if not self._thread.is_alive():
            work.close()
            raise Unavailable(
                f"{self._name} belongs to another process: create it after the fork", reason="forked"
            )
        ended = threading.Event()

        async def supervised() -> T:
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            try:
                return await work
            finally:
                self._running.discard(task)
                ended.set()

        outcome = asyncio.run_coroutine_threadsafe(supervised(), self._loop)
        try:
            return outcome.result()
        except futures.CancelledError:
            raise Cancelled(f"{self._name} was closed during the call") from None
        except BaseException:
            if not outcome.done():  # interrupted here, not failed there
                outcome.cancel()
                ended.wait(_CANCEL_S)
            raise

    def close(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a last coroutine, cancel the others, and stop. Call once.

        Does not wait when called on this thread, which a garbage collection may do.
        """
        self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._close(work), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def _close(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        finally:
            running = list(self._running)
            for task in running:
                task.cancel()
            if running:
                await asyncio.wait(running)
            self._loop.call_soon(self._loop.stop)  # after the results have reached their threads

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()
