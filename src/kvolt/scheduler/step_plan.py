"""What a scheduler is asked for and what it answers: limits, what to mix, the plan of a step, and what came of it.

Owns the check of a request against the limits. Decides nothing else.

Work and Advanced are made for each sequence at each step: as Structs they cost a third of a named tuple, and the
collector need not look at them, since no sequence leads back to one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvolt.core.ending import End
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Request
from kvolt.scheduler.sequence import Sequence


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """How much an engine takes on."""

    max_num_seqs: int
    max_batch_tokens: int
    max_waiting: int
    context_length: int
    block_size: int

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be 1 or more", key=name, remedy=f"set {name} to 1 or more")
        if self.max_num_seqs > self.max_batch_tokens:
            raise ConfigError(
                f"a step of {self.max_batch_tokens} tokens has no room for one of each of "
                f"{self.max_num_seqs} sequences",
                key="max_batch_tokens",
                remedy="set max_batch_tokens to max_num_seqs or more",
            )


_FEWEST_MEETING = 32
"""Tokens: steps of fewer take about as long."""


def meeting_tokens(num_left: int, max_batch_tokens: int) -> int:
    """Of a prompt whose last blocks come from elsewhere meanwhile, with so many tokens to compute before those that are
    here, what a step computes at most. What comes during a step for tokens that are in it came for nothing; but small
    steps take longer for each token."""
    return max(num_left // 2, max_batch_tokens // 4, _FEWEST_MEETING)


class Scheduling(StrEnum):
    """What goes into a step when there are prompts to compute and answers to go on with."""

    VLLM = "vllm"
    """Both: a token of each answer, and chunks of prompts in what room is left."""
    SGLANG = "sglang"
    """Prompts alone, for as long as one can be computed; answers wait meanwhile."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sequence that a step computes."""

    sequence: Sequence
    start: int
    """Tokens before them, all computed."""
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether a new token comes out of it. Not to be asked after `commit`, when it has come."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: sequences that decode one token each, and chunks of those that prefill."""

    decodes: list[Work]
    prefills: list[Work]
    stats: StepStats


def with_chunk(step: StepStats, start: int, num_tokens: int) -> StepStats:
    """A step with a chunk more of a prompt."""
    return StepStats(
        step.batch,
        step.prefill_tokens + num_tokens,
        step.prefill_context + num_tokens * (start + num_tokens),
        step.context_tokens,
        step.time_s,
        step.shared_tokens,
    )


class Advanced(msgspec.Struct, frozen=True, gc=False):
    """A sequence has a new token, which may be its last."""

    sequence: Sequence
    token: int
    end: End | None
    is_first: bool
    """The first that was generated here."""


class Ran(msgspec.Struct, frozen=True, gc=False):
    """A sequence has the tokens of several steps, the last of which may be its end."""

    sequence: Sequence
    tokens: Items[int]
    end: End | None


class PlainBatch:
    """The new tokens of a step that are all there is to tell of their requests, as most are in most steps.

    While the batch stays the same its ids are the same object: who reads them need not look up its members again.
    """

    __slots__ = ("_told", "ids", "tokens")

    def __init__(self) -> None:
        self.ids: list[RequestId] = []
        self.tokens: list[int] = []
        self._told: tuple[RequestId, ...] = ()

    def take(self) -> tuple[tuple[RequestId, ...], tuple[int, ...]]:
        """Ids and tokens, once."""
        ids, tokens = tuple(self.ids), tuple(self.tokens)
        self.ids.clear()
        self.tokens.clear()
        if ids != self._told:
            self._told = ids
        return self._told, tokens


def check_request(request: Request, limits: Limits, num_blocks: int, on_paper: bool = False) -> None:
    """InvalidRequest for what could not end here: nothing to start from, nothing left to say, or too long."""
    prompt, stop = request.num_prompt_tokens if on_paper else len(request.token_ids), request.stop
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="token_ids")
    if request.sampling.num_choices < 1:
        raise InvalidRequest("at least one choice must be asked for", param="n")
    if stop.max_tokens < 1:
        raise InvalidRequest("at least one token must be asked for", param="max_tokens")
    if not 0 <= stop.min_tokens <= stop.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stop.min_tokens}; it must be from 0 to max_tokens, which is {stop.max_tokens}",
            param="min_tokens",
        )
    _check_resumed(request)
    num_tokens = prompt + stop.max_tokens
    asked = f"{prompt} prompt tokens and {stop.max_tokens} new ones"
    if num_tokens > limits.context_length:
        raise InvalidRequest(f"{asked} are over the context of {limits.context_length}", param="max_tokens")
    needed = -(-(num_tokens - 1) // limits.block_size)  # the last token is not computed
    if needed > num_blocks:
        raise InvalidRequest(
            f"{asked} need {needed} KV blocks, and the engine has {num_blocks}", param="max_tokens"
        )


def _check_resumed(request: Request) -> None:
    num_choices = request.sampling.num_choices
    if request.resume_choices and (len(request.resume_choices) != num_choices or request.resume):
        raise InvalidRequest(
            f"resume_choices must have one entry for each of the {num_choices} choices, and resume none",
            param="resume_choices",
        )
    handed_over = request.handoff is not None and request.handoff.first_tokens is not None
    most = max((len(request.resumed(index)) or handed_over for index in request.open_choices), default=None)
    if most is None or most >= request.stop.max_tokens:
        raise InvalidRequest("all tokens asked for have been generated already", param="resume")


def check_vocabulary(request: Request, vocab_size: int) -> None:
    """InvalidRequest for tokens that the model does not have: computing them would hurt all others."""
    sampling = request.sampling
    handoff = request.handoff
    for param, tokens in (
        ("token_ids", request.token_ids),
        ("resume", request.resume),
        *(("resume_choices", resumed or ()) for resumed in request.resume_choices),
        ("handoff", (handoff.first_tokens if handoff is not None else None) or ()),
        ("stop_token_ids", request.stop.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("logit_bias", tuple(sampling.logit_bias)),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            strange = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidRequest(f"token {strange} is not one of the model's {vocab_size}", param=param)


def run_length(plan: StepPlan, block_size: int, num_free: int) -> int:
    """Steps like this one that the free blocks allow, until one of its sequences ends; 1 for any but plain decodes."""
    if plan.prefills or any(work.sequence.enders or not work.sequence.is_plain for work in plan.decodes):
        return 1
    shortest = 1
    longest = min(work.sequence.max_length - len(work.sequence.tokens) for work in plan.decodes)
    while shortest < longest:
        count = (shortest + longest + 1) // 2
        num_blocks = sum(
            -(-(work.start + count) // block_size) - len(work.sequence.blocks) for work in plan.decodes
        )
        if num_blocks <= num_free:
            shortest = count
        else:
            longest = count - 1
    return shortest
