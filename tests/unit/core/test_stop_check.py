"""By which token a choice is over."""

from __future__ import annotations

import pytest

from kvolt.core.delta import ChoiceEnd, FinishReason, check_stop
from kvolt.core.request import StopConditions

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
EOS = (7,)


@pytest.mark.parametrize(
    ("num_output", "token", "end"),
    [
        (5, 100, None),
        (5, 7, ChoiceEnd(STOP)),
        (5, 9, ChoiceEnd(STOP, 9)),
        (3, 7, None),  # said, and passed over: too early
        (3, 9, None),
        (10, 100, ChoiceEnd(LENGTH)),
        (10, 7, ChoiceEnd(STOP)),
        (10, 9, ChoiceEnd(STOP, 9)),
        (11, 100, ChoiceEnd(LENGTH)),
    ],
)
def test_what_ends_a_choice(num_output: int, token: int, end: ChoiceEnd | None) -> None:
    stop = StopConditions(max_tokens=10, min_tokens=3, stop_token_ids=(9,))
    assert check_stop(stop, EOS, num_output, token) == end


def test_eos_among_the_stop_tokens_is_eos_unless_it_is_ignored() -> None:
    stop = StopConditions(max_tokens=10, stop_token_ids=(7,))
    assert check_stop(stop, EOS, 5, 7) == ChoiceEnd(STOP)
    assert check_stop(stop, (), 5, 7) == ChoiceEnd(STOP, 7)
