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

        working = asyncio.get_running_loop().run_in_executor(self._thread, timed)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            working.cancel()  # if it has not begun
            while not working.done():
                try:
                    await asyncio.wait([working])
                except asyncio.CancelledError:
                    continue
            if not working.cancelled():
                working.exception()
            raise
