"""TierThread: runs blocking calls of a tier sequentially in a thread, for the event loop.

On a virtual loop, which has no threads, `EXECUTORS` provides another executor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Protocol, TypeVar

Value = TypeVar("Value")


class TierExecutor(Protocol):
    """Runs calls sequentially."""

    def now(self) -> float:
        """Clock used to time calls."""
        ...

    def submit(self, call: Callable[[], Value], /) -> Future[Value]: ...

    async def end(self) -> None:
        """Wait for submitted calls; no further ones follow."""
        ...


class _Thread:
    """TierExecutor with its own thread."""

    now = staticmethod(time.perf_counter)

    def __init__(self, name: str) -> None:
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[[], Value], /) -> Future[Value]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, self._name)
        return self._pool.submit(call)

    async def end(self) -> None:
        if self._pool is not None:
            await asyncio.to_thread(self._pool.shutdown, wait=True)


EXECUTORS: ContextVar[Callable[[str], TierExecutor]] = ContextVar("tier executors", default=_Thread)
"""Factory of executors, by thread name."""


class TierThread:
    """See the module. `close` waits for submitted calls."""

    def __init__(self, name: str) -> None:
        self._executor = EXECUTORS.get()(name)

    async def close(self) -> None:
        await self._executor.end()

    async def run(self, call: Callable[..., Value], *arguments: object) -> tuple[Value, float]:
        """Run a call; return its result and elapsed seconds.

        If cancelled, even repeatedly, returns only after the call has ended, so that its buffers stay valid.
        """

        def timed() -> tuple[Value, float]:
            started_at = self._executor.now()
            return call(*arguments), self._executor.now() - started_at

        job = self._executor.submit(timed)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            job.cancel()  # only if not started; the asyncio future would also cancel a running one
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue
            if not future.cancelled():
                future.exception()  # mark as retrieved
            raise

    async def ask(self, call: Callable[..., Value], *arguments: object) -> Value:
        """Run a call that uses no buffers of the caller. If cancelled, returns at once; the call completes later."""
        future = asyncio.wrap_future(self._executor.submit(partial(call, *arguments)))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
