"""Calls: what the engine asks its host and waits for: each has a number, and one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvolt.core.errors import DeadlineExceeded, KvoltError


class Calls:
    """See the module."""

    def __init__(self, whom: str) -> None:
        self._whom = whom
        self._number = 0
        self._waiting: dict[int, asyncio.Future[str | None]] = {}

    async def ask(self, send: Callable[[int], None], timeout_s: float) -> str | None:
        """None, or why it was refused. DeadlineExceeded, or the error that `fail` is given."""
        self._number += 1
        number = self._number
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        send(number)
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"{self._whom} did not answer", stage="total", after_s=timeout_s) from None
        finally:
            self._waiting.pop(number, None)

    def done(self, number: int, error: str | None) -> None:
        answer = self._waiting.get(number)
        if answer is not None and not answer.done():
            answer.set_result(error)

    def fail(self, error: KvoltError) -> None:
        """Nothing will be answered any more."""
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
