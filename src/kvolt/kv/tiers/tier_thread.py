"""TierThread: a thread that moves a tier's bytes, one call after the other, for the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Value = TypeVar("Value")


class TierThread:
    """See the module. `close` waits for what is under way."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    async def run(self, call: Callable[..., Value], *arguments: object) -> tuple[Value, float]:
        """What a call gives, and how long it took once it was its turn. Cancelled, however often, this ends after the
        call has: what that works on is kept for it so long."""

        def timed() -> tuple[Value, float]:
            began_at = time.perf_counter()
            return call(*arguments), time.perf_counter() - began_at

        job = self._thread.submit(timed)
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
        working = asyncio.wrap_future(self._thread.submit(call, *arguments))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
