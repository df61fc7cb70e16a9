"""TransferHandle: awaitable handle that agent calls return. It can be awaited and cancelled from any thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from kvolt.core.errors import Cancelled, DeadlineExceeded, KvoltError
from kvolt.transfer.operation import OperationEvent, OperationState, next_state

Result = TypeVar("Result")


class TransferHandle(ABC, Generic[Result]):
    """Await it from any event loop for the result or the error."""

    def __init__(self, name: str, cancel: Callable[[], object]) -> None:
        self.name = name
        self._cancel = cancel
        self._state = OperationState.INITIALIZED
        self._future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    @property
    def state(self) -> OperationState:
        return self._state

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
        self._state = next_state(self.name, self._state, OperationEvent.START)

    def finish(self, error: KvoltError | None) -> None:
        """For the agent: set the outcome; no more bytes move."""
        self._state = next_state(self.name, self._state, _finish_event(error))
        if error is None:
            self._future.set_result(self._result())
        else:
            self._future.set_exception(error)
            self._future.exception()  # mark as retrieved

    @abstractmethod
    def _result(self) -> Result:
        """Result of a successful operation."""


class PostHandle(TransferHandle[None]):
    """Handle of a posted message; succeeds when a peer has fetched it."""

    def _result(self) -> None:
        return None


class ReceiveHandle(TransferHandle[bytes]):
    """Handle of a receive. Cancelling the awaiting task cancels it, since the message has no other receiver."""

    def __init__(self, name: str, cancel: Callable[[], object]) -> None:
        super().__init__(name, cancel)
        self.message = b""

    def __await__(self) -> Generator[Any, None, bytes]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _result(self) -> bytes:
        return self.message


def _retrieve_exception(end: asyncio.Future[Any]) -> None:
    """Retrieve the exception, so that the loop does not log it as never retrieved."""
    if not end.cancelled():
        end.exception()


def _finish_event(error: KvoltError | None) -> OperationEvent:
    match error:
        case None:
            return OperationEvent.FINISH
        case Cancelled():
            return OperationEvent.CANCEL
        case DeadlineExceeded():
            return OperationEvent.EXPIRE
        case _:
            return OperationEvent.FAIL
