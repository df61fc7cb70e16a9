"""The life of one transfer: its states, and what may happen in each as a table. Pure.

    INITIALIZED --start--> IN_PROGRESS --finish--> COMPLETE
         |                     |
         +-------- fail -------+-----------------> ERRORED
         +------- expire ------+-----------------> ERRORED
         +------- cancel ------+-----------------> CANCELLED

An operation that is over moves no byte any more, so its blocks may go to somebody else. Whoever drives it keeps that
promise: copying is stopped first, and the event is told afterwards. Knows no memory, no peer and no clock: who sees
a deadline pass says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from kvolt.core.errors import KvoltError


class OperationState(StrEnum):
    INITIALIZED = "initialized"
    """Asked for; no byte has moved."""
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"
    """All blocks have arrived, with their checksums."""
    ERRORED = "errored"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self not in (OperationState.INITIALIZED, OperationState.IN_PROGRESS)


class OperationEvent(StrEnum):
    START = "start"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    """Whoever asked no longer wants it."""
    EXPIRE = "expire"
    """Its deadline has passed, on whichever side."""


TRANSITIONS: Mapping[tuple[OperationState, OperationEvent], OperationState] = MappingProxyType(
    {
        (OperationState.INITIALIZED, OperationEvent.START): OperationState.IN_PROGRESS,
        (OperationState.INITIALIZED, OperationEvent.FAIL): OperationState.ERRORED,
        (OperationState.INITIALIZED, OperationEvent.CANCEL): OperationState.CANCELLED,
        (OperationState.INITIALIZED, OperationEvent.EXPIRE): OperationState.ERRORED,
        (OperationState.IN_PROGRESS, OperationEvent.FINISH): OperationState.COMPLETE,
        (OperationState.IN_PROGRESS, OperationEvent.FAIL): OperationState.ERRORED,
        (OperationState.IN_PROGRESS, OperationEvent.CANCEL): OperationState.CANCELLED,
        (OperationState.IN_PROGRESS, OperationEvent.EXPIRE): OperationState.ERRORED,
    }
)


class IllegalTransition(KvoltError):
    """A defect of the driver: nothing was changed. Fields: operation, state, event."""


def next_state(operation: str, state: OperationState, event: OperationEvent) -> OperationState:
    """Where `event` leads; IllegalTransition where it leads nowhere. `operation` is its name, for the error."""
    found = TRANSITIONS.get((state, event))
    if found is None:
        raise IllegalTransition(
            f"transfer {operation} is {state}: it cannot {event}",
            operation=operation,
            state=state.value,
            event=event.value,
        )
    return found
