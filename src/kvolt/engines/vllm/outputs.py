"""Converts outputs of vLLM's engine core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineDied, EngineFailed
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.answers import Choice, ChoiceOutput

_STOP, _LENGTH, _REPETITION, _ERROR = "stop", "length", "repetition", "error"
_FINISHES = {_STOP: FinishReason.STOP, _LENGTH: FinishReason.LENGTH, _REPETITION: FinishReason.STOP}


def choice_output(output: Any, choice: Choice) -> ChoiceOutput:
    """Convert one output of a step. EngineFailed if vLLM failed the request."""
    finish = None
    if output.finish_reason is not None:
        reason = str(output.finish_reason)
        finish = _FINISHES.get(reason)
        if finish is None:
            kind = (
                EngineDied if reason == _ERROR else EngineFailed
            )  # an "error" may not occur on another worker
            raise kind(f"vLLM ended the request: {reason}", engine="vllm", reason=reason)
    stats = output.prefill_stats
    return ChoiceOutput(
        token_ids=tuple(output.new_token_ids),
        finish=finish,
        stop_reason=output.stop_reason if finish is FinishReason.STOP else None,
        logprobs=_logprobs(output, choice.request.sampling.logprobs),
        prompt_logprobs=_prompt_logprobs(output, choice),
        cached_tokens=None if stats is None else stats.num_cached_tokens,
    )


def _logprobs(output: Any, num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    if num_top is None:
        return None
    lists = output.new_logprobs
    if lists is None:
        return ()
    ids, values = lists.logprob_token_ids.tolist(), lists.logprobs.tolist()
    return tuple(map(_row, ids, values, [num_top] * len(ids)))


def _row(ids: Sequence[int], values: Sequence[float], num_top: int) -> TokenLogprobs:
    """The sampled token comes first, then the most likely ones: the maximum that any request in the batch needs."""
    top = tuple(zip(ids[1 : num_top + 1], values[1 : num_top + 1], strict=True))
    return TokenLogprobs(ids[0], values[0], top)


def _prompt_logprobs(output: Any, choice: Choice) -> tuple[TokenLogprobs | None, ...] | None:
    tensors, num_top = output.new_prompt_logprobs_tensors, choice.request.sampling.prompt_logprobs
    if tensors is None or num_top is None:
        return None
    ids, values = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    # Resumed tokens are part of vLLM's prompt but not of the request's.
    logprobs = (None, *map(_row, ids, values, [num_top] * len(ids)))
    return logprobs[: len(choice.request.token_ids)]


def load_of(stats: Any, num_blocks: int, dp_rank: int) -> WorkerLoad:
    """Load of a rank. `num_blocks`: usable blocks."""
    return WorkerLoad(
        running=stats.num_running_reqs,
        waiting=stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0),
        kv_used_blocks=round(stats.kv_cache_usage * num_blocks),
        kv_total_blocks=num_blocks,
        dp_rank=dp_rank,
    )
