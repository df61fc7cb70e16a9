"""TierThread: a thread that moves a tier's bytes, one call after the other, for the event loop.

Where there are no threads, on a virtual loop, `EXECUTORS` gives it another executor.
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
    """Runs calls one after the other."""

    def now(self) -> float:
        """Clock by which calls are timed."""
        ...

    def submit(self, call: Callable[[], Value], /) -> Future[Value]: ...

    async def end(self) -> None:
        """Wait for the calls under way; none comes after that."""
        ...


class _Thread:
    """A TierExecutor with a thread of its own."""

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
"""By the name of the thread."""


class TierThread:
    """See the module. `close` waits for what is under way."""

    def __init__(self, name: str) -> None:
        self._executor = EXECUTORS.get()(name)

    async def close(self) -> None:
        await self._executor.end()

    async def run(self, call: Callable[..., Value], *arguments: object) -> tuple[Value, float]:
        """What a call gives, and how long it took once it was its turn. Cancelled, however often, this ends after the
        call has: what that works on is kept for it so long."""

        def timed() -> tuple[Value, float]:
            began_at = self._executor.now()
            return call(*arguments), self._executor.now() - began_at

        job = self._executor.submit(timed)
        working = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            job.cancel()  # if it has not begun; the asyncio future would say so of one that runs, too
            while not working.done():
                try:
                    await asyncio.wait([working])
                except asyncio.CancelledError:
                    continue
            if not working.cancelled():
                working.exception()
            raise

    async def ask(self, call: Callable[..., Value], *arguments: object) -> Value:
        """What a call gives that works on nothing of ours: cancelled, this ends at once, and the call in its time."""
        working = asyncio.wrap_future(self._executor.submit(partial(call, *arguments)))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
