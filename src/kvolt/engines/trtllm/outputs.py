"""What TensorRT-LLM says of an answer and of itself, in our words.

It tells all tokens of an answer again and again: `Reader` keeps what was told. Where an answer ends is decided here by
the contract's rules, token by token; TensorRT-LLM's own stopping only saves steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineFailed
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.external.ending import ending

_ENDS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


@dataclass(slots=True)
class Reader:
    """Of one choice."""

    choice: Choice
    eos_token_ids: Collection[int]
    first: tuple[int, ...] = ()
    """Tokens that an answer begins with here although its client has them: those that came with its prompt."""
    num_read: int = 0

    def read(self, result: Any) -> News | None:
        """What is new; None for nothing. EngineFailed for an answer that it gave up on."""
        output = result.outputs[0]
        tokens: Sequence[int] = output.token_ids
        if tuple(tokens[: len(self.first)]) != self.first[: len(tokens)]:
            raise EngineFailed("TensorRT-LLM did not go on after the prompt it was given", engine="trtllm")
        start = max(self.num_read, len(self.first))
        new = tuple(tokens[start:])
        self.num_read = len(tokens)
        request = self.choice.request
        length, finish, stop_reason = ending(self.choice, new, self.eos_token_ids)
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
            told = output.logprobs[start : start + length]
            logprobs = _logprobs(new[:length], told, request.sampling.logprobs)
        cached = len(request.token_ids) if self.first else result.cached_tokens
        return News(new[:length], finish, stop_reason, logprobs, cached_tokens=cached)


def _logprobs(tokens: Sequence[int], told: Sequence[Any], wanted: int) -> tuple[TokenLogprobs, ...]:
    if len(told) != len(tokens):
        raise EngineFailed("TensorRT-LLM told no logprobs of some tokens", engine="trtllm")
    return tuple(_row(token, each, wanted) for token, each in zip(tokens, told, strict=True))


def _row(token: int, told: Any, wanted: int) -> TokenLogprobs:
    """A map from token to Logprob, or the token's own figure alone."""
    if isinstance(told, float) and not wanted:
        return TokenLogprobs(token, told)
    if not isinstance(told, dict) or token not in told:
        raise EngineFailed("TensorRT-LLM told no logprob of the token itself", engine="trtllm")
    by_rank = sorted(told.items(), key=lambda pair: (-pair[1].logprob, pair[0]))
    top = tuple((other, each.logprob) for other, each in by_rank[:wanted])
    return TokenLogprobs(token, told[token].logprob, top)


class KvCacheStats(msgspec.Struct, frozen=True, rename="camel"):
    max_num_blocks: int = 0
    used_num_blocks: int = 0


class IterationStats(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an iteration's statistics that matter."""

    kv_cache_stats: KvCacheStats | None = None
    max_num_active_requests: int = 0


def stats_of(told: Any) -> IterationStats | None:
    """None for something in another shape."""
    try:
        return msgspec.convert(told, IterationStats)
    except msgspec.ValidationError:
        return None
