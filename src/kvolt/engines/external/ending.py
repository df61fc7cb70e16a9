"""Where an answer ends by the contract's rules, for engines that do not end all of them themselves. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvolt.core.delta import FinishReason
from kvolt.core.request import Request
from kvolt.engines.external.answers import Choice


class Ending(NamedTuple):
    num_tokens: int
    """Of those that came, the ones that belong to the answer."""
    finish: FinishReason | None = None
    """None for one that goes on."""
    stop_reason: int | None = None


def ending(choice: Choice, tokens: Sequence[int], eos_token_ids: Collection[int]) -> Ending:
    """Of tokens that came for a choice and are not told yet."""
    stop = choice.request.stop
    for number, token in enumerate(tokens, 1):
        num_said = choice.num_tokens + number
        if num_said > stop.min_tokens and ends(choice.request, token, eos_token_ids):
            return Ending(number, FinishReason.STOP, token if token in stop.stop_token_ids else None)
        if num_said >= stop.max_tokens:
            return Ending(number, FinishReason.LENGTH)
    return Ending(len(tokens))


def ends(request: Request, token: int, eos_token_ids: Collection[int]) -> bool:
    """Whether a token ends an answer, if it may end already."""
    stop = request.stop
    return token in stop.stop_token_ids or (token in eos_token_ids and not stop.ignore_eos)
