"""Types of the scheduler's interface: limits, scheduling mode, the plan of a step, and its results.

Owns the check of a request against the limits. Work and NewToken are created per sequence and step: as
Structs they cost a third of a named tuple, and the garbage collector can ignore them since no sequence refers
back to one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvolt.core.delta import ChoiceEnd
from kvolt.core.errors import ConfigError, InvalidRequest
from kvolt.core.ids import RequestId
from kvolt.core.load import StepStats
from kvolt.core.request import Request
from kvolt.scheduler.sequence import Sequence


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Capacity limits of an engine."""

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


_MIN_SHARED_TOKENS = 32
"""Smaller steps take about as long."""


def shared_prefill_tokens(num_left: int, max_batch_tokens: int) -> int:
    """Most prompt tokens per step while the last blocks of the prompt are fetched, with `num_left` tokens to
    compute before them. A block that arrives during the step that computes it is wasted; but small steps cost
    more per token."""
    return max(num_left // 2, max_batch_tokens // 4, _MIN_SHARED_TOKENS)


class Scheduling(StrEnum):
    """How steps combine prefills and decodes."""

    VLLM = "vllm"
    """Mixed: a token of each decode, and prefill chunks in the remaining budget."""
    SGLANG = "sglang"
    """Prefills first: decodes wait while a prefill can run."""


class Work(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one sequence computed in a step."""

    sequence: Sequence
    start: int
    """Tokens before these, all computed."""
    num_tokens: int

    @property
    def samples(self) -> bool:
        """Whether it produces a new token. Not valid after `commit`, which appends that token."""
        return self.start + self.num_tokens == len(self.sequence.tokens)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step: sequences that decode one token each, and chunks of those that prefill."""

    decodes: list[Work]
    prefills: list[Work]
    stats: StepStats


def with_chunk(step: StepStats, start: int, num_tokens: int) -> StepStats:
    """The step with an additional prefill chunk."""
    return StepStats(
        step.batch,
        step.prefill_tokens + num_tokens,
        step.prefill_context + num_tokens * (start + num_tokens),
        step.context_tokens,
        step.time_s,
        step.shared_tokens,
    )


class NewToken(msgspec.Struct, frozen=True, gc=False):
    """A new token of a sequence, possibly its last."""

    sequence: Sequence
    token: int
    end: ChoiceEnd | None
    is_first: bool
    """Whether it is the first token generated here."""


class NewTokenRun(msgspec.Struct, frozen=True, gc=False):
    """New tokens of a sequence from several steps; the last one may end it."""

    sequence: Sequence
    tokens: Items[int]
    end: ChoiceEnd | None


class PlainBatch:
    """Tokens of a step that need no further information: ids and tokens only, the usual case.

    While the batch stays the same, `drain` returns the same ids object, so that readers can compare it by
    identity.
    """

    __slots__ = ("_last_ids", "ids", "tokens")

    def __init__(self) -> None:
        self.ids: list[RequestId] = []
        self.tokens: list[int] = []
        self._last_ids: tuple[RequestId, ...] = ()

    def drain(self) -> tuple[tuple[RequestId, ...], tuple[int, ...]]:
        """Return and clear the ids and tokens."""
        ids, tokens = tuple(self.ids), tuple(self.tokens)
        self.ids.clear()
        self.tokens.clear()
        if ids != self._last_ids:
            self._last_ids = ids
        return self._last_ids, tokens


def check_request(request: Request, limits: Limits, num_blocks: int, tokenless: bool = False) -> None:
    """InvalidRequest if the request is empty, requests no output, or can never fit."""
    prompt, stop = request.num_prompt_tokens if tokenless else len(request.token_ids), request.stop
    if not prompt:
        raise InvalidRequest("the prompt is empty", param="token_ids")
    if request.sampling.num_choices < 1:
        raise InvalidRequest("n must be 1 or more", param="n")
    if stop.max_tokens < 1:
        raise InvalidRequest("max_tokens must be 1 or more", param="max_tokens")
    if not 0 <= stop.min_tokens <= stop.max_tokens:
        raise InvalidRequest(
            f"min_tokens is {stop.min_tokens}; it must be from 0 to max_tokens, which is {stop.max_tokens}",
            param="min_tokens",
        )
    _check_resumed(request)
    num_tokens = prompt + stop.max_tokens
    needed_tokens = f"{prompt} prompt tokens and {stop.max_tokens} new ones"
    if num_tokens > limits.context_length:
        raise InvalidRequest(
            f"{needed_tokens} exceed the context of {limits.context_length}", param="max_tokens"
        )
    num_needed = -(-(num_tokens - 1) // limits.block_size)  # the last token is not computed
    if num_needed > num_blocks:
        raise InvalidRequest(
            f"{needed_tokens} need {num_needed} KV blocks, but the engine has {num_blocks}",
            param="max_tokens",
        )


def _check_resumed(request: Request) -> None:
    num_choices = request.sampling.num_choices
    if request.prior_tokens_by_choice and (
        len(request.prior_tokens_by_choice) != num_choices or request.prior_tokens
    ):
        raise InvalidRequest(
            f"prior_tokens_by_choice must have one entry per choice ({num_choices}) and prior_tokens must be empty",
            param="prior_tokens_by_choice",
        )
    has_first_tokens = request.handoff is not None and request.handoff.first_tokens is not None
    most = max(
        (len(request.prior_tokens_of(index)) or has_first_tokens for index in request.open_choices),
        default=None,
    )
    if most is None or most >= request.stop.max_tokens:
        raise InvalidRequest("all requested tokens have been generated already", param="prior_tokens")


def check_vocabulary(request: Request, vocab_size: int) -> None:
    """InvalidRequest for tokens outside the vocabulary, which would fail the whole step."""
    sampling = request.sampling
    handoff = request.handoff
    for param, tokens in (
        ("token_ids", request.token_ids),
        ("prior_tokens", request.prior_tokens),
        *(("prior_tokens_by_choice", tokens or ()) for tokens in request.prior_tokens_by_choice),
        ("handoff", (handoff.first_tokens if handoff is not None else None) or ()),
        ("stop_token_ids", request.stop.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("logit_bias", tuple(sampling.logit_bias)),
    ):
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
            invalid = next(token for token in tokens if not 0 <= token < vocab_size)
            raise InvalidRequest(
                f"token {invalid} is outside the model's vocabulary of {vocab_size}", param=param
            )


def run_length(plan: StepPlan, block_size: int, num_free: int) -> int:
    """Number of consecutive steps equal to this one until a sequence ends or blocks run out; 1 unless all are
    plain decodes."""
    if plan.prefills or any(work.sequence.ending_ids or not work.sequence.is_plain for work in plan.decodes):
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
