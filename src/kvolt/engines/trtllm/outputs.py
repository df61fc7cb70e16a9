"""Converts TensorRT-LLM's outputs and statistics.

Its outputs contain all tokens so far; `Reader` finds the new ones. The end of an answer is decided here, by the
contract's rules and token by token; TensorRT-LLM's own stop conditions only save steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineFailed
from kvolt.engines.external.answers import Choice, ChoiceOutput, find_end

_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class Reader:
    """Reads the output of one choice."""

    choice: Choice
    eos_token_ids: Collection[int]
    first: tuple[int, ...] = ()
    """First tokens from remote prefill, which the output repeats although the client has them."""
    num_read: int = 0

    def read(self, result: Any) -> ChoiceOutput | None:
        """New output, or None. EngineFailed if TensorRT-LLM failed the request."""
        output = result.outputs[0]
        tokens: Sequence[int] = output.token_ids
        if tuple(tokens[: len(self.first)]) != self.first[: len(tokens)]:
            raise EngineFailed(
                "TensorRT-LLM's output does not continue the given first tokens", engine="trtllm"
            )
        start = max(self.num_read, len(self.first))
        new = tuple(tokens[start:])
        self.num_read = len(tokens)
        request = self.choice.request
        length, finish, stop_reason = find_end(self.choice, new, self.eos_token_ids)
        if finish is None and output.finish_reason is not None:
            finish = _ENDS.get(output.finish_reason)
            if finish is None:
                reason = str(output.finish_reason)
                raise EngineFailed(
                    f"TensorRT-LLM ended the request: {reason}", engine="trtllm", reason=reason
                )
        if not new and finish is None:
            return None
        logprobs = None
        if request.sampling.logprobs is not None:
            rows = output.logprobs[start : start + length]
            logprobs = _logprobs(new[:length], rows, request.sampling.logprobs)
        cached_tokens = len(request.token_ids) if self.first else result.cached_tokens
        return ChoiceOutput(new[:length], finish, stop_reason, logprobs, cached_tokens=cached_tokens)


def _logprobs(tokens: Sequence[int], rows: Sequence[Any], num_top: int) -> tuple[TokenLogprobs, ...]:
    if len(rows) != len(tokens):
        raise EngineFailed("TensorRT-LLM returned too few logprobs", engine="trtllm")
    return tuple(_row(token, each, num_top) for token, each in zip(tokens, rows, strict=True))


def _row(token: int, logprobs: Any, num_top: int) -> TokenLogprobs:
    """`logprobs`: a map from token to Logprob, or only the logprob of the token."""
    if isinstance(logprobs, float) and not num_top:
        return TokenLogprobs(token, logprobs)
    if not isinstance(logprobs, dict) or token not in logprobs:
        raise EngineFailed("TensorRT-LLM returned no logprob of the sampled token", engine="trtllm")
    by_rank = sorted(logprobs.items(), key=lambda pair: (-pair[1].logprob, pair[0]))
    top = tuple((other, each.logprob) for other, each in by_rank[:num_top])
    return TokenLogprobs(token, logprobs[token].logprob, top)


class KvCacheStats(msgspec.Struct, frozen=True, rename="camel"):
    max_num_blocks: int = 0
    used_num_blocks: int = 0


class IterationStats(msgspec.Struct, frozen=True, rename="camel"):
    """Fields used from an iteration's statistics."""

    kv_cache_stats: KvCacheStats | None = None
    max_num_active_requests: int = 0


def stats_of(report: Any) -> IterationStats | None:
    """None if malformed."""
    try:
        return msgspec.convert(report, IterationStats)
    except msgspec.ValidationError:
        return None
