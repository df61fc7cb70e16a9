"""Stop rule of a choice. Engines follow it, and a migration applies it to the tokens of a lost worker."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from kvolt.core.delta import FinishReason
from kvolt.core.request import StopConditions


class ChoiceEnd(NamedTuple):
    """Finish reason of a choice, and the stop token id if one matched."""

    finish: FinishReason
    stop_reason: int | None = None


def check_stop(stop: StopConditions, eos: Container[int], num_output: int, token: int) -> ChoiceEnd | None:
    """Return the end caused by `token`, the last of `num_output` output tokens, or None.

    `eos` must be empty when the request ignores EOS.
    """
    if num_output > stop.min_tokens:
        if token in eos:
            return ChoiceEnd(FinishReason.STOP)
        if token in stop.stop_token_ids:
            return ChoiceEnd(FinishReason.STOP, token)
    return ChoiceEnd(FinishReason.LENGTH) if num_output >= stop.max_tokens else None
