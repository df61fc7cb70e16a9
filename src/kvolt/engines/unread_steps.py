"""UnreadSteps: what an engine has made and its worker has not taken yet. Nothing of an aborted request is in them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId

_MOST = 1024


class UnreadSteps:
    """For one loop and one reader."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._steps: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_read = asyncio.Event()
        """Its reader has come back for more than there was."""
        self._failure: KvoltError | None = None
        self.is_over = False

    def put(self, step: StepOutput | None) -> None:
        if step is None or self.is_over:
            return
        self._steps.append(step)
        self._changed.set()
        self._is_read.clear()
        if len(self._steps) >= self._most:
            self._has_room.clear()

    async def room(self) -> None:
        """Until half of what is unread has been taken, if that was too much."""
        await self._has_room.wait()

    async def read_up(self, timeout_s: float) -> None:
        """Until the reader has dealt with all that there is, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_read.wait()

    def forget(self, request_id: RequestId) -> None:
        """Nobody has heard yet of what is in here, and nobody shall."""
        for index, step in enumerate(self._steps):
            if tells_of(step, request_id):
                self._steps[index] = without(step, {request_id})

    def end(self, failure: KvoltError | None) -> None:
        """No more come. With a failure the reader has what there is, then the error; else nothing more."""
        if self.is_over:
            return
        self.is_over, self._failure = True, failure
        if failure is None:
            self._steps.clear()
        self._changed.set()
        self._has_room.set()
        self._is_read.set()

    async def read(self) -> AsyncIterator[StepOutput]:
        while True:
            while self._steps:
                step = self._steps.popleft()
                if len(self._steps) < self._most // 2:
                    self._has_room.set()
                yield step
            if self._failure is not None:
                raise self._failure
            if self.is_over:
                return
            self._changed.clear()
            self._is_read.set()
            await self._changed.wait()


def tells_of(output: StepOutput, request_id: RequestId) -> bool:
    return (
        request_id in output.plain_ids
        or any(request_id == other for other, _ in output.deltas)
        or any(request_id == other for other, _ in output.failed)
    )


def without(output: StepOutput, gone: set[RequestId]) -> StepOutput:
    """The same step with nothing of these requests."""
    plain = [
        (request_id, token)
        for request_id, token in zip(output.plain_ids, output.plain_tokens, strict=True)
        if request_id not in gone
    ]
    return replace(
        output,
        deltas=tuple(pair for pair in output.deltas if pair[0] not in gone),
        failed=tuple(pair for pair in output.failed if pair[0] not in gone),
        plain_ids=tuple(request_id for request_id, _ in plain),
        plain_tokens=tuple(token for _, token in plain),
    )
