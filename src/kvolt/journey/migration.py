"""Migration of a partial answer to another worker. Pure.

The output of both workers together must equal what one worker would have sent.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from kvolt.core.delta import Delta, Usage, check_stop
from kvolt.core.request import Request

ChoiceTokens = Sequence[Sequence[int] | None]
"""Tokens received per choice; None for a finished choice."""


class ReceivedTokens:
    """Tokens received per choice, for receivers that do not count them themselves."""

    __slots__ = ("_received",)

    def __init__(self, num_choices: int) -> None:
        self._received: list[list[int] | None] = [[] for _ in range(num_choices)]

    def add_delta(self, delta: Delta) -> None:
        tokens = self._received[delta.index]
        if tokens is not None:
            tokens.extend(delta.token_ids)
        if delta.finish is not None:
            self._received[delta.index] = None

    def received_tokens(self) -> ChoiceTokens:
        return self._received


def are_choices_finished(received: ChoiceTokens) -> bool:
    return all(tokens is None for tokens in received)


def migrated_request(request: Request, received: ChoiceTokens) -> Request:
    """The request continued after the received tokens; finished choices are left out."""
    if len(received) == 1:
        return msgspec.structs.replace(request, prior_tokens=(*request.prior_tokens, *(received[0] or ())))
    prior_tokens = tuple(
        None if tokens is None else (*request.prior_tokens_of(index), *tokens)
        for index, tokens in enumerate(received)
    )
    return msgspec.structs.replace(request, prior_tokens=(), prior_tokens_by_choice=prior_tokens)


def missing_finishes(request: Request, received: ChoiceTokens, eos: Container[int]) -> list[Delta]:
    """Finish deltas of choices that have all their tokens but whose worker was lost before it sent the finish reason.

    Most workers send both in one delta; this is for those that do not.
    """
    finishes: list[Delta] = []
    for index, tokens in enumerate(received):
        if not tokens:
            continue
        num_output = len(request.prior_tokens_of(index)) + len(tokens)
        stop = check_stop(request.stop, () if request.stop.ignore_eos else eos, num_output, tokens[-1])
        if stop is not None:
            usage = Usage(request.num_prompt_tokens, num_output)
            finishes.append(Delta(index=index, finish=stop.finish, stop_reason=stop.stop_reason, usage=usage))
    return finishes


def splice_delta(delta: Delta, cached_tokens: int | None, has_started: bool = True) -> Delta:
    """Adjust a delta of a later worker so that the answer looks like one worker's. `cached_tokens` is what the first
    worker reported; it is sent with the first delta (`has_started` false) and in the usage."""
    if cached_tokens is None or (delta.cached_tokens is None and delta.usage is None):
        return delta
    usage = delta.usage
    if usage is not None and not delta.index:  # the prompt counts once, with choice 0
        usage = msgspec.structs.replace(usage, cached_tokens=cached_tokens)
    return msgspec.structs.replace(delta, cached_tokens=None if has_started else cached_tokens, usage=usage)
