"""How another worker goes on with an answer whose worker was lost. Pure.

Owns what such a worker is asked, and what of its answer the receiver has been told before: what both have said together
must be what one would have said.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

import msgspec

from kvolt.core.delta import Delta, Usage
from kvolt.core.ending import ended_by
from kvolt.core.request import Request

Heard = Sequence[Sequence[int] | None]
"""The tokens that have come of each choice; None for a choice that is over."""


class Hearing:
    """What has come of each choice, for receivers that keep no account of their own."""

    __slots__ = ("_heard",)

    def __init__(self, num_choices: int) -> None:
        self._heard: list[list[int] | None] = [[] for _ in range(num_choices)]

    def take(self, delta: Delta) -> None:
        tokens = self._heard[delta.index]
        if tokens is not None:
            tokens.extend(delta.token_ids)
        if delta.finish is not None:
            self._heard[delta.index] = None

    def so_far(self) -> Heard:
        return self._heard


def is_over(heard: Heard) -> bool:
    """Whether every choice is."""
    return all(tokens is None for tokens in heard)


def going_on(request: Request, heard: Heard) -> Request:
    """The same request from where it broke off: each choice after its own tokens, and none that is over."""
    if len(heard) == 1:
        return msgspec.structs.replace(request, resume=(*request.resume, *(heard[0] or ())))
    given = tuple(
        None if tokens is None else (*request.resumed(index), *tokens) for index, tokens in enumerate(heard)
    )
    return msgspec.structs.replace(request, resume=(), resume_choices=given)


def lost_ends(request: Request, heard: Heard, eos: Container[int]) -> list[Delta]:
    """Of choices that have all their tokens, and whose worker was lost before it said so: nobody could go on with them.

    A worker tells both in one; this is for those that do not.
    """
    ends: list[Delta] = []
    for index, tokens in enumerate(heard):
        if not tokens:
            continue
        num_output = len(request.resumed(index)) + len(tokens)
        end = ended_by(request.stop, () if request.stop.ignore_eos else eos, num_output, tokens[-1])
        if end is not None:
            usage = Usage(request.num_prompt_tokens, num_output)
            ends.append(Delta(index=index, finish=end.finish, stop_reason=end.stop_reason, usage=usage))
    return ends


def as_one(delta: Delta, cached_tokens: int | None, is_told: bool = True) -> Delta:
    """What a worker says that goes on, as if it had been there from the beginning; `cached_tokens` is what the first
    one has said of the prompt: that is told once, if it `is_told` now it was, and so is when the answer began."""
    if cached_tokens is None or (delta.cached_tokens is None and delta.usage is None):
        return delta
    usage = delta.usage
    if usage is not None and not delta.index:  # the others have found the prompt of the first
        usage = msgspec.structs.replace(usage, cached_tokens=cached_tokens)
    return msgspec.structs.replace(delta, cached_tokens=None if is_told else cached_tokens, usage=usage)
