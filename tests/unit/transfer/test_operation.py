"""The table of a transfer's life."""

from __future__ import annotations

from itertools import product

import pytest

from kvolt.transfer.operation import (
    TRANSITIONS,
    IllegalTransition,
    OperationEvent,
    OperationState,
    next_state,
)


@pytest.mark.parametrize(("state", "event"), list(product(OperationState, OperationEvent)))
def test_every_event_leads_where_the_table_says_or_nowhere(
    state: OperationState, event: OperationEvent
) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state("t-1", state, event) is TRANSITIONS[state, event]
        return
    with pytest.raises(IllegalTransition, match=f"t-1 is {state}: it cannot {event}") as caught:
        next_state("t-1", state, event)
    assert caught.value.fields == {"operation": "t-1", "state": state.value, "event": event.value}


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        TRANSITIONS[OperationState.COMPLETE, OperationEvent.START] = OperationState.IN_PROGRESS  # type: ignore[index]


def test_what_is_over_stays_over_and_everything_else_can_be_stopped() -> None:
    for state in OperationState:
        left_by = {event for was, event in TRANSITIONS if was is state}
        if state.is_done:
            assert not left_by
        else:
            assert left_by > {OperationEvent.FAIL, OperationEvent.CANCEL, OperationEvent.EXPIRE}


def test_a_transfer_completes_only_by_finishing_what_was_started() -> None:
    assert [key for key, after in TRANSITIONS.items() if after is OperationState.COMPLETE] == [
        (OperationState.IN_PROGRESS, OperationEvent.FINISH)
    ]
    started = next_state("t-1", OperationState.INITIALIZED, OperationEvent.START)
    assert started is OperationState.IN_PROGRESS
    assert next_state("t-1", started, OperationEvent.FINISH) is OperationState.COMPLETE


def test_cancellation_is_distinguished_from_errors() -> None:
    for (_, event), after in TRANSITIONS.items():
        assert (after is OperationState.CANCELLED) == (event is OperationEvent.CANCEL)
        assert (after is OperationState.ERRORED) == (event in (OperationEvent.FAIL, OperationEvent.EXPIRE))
