"""What comes out of an engine: deltas per choice, and one StepOutput per engine step.

Wire names are one letter where a value is sent per token, and defaults are left out: a plain token
is 6 bytes on the wire and newer fields stay invisible to older peers.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from kvolt.core.ids import RequestId
from kvolt.core.load import WorkerLoad


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the chosen token and of the most likely ones at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a request; reported with its last delta."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a request's time went, in milliseconds, as far as each stage is known."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    decode_ms: float | None = None


class Delta(
    msgspec.Struct,
    frozen=True,
    gc=False,  # holds only leaves: nothing for the collector to find, and one is made per token
    omit_defaults=True,
    rename={
        "token_ids": "t",
        "index": "i",
        "finish": "f",
        "logprobs": "l",
        "prompt_logprobs": "p",
        "cached_tokens": "c",
        "usage": "u",
        "stages": "s",
        "stop_reason": "r",
    },
):
    """New tokens of one choice: several only when a step made several, or a slow reader let them merge."""

    token_ids: tuple[int, ...] = ()
    index: int = 0
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    usage: Usage | None = None
    stages: StageTimes | None = None
    stop_reason: int | str | None = None

    def merge(self, later: Delta) -> Delta | None:
        """Both as one, token boundaries kept; None when they belong to different choices."""
        if later.index != self.index or self.finish is not None:
            return None
        return Delta(
            token_ids=self.token_ids + later.token_ids,
            index=self.index,
            finish=later.finish,
            logprobs=_joined(self.logprobs, later.logprobs),
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            cached_tokens=later.cached_tokens if self.cached_tokens is None else self.cached_tokens,
            usage=later.usage or self.usage,
            stages=later.stages or self.stages,
            stop_reason=later.stop_reason,
        )


_MAX_PLAIN = 1 << 18
"""More than any vocabulary; a hostile peer cannot make the table grow beyond."""


class _PlainDeltas(dict[int, Delta]):
    def __missing__(self, token_id: int) -> Delta:
        delta = Delta(token_ids=(token_id,))
        if len(self) < _MAX_PLAIN:
            self[token_id] = delta
        return delta


plain_delta = _PlainDeltas().__getitem__
"""The delta of one token and nothing else. Deltas are immutable, so there is one per token."""


def _joined(
    first: tuple[TokenLogprobs, ...] | None, second: tuple[TokenLogprobs, ...] | None
) -> tuple[TokenLogprobs, ...] | None:
    if first is None or second is None:
        return first or second
    return first + second


class StepOutput(msgspec.Struct, frozen=True):
    """All that one engine step produced, for all its sequences."""

    deltas: tuple[tuple[RequestId, Delta], ...] = ()
    failed: tuple[tuple[RequestId, str], ...] = ()
    """Requests that the engine gave up on, each with the reason."""
    load: WorkerLoad | None = None
    plain_ids: tuple[RequestId, ...] = ()
    """Requests that got one token for choice 0 and nothing else, which most do in most steps. An engine
    passes the same tuple object while its batch stays the same: a worker then reuses what it worked out."""
    plain_tokens: tuple[int, ...] = ()
    """Their tokens, in the same order."""
