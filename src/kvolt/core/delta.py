"""Engine output: deltas per choice, one StepOutput per engine step, and the stop rule of a choice.

Wire names of a Delta are one letter and defaults are omitted: a delta of one token takes 6 bytes, and older
peers ignore newer fields.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import StrEnum
from itertools import chain
from typing import NamedTuple

import msgspec

from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff, StopConditions


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"
    CANCELLED = "cancelled"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log probability of the sampled token and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a request, reported with its last delta."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class StageTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Duration of each stage of a request in milliseconds; None: not measured."""

    queue_ms: float | None = None
    prefill_ms: float | None = None
    transfer_ms: float | None = None
    """KV transfer from the prefill worker."""
    transfer_bytes: int | None = None
    transfer_path: str | None = None
    onboard_ms: float | None = None
    """Onboarding of KV from a lower tier; by the prefill worker, if it onboarded blocks of the prompt."""
    onboard_blocks: int | None = None

    def updated(self, stages: StageTimes | None) -> StageTimes:
        """These times with those that `stages` has."""
        fields = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(stages, name, None)) is not None
        }
        return msgspec.structs.replace(self, **fields)


class Delta(
    msgspec.Struct,
    frozen=True,
    gc=False,  # created per token, and cannot be part of a reference cycle
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
        "handoff": "h",
    },
):
    """New tokens of one choice. More than one when a step produced several or deltas of a slow reader were merged."""

    token_ids: tuple[int, ...] = ()
    index: int = 0
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int | None = None
    usage: Usage | None = None
    stages: StageTimes | None = None
    stop_reason: int | str | None = None
    handoff: Handoff | None = None
    """Result of a prefill worker: the handoff to decode."""


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas of one choice: all tokens and log probabilities, the latest value of other fields."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    return Delta(
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        index=first.index,
        finish=last.finish,
        logprobs=_joined([delta.logprobs for delta in deltas if delta.logprobs is not None]),
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        cached_tokens=next(
            (delta.cached_tokens for delta in deltas if delta.cached_tokens is not None), None
        ),
        usage=next((delta.usage for delta in reversed(deltas) if delta.usage), None),
        stages=next((delta.stages for delta in reversed(deltas) if delta.stages), None),
        stop_reason=last.stop_reason,
        handoff=last.handoff,
    )


def _joined(parts: list[tuple[TokenLogprobs, ...]]) -> tuple[TokenLogprobs, ...] | None:
    return tuple(chain.from_iterable(parts)) if parts else None


_MAX_PLAIN = 1 << 18
"""Larger than any vocabulary; bounds the table against a hostile peer."""


class _PlainDeltas(dict[int, Delta]):
    def __missing__(self, token_id: int) -> Delta:
        delta = Delta(token_ids=(token_id,))
        if len(self) < _MAX_PLAIN:
            self[token_id] = delta
        return delta


plain_delta = _PlainDeltas().__getitem__
"""Return the shared, immutable delta that holds this token id and nothing else."""


class StepOutput(msgspec.Struct, frozen=True):
    """Output of one engine step for all its sequences."""

    deltas: tuple[tuple[RequestId, Delta], ...] = ()
    failed: tuple[tuple[RequestId, ErrorInfo], ...] = ()
    """Requests that failed; the error says whether a retry on another worker can help."""
    load: WorkerLoad | None = None
    plain_ids: tuple[RequestId, ...] = ()
    """Requests that got one token of choice 0 and nothing else (the common case). An engine passes the same
    tuple object while its batch is unchanged, so that a worker can reuse derived values."""
    plain_tokens: tuple[int, ...] = ()
    """Tokens of `plain_ids`, in the same order."""
    kv_changes: tuple[KvChange, ...] = ()
    """Blocks stored and removed, in order; from engines with the `KvEvents` capability."""


class ChoiceEnd(NamedTuple):
    """Finish reason of a choice, and the stop token id if one matched."""

    finish: FinishReason
    stop_reason: int | None = None


def check_stop(stop: StopConditions, eos: Container[int], num_output: int, token: int) -> ChoiceEnd | None:
    """The stop rule of a choice: return the end caused by `token`, the last of `num_output` output tokens, or None.

    `eos` must be empty when the request ignores EOS.
    """
    if num_output > stop.min_tokens:
        if token in eos:
            return ChoiceEnd(FinishReason.STOP)
        if token in stop.stop_token_ids:
            return ChoiceEnd(FinishReason.STOP, token)
    return ChoiceEnd(FinishReason.LENGTH) if num_output >= stop.max_tokens else None
