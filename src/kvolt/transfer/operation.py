"""State machine of one transfer, with its transition table. Pure.

    INITIALIZED --start--> IN_PROGRESS --finish--> COMPLETE
         |                     |
         +-------- fail -------+-----------------> ERRORED
         +------- expire ------+-----------------> ERRORED
         +------- cancel ------+-----------------> CANCELLED

A finished operation moves no more bytes, so its blocks may be reused. The driver guarantees this: it stops copying
before it reports the event. Deadlines are also the driver's responsibility.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from kvolt.core.errors import KvoltError


class OperationState(StrEnum):
    INITIALIZED = "initialized"
    """Submitted; no byte has moved."""
    IN_PROGRESS = "in_progress"
    COMPLETE = "complete"
    """All blocks have arrived and their checksums match."""
    ERRORED = "errored"
    CANCELLED = "cancelled"

    @property
    def is_done(self) -> bool:
        return self not in (OperationState.INITIALIZED, OperationState.IN_PROGRESS)


class OperationEvent(StrEnum):
    START = "start"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"
    """The caller cancelled it."""
    EXPIRE = "expire"
    """The deadline passed on either side."""


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
    """A defect of the driver; the state is unchanged. Fields: operation, state, event."""


def next_state(operation: str, state: OperationState, event: OperationEvent) -> OperationState:
    """State after `event`. IllegalTransition if the table has none. `operation` is named in the error."""
    successor = TRANSITIONS.get((state, event))
    if successor is None:
        raise IllegalTransition(
            f"transfer {operation} is {state}: it cannot {event}",
            operation=operation,
            state=state.value,
            event=event.value,
        )
    return successor
