"""The table of block moves."""

from __future__ import annotations

from itertools import product

import pytest

from kvolt.kv.lifecycle import TRANSITIONS, BlockId, BlockMove, BlockState, IllegalMove, next_state


@pytest.mark.parametrize(("state", "move"), list(product(BlockState, BlockMove)))
def test_every_move_leads_where_the_table_says_or_nowhere(state: BlockState, move: BlockMove) -> None:
    if (state, move) in TRANSITIONS:
        assert next_state(BlockId(3), state, move) is TRANSITIONS[state, move]
        return
    with pytest.raises(IllegalMove) as caught:
        next_state(BlockId(3), state, move)
    assert caught.value.fields == {"block": 3, "state": state.value, "move": move.value}


def test_every_state_is_reached_and_left_and_every_move_used() -> None:
    assert set(TRANSITIONS.values()) == set(BlockState)
    assert {state for state, _ in TRANSITIONS} == set(BlockState)
    assert {move for _, move in TRANSITIONS} == set(BlockMove)


def test_letting_go_ends_every_hold_and_only_that() -> None:
    for (state, move), after in TRANSITIONS.items():
        if move is BlockMove.RELEASE:
            assert state.is_held
            assert not after.is_held
        elif move in (BlockMove.ALLOCATE, BlockMove.ACQUIRE):
            assert not state.is_held
            assert after.is_held
        else:
            assert state.is_held == after.is_held
