"""StepQueue: bounded queue of step outputs between an engine and its worker. Drops outputs of aborted
requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.core.errors import KvoltError
from kvolt.core.ids import RequestId

_MAX_STEPS = 1024


class StepQueue:
    """For one event loop and one reader."""

    def __init__(self, max_steps: int = _MAX_STEPS) -> None:
        self._max_steps = max_steps
        self._steps: deque[StepOutput] = deque()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        self._is_read = asyncio.Event()
        """Set when the reader has returned for more than there was."""
        self._failure: KvoltError | None = None
        self.is_closed = False

    def put(self, step: StepOutput | None) -> None:
        if step is None or self.is_closed:
            return
        self._steps.append(step)
        self._changed.set()
        self._is_read.clear()
        if len(self._steps) >= self._max_steps:
            self._has_room.clear()

    async def wait_for_space(self) -> None:
        """Wait while the queue is full, until half of it has been read."""
        await self._has_room.wait()

    async def wait_until_read(self, timeout_s: float) -> None:
        """Wait until the reader has processed everything, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_read.wait()

    def drop_request(self, request_id: RequestId) -> None:
        """Remove all output of a request that was not read yet."""
        for index, step in enumerate(self._steps):
            if mentions_request(step, request_id):
                self._steps[index] = without_requests(step, {request_id})

    def close(self, failure: KvoltError | None) -> None:
        """Accept no more steps. With a failure the reader gets the queued steps, then the error; otherwise
        nothing more."""
        if self.is_closed:
            return
        self.is_closed, self._failure = True, failure
        if failure is None:
            self._steps.clear()
        self._changed.set()
        self._has_room.set()
        self._is_read.set()

    async def read(self) -> AsyncIterator[StepOutput]:
        while True:
            while self._steps:
                step = self._steps.popleft()
                if len(self._steps) < self._max_steps // 2:
                    self._has_room.set()
                yield step
            if self._failure is not None:
                raise self._failure
            if self.is_closed:
                return
            self._changed.clear()
            self._is_read.set()
            await self._changed.wait()


def mentions_request(output: StepOutput, request_id: RequestId) -> bool:
    return (
        request_id in output.plain_ids
        or any(request_id == other for other, _ in output.deltas)
        or any(request_id == other for other, _ in output.failed)
    )


def without_requests(output: StepOutput, dropped: set[RequestId]) -> StepOutput:
    """A copy of the step without these requests."""
    plain = [
        (request_id, token)
        for request_id, token in zip(output.plain_ids, output.plain_tokens, strict=True)
        if request_id not in dropped
    ]
    return replace(
        output,
        deltas=tuple(pair for pair in output.deltas if pair[0] not in dropped),
        failed=tuple(pair for pair in output.failed if pair[0] not in dropped),
        plain_ids=tuple(request_id for request_id, _ in plain),
        plain_tokens=tuple(token for _, token in plain),
    )
