"""What is kept back: order, piles per choice, no copying per token."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvolt.core.delta import Delta, FinishReason
from kvolt.runtime.plane.served_stream import Backlog


def drained(backlog: Backlog) -> list[object]:
    return [backlog.pop() for _ in range(len(backlog))]


def test_deltas_of_one_choice_become_one() -> None:
    backlog = Backlog()
    assert [backlog.push(Delta((token,))) for token in (1, 2, 3)] == [False, True, True]
    assert drained(backlog) == [Delta((1, 2, 3))]


def test_choices_do_not_mix() -> None:
    backlog = Backlog()
    for token in range(6):
        backlog.push(Delta((token,), index=token % 2))
    assert drained(backlog) == [Delta((0, 2, 4)), Delta((1, 3, 5), index=1)]


def test_nothing_joins_a_finish() -> None:
    backlog = Backlog()
    backlog.push(Delta((1,), finish=FinishReason.STOP))
    assert not backlog.push(Delta((2,)))
    assert len(backlog) == 2


def test_other_items_keep_their_place() -> None:
    backlog = Backlog()
    for item in (Delta((1,)), "between", Delta((2,)), Delta((3,))):
        backlog.push(item)
    backlog.push_front(["first", Delta((0,))])
    assert drained(backlog) == ["first", Delta((0,)), Delta((1,)), "between", Delta((2, 3))]


def test_what_was_taken_grows_no_more() -> None:
    backlog = Backlog()
    backlog.push(Delta((1,)))
    assert backlog.pop() == Delta((1,))
    assert not backlog.push(Delta((2,)))
    assert drained(backlog) == [Delta((2,))]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)) | st.just(None)))
def test_every_token_comes_out_in_order(steps: list[tuple[int, int] | None]) -> None:
    """None takes; a pair adds a token for a choice."""
    backlog, put, got = Backlog(), {0: [], 1: [], 2: []}, {0: [], 1: [], 2: []}
    for step in [*steps, *[None] * len(steps)]:
        if step is not None:
            put[step[0]].append(step[1])
            backlog.push(Delta((step[1],), index=step[0]))
        elif len(backlog):
            delta = backlog.pop()
            got[delta.index] += delta.token_ids
    assert got == put
