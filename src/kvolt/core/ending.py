"""By which token a choice of an answer is over: the rule that engines keep, and that holds when one was lost."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from kvolt.core.delta import FinishReason
from kvolt.core.request import StopConditions


class End(NamedTuple):
    """Why a choice is over."""

    finish: FinishReason
    stop_reason: int | None = None


def ended_by(stop: StopConditions, eos: Container[int], num_output: int, token: int) -> End | None:
    """How the last of `num_output` tokens ends its choice, if it does. `eos`: none where it is ignored."""
    if num_output > stop.min_tokens:
        if token in eos:
            return End(FinishReason.STOP)
        if token in stop.stop_token_ids:
            return End(FinishReason.STOP, token)
    return End(FinishReason.LENGTH) if num_output >= stop.max_tokens else None
