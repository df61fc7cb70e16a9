"""What comes out of an engine: deltas per choice, and one StepOutput per engine step.

Wire names are one letter where a value is sent per token, and defaults are left out: a plain token
is 6 bytes on the wire and newer fields stay invisible to older peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from kvolt.core.errors import ErrorInfo
from kvolt.core.ids import RequestId
from kvolt.core.kv_events import KvChange
from kvolt.core.load import WorkerLoad
from kvolt.core.request import Handoff


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
    """That KV was on its way from who computed the prompt."""
    transfer_bytes: int | None = None
    transfer_path: str | None = None
    onboard_ms: float | None = None
    """That KV was on its way from a tier below the device."""
    onboard_blocks: int | None = None
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
        "handoff": "h",
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
    handoff: Handoff | None = None
    """All that a prefill worker says: the prompt is computed, and here is how to go on with it."""


def merge_deltas(deltas: Sequence[Delta]) -> Delta:
    """Deltas of one choice, in order, as one: token boundaries kept, the latest word on everything else."""
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
"""More than any vocabulary; a hostile peer cannot make the table grow beyond."""


class _PlainDeltas(dict[int, Delta]):
    def __missing__(self, token_id: int) -> Delta:
        delta = Delta(token_ids=(token_id,))
        if len(self) < _MAX_PLAIN:
            self[token_id] = delta
        return delta


plain_delta = _PlainDeltas().__getitem__
"""The delta of one token and nothing else. Deltas are immutable, so there is one per token."""


class StepOutput(msgspec.Struct, frozen=True):
    """All that one engine step produced, for all its sequences."""

    deltas: tuple[tuple[RequestId, Delta], ...] = ()
    failed: tuple[tuple[RequestId, ErrorInfo], ...] = ()
    """Requests that the engine gave up on; the error says whether another worker could do better."""
    load: WorkerLoad | None = None
    plain_ids: tuple[RequestId, ...] = ()
    """Requests that got one token for choice 0 and nothing else, which most do in most steps. An engine
    passes the same tuple object while its batch stays the same: a worker then reuses what it worked out."""
    plain_tokens: tuple[int, ...] = ()
    """Their tokens, in the same order."""
    kv_changes: tuple[KvChange, ...] = ()
    """Blocks that came and went, in order; of engines that tell them (`KvEvents`)."""
