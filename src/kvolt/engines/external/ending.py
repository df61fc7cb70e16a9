"""End of a choice by the contract's rules, for engines that do not apply all of them. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvolt.core.delta import FinishReason
from kvolt.core.request import Request
from kvolt.engines.external.answers import Choice


class Ending(NamedTuple):
    num_tokens: int
    """Number of new tokens that belong to the answer."""
    finish: FinishReason | None = None
    """None if the choice continues."""
    stop_reason: int | None = None


def find_end(choice: Choice, tokens: Sequence[int], eos_token_ids: Collection[int]) -> Ending:
    """Apply the rules to new tokens of a choice."""
    stop = choice.request.stop
    for number, token in enumerate(tokens, 1):
        num_output = choice.num_tokens + number
        if num_output > stop.min_tokens and is_end_token(choice.request, token, eos_token_ids):
            return Ending(number, FinishReason.STOP, token if token in stop.stop_token_ids else None)
        if num_output >= stop.max_tokens:
            return Ending(number, FinishReason.LENGTH)
    return Ending(len(tokens))


def is_end_token(request: Request, token: int, eos_token_ids: Collection[int]) -> bool:
    """Whether a token ends an answer that has its minimum length."""
    stop = request.stop
    return token in stop.stop_token_ids or (token in eos_token_ids and not stop.ignore_eos)
