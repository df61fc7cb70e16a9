"""Deltas of one journey as an async iterator, for readers in their own task."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

from kvolt.core.delta import Delta
from kvolt.core.errors import KvoltError
from kvolt.core.request import Request
from kvolt.journey.journey import Journey, JourneyContext
from kvolt.journey.migration import ChoiceTokens, ReceivedTokens
from kvolt.runtime.endpoint.call import Deadlines
from kvolt.runtime.plane.streams import StepSink

HOLD_ABOVE = 64
"""Unread deltas above which reading from the worker is paused."""


class Deltas(AsyncIterator[Delta]):
    """`async with await Deltas.of(...)`: leaving the block cancels the journey."""

    steps: StepSink | None = None

    def __init__(self, num_choices: int, hold_above: int = HOLD_ABOVE) -> None:
        self._hold_above = hold_above
        self._received = ReceivedTokens(num_choices)
        self._items: deque[Delta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._journey: Journey | None = None
        self._is_over = False
        self._error: KvoltError | None = None
        self._is_held = False
        self.has_started = False

    @classmethod
    async def of(
        cls,
        journey_context: JourneyContext,
        request: Request,
        deadlines: Deadlines,
        hold_above: int = HOLD_ABOVE,
    ) -> Self:
        deltas = cls(request.sampling.num_choices, hold_above)
        journey = deltas._journey = Journey(journey_context, request, deltas, deadlines)
        try:
            await journey.start()
        except BaseException:
            journey.cancel()
            raise
        return deltas

    def received_tokens(self) -> ChoiceTokens:
        return self._received.received_tokens()

    def on_item(self, delta: Delta) -> None:
        self.has_started = True
        self._received.add_delta(delta)
        self._items.append(delta)
        if len(self._items) > self._hold_above and not self._is_held and self._journey is not None:
            self._is_held = True
            self._journey.hold()
        self._wake()

    def on_end(self, error: KvoltError | None) -> None:
        self._is_over = True
        self._error = error
        self._wake()

    async def __anext__(self) -> Delta:
        while not self._items and not self._is_over:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._items:
            delta = self._items.popleft()
            if self._is_held and not self._items and self._journey is not None:
                self._is_held = False
                self._journey.release()
            return delta
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if self._journey is not None:
            self._journey.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
