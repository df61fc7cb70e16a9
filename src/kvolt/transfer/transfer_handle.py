"""Undertaking: what the public calls of an agent give back: awaited, cancelled, asked how it stands, from any thread.

Owns how an end reaches whoever waits for it. How it comes about is the agent's matter.
"""

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


class Undertaking(ABC, Generic[Result]):
    """Await it, from any loop: what came of it at the end, or why nothing did."""

    def __init__(self, name: str, cancel: Callable[[], object]) -> None:
        self.name = name
        self._cancel = cancel
        self._state = OperationState.INITIALIZED
        self._future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    @property
    def state(self) -> OperationState:
        return self._state

    def cancel(self) -> None:
        """Ask for its end; it is over when awaiting it says so."""
        self._cancel()

    def __await__(self) -> Generator[Any, None, Result]:
        """Whoever awaits may go; the operation goes on."""
        end = asyncio.wrap_future(self._future)
        end.add_done_callback(_hear)
        return asyncio.shield(end).__await__()

    async def over(self) -> None:
        """Returns when no byte moves any more, however that came."""
        with contextlib.suppress(KvoltError):
            await self

    def result(self, timeout_s: float | None = None) -> Result:
        """For threads without a loop. TimeoutError when it is not over by then."""
        return self._future.result(timeout_s)

    def begin(self) -> None:
        """By the agent: it has been asked for."""
        self._state = next_state(self.name, self._state, OperationEvent.START)

    def end(self, error: KvoltError | None) -> None:
        """By the agent: no byte moves any more."""
        self._state = next_state(self.name, self._state, _event_of(error))
        if error is None:
            self._future.set_result(self._outcome())
        else:
            self._future.set_exception(error)
            self._future.exception()  # known here: nobody has to ask

    @abstractmethod
    def _outcome(self) -> Result:
        """Of one that has ended well."""


class Posting(Undertaking[None]):
    """A note that waits in its room; it ends well when it went to somebody."""

    def _outcome(self) -> None:
        return None


class Meeting(Undertaking[bytes]):
    """The note of a room, once it is posted. Whoever awaits it and goes gives it up: the note is for nobody else."""

    def __init__(self, name: str, cancel: Callable[[], object]) -> None:
        super().__init__(name, cancel)
        self.note = b""

    def __await__(self) -> Generator[Any, None, bytes]:
        try:
            return (yield from super().__await__())
        except asyncio.CancelledError:
            self.cancel()
            raise

    def _outcome(self) -> bytes:
        return self.note


def _hear(end: asyncio.Future[Any]) -> None:
    """Who awaited it may have gone: the loop need not complain that nobody has heard of an error."""
    if not end.cancelled():
        end.exception()


def _event_of(error: KvoltError | None) -> OperationEvent:
    match error:
        case None:
            return OperationEvent.FINISH
        case Cancelled():
            return OperationEvent.CANCEL
        case DeadlineExceeded():
            return OperationEvent.EXPIRE
        case _:
            return OperationEvent.FAIL
