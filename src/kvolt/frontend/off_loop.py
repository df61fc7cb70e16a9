"""Runs CPU work of large requests off the event loop.

Parsing, checking and hashing take time proportional to the request. Small requests stay on the loop, where they are
cheapest. Large ones use a dedicated thread, one at a time: the thread shares the interpreter lock with the loop,
which gets it back every few milliseconds; with several such threads the loop would wait for each of them. A single C
call holds the lock until it returns, so the input of one call is limited (`openai_api.structure`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from kvolt.core.errors import Overloaded
from kvolt.runtime.clock import Blocking

T = TypeVar("T")

INLINE_TOKENS = 32 * 1024
"""Maximum number of tokens hashed, copied or decoded on the loop."""

INLINE_LOGPROBS = 8 * 1024
"""Maximum number of log probabilities written on the loop."""

_MAX_WAITING = 256
_TIMEOUT_S = 60.0
_RETRY_AFTER_S = 10.0


class OffLoop:
    """Runs work of large requests in dedicated threads, in order of arrival.

    A first call expands or parses a body. It waits for the other calls, so that few parsed bodies are in memory at a
    time. The next call starts when a thread has finished its call, even if the caller was cancelled. Use more than one
    thread only for calls that release the interpreter lock.
    """

    def __init__(self, blocking: Blocking, name: str = "large-requests", num_threads: int = 1) -> None:
        self._blocking = blocking.dedicated(name, num_threads)
        self._num_free = num_threads
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._waiting_first: deque[asyncio.Future[None]] = deque()

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call. Raises Overloaded if too many calls wait, or after a time-out; a cancelled call runs to its
        end."""
        return await self._run(call, self._waiting)

    async def run_first(self, call: Callable[[], T]) -> T:
        """Run the first call of a request; otherwise like `run`."""
        return await self._run(call, self._waiting_first)

    async def _run(self, call: Callable[[], T], queue: deque[asyncio.Future[None]]) -> T:
        if len(self._waiting) + len(self._waiting_first) >= _MAX_WAITING:
            raise self._overloaded("too many large requests are waiting")
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._acquire(queue)
        except TimeoutError:
            raise self._overloaded(f"a large request waited {_TIMEOUT_S:g} s") from None
        try:
            return await self._blocking.run(call, _TIMEOUT_S)
        finally:
            self._release()

    async def _acquire(self, queue: deque[asyncio.Future[None]]) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        queue.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the task was cancelled when it had just got its turn
                self._release()
            elif turn in queue:
                queue.remove(turn)
            raise

    def _release(self) -> None:
        """Pass the turn on."""
        for queue in (self._waiting, self._waiting_first):
            while queue:
                turn = queue.popleft()
                if not turn.cancelled():
                    turn.set_result(None)
                    return
        self._num_free += 1

    def _overloaded(self, message: str) -> Overloaded:
        return Overloaded(message, queue="large_requests", limit=_MAX_WAITING, retry_after_s=_RETRY_AFTER_S)
