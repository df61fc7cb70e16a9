"""TransferHandle: awaitable handle that agent calls return. It can be awaited and cancelled from any thread.

A finished operation moves no more bytes, so its blocks may be reused: the agent stops copying before it sets the
outcome.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Callable, Generator
from enum import StrEnum
from typing import Any, Generic, TypeVar

from kvolt.core.errors import Cancelled, KvoltError

Result = TypeVar("Result")


class OperationState(StrEnum):
    INITIALIZED = "initialized"
    """Submitted; no byte has moved."""
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"
    """All blocks have arrived and their checksums match."""
    ERRORED = "errored"
    """Also at the deadline of either side."""
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        return self not in (OperationState.INITIALIZED, OperationState.IN_PROGRESS)


class TransferHandle(Generic[Result]):
    """Await it from any event loop for the result or the error."""

    def __init__(self, cancel: Callable[[], object], result: Result) -> None:
        self._cancel = cancel
        self.value = result
        """For the agent: result of a successful operation."""
        self._future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    @property
    def state(self) -> OperationState:
        if not self._future.done():
            return OperationState.IN_PROGRESS if self._future.running() else OperationState.INITIALIZED
        error = self._future.exception()
        if error is None:
            return OperationState.COMPLETE
        return OperationState.CANCELLED if isinstance(error, Cancelled) else OperationState.ERRORED

    def cancel(self) -> None:
        """Request cancellation; the handle is done when awaiting it returns."""
        self._cancel()

    def __await__(self) -> Generator[Any, None, Result]:
        """Cancelling the awaiting task does not cancel the operation."""
        end = asyncio.wrap_future(self._future)
        end.add_done_callback(_retrieve_exception)
        return asyncio.shield(end).__await__()

    async def wait_done(self) -> None:
        """Wait until no more bytes move, whatever the outcome. Never raises the operation's error."""
        with contextlib.suppress(KvoltError):
            await self

    def result(self, timeout_s: float | None = None) -> Result:
        """Block for the result, for threads without an event loop. TimeoutError after `timeout_s`."""
        return self._future.result(timeout_s)

    def start(self) -> None:
        """For the agent: mark as submitted."""
        self._future.set_running_or_notify_cancel()

    def finish(self, error: KvoltError | None) -> None:
        """For the agent: set the outcome, once; no more bytes move."""
        if error is None:
            self._future.set_result(self.value)
        else:
            self._future.set_exception(error)
            self._future.exception()  # mark as retrieved


class ReceiveHandle(TransferHandle[bytes]):
    """Handle of a receive. Cancelling the awaiting task cancels it, since the message has no other receiver."""

    def __await__(self) -> Generator[Any, None, bytes]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise


def _retrieve_exception(end: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that the loop does not log it as never retrieved."""
    if not end.cancelled():
        end.exception()
