"""What vLLM's engine core says, in our words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineDied, EngineFailed
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.answers import Choice, News

_STOP, _LENGTH, _REPETITION, _ERROR = "stop", "length", "repetition", "error"
_FINISHES = {_STOP: FinishReason.STOP, _LENGTH: FinishReason.LENGTH, _REPETITION: FinishReason.STOP}


def news_of(output: Any, choice: Choice) -> News:
    """Of one of a step's outputs. EngineFailed for a request that it gave up on."""
    finish = None
    if output.finish_reason is not None:
        reason = str(output.finish_reason)
        finish = _FINISHES.get(reason)
        if finish is None:
            kind = (
                EngineDied if reason == _ERROR else EngineFailed
            )  # of the first vLLM says that another may do better
            raise kind(f"vLLM ended the request: {reason}", engine="vllm", reason=reason)
    stats = output.prefill_stats
    return News(
        token_ids=tuple(output.new_token_ids),
        finish=finish,
        stop_reason=output.stop_reason if finish is FinishReason.STOP else None,
        logprobs=_logprobs(output, choice.request.sampling.logprobs),
        prompt_logprobs=_prompt_logprobs(output, choice),
        cached_tokens=None if stats is None else stats.num_cached_tokens,
    )


def _logprobs(output: Any, wanted: int | None) -> tuple[TokenLogprobs, ...] | None:
    if wanted is None:
        return None
    lists = output.new_logprobs
    if lists is None:
        return ()
    ids, values = lists.logprob_token_ids.tolist(), lists.logprobs.tolist()
    return tuple(map(_row, ids, values, [wanted] * len(ids)))


def _row(ids: Sequence[int], values: Sequence[float], wanted: int) -> TokenLogprobs:
    """The token itself comes first, then the most likely ones: as many as somebody in the batch asked for."""
    top = tuple(zip(ids[1 : wanted + 1], values[1 : wanted + 1], strict=True))
    return TokenLogprobs(ids[0], values[0], top)


def _prompt_logprobs(output: Any, choice: Choice) -> tuple[TokenLogprobs | None, ...] | None:
    tensors, wanted = output.new_prompt_logprobs_tensors, choice.request.sampling.prompt_logprobs
    if tensors is None or wanted is None:
        return None
    ids, values = tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist()
    # What was said already is given to vLLM with the prompt, and is no part of it.
    told = (None, *map(_row, ids, values, [wanted] * len(ids)))
    return told[: len(choice.request.token_ids)]


def load_of(stats: Any, num_blocks: int, dp_rank: int) -> WorkerLoad:
    """`num_blocks`: those that requests can have."""
    return WorkerLoad(
        running=stats.num_running_reqs,
        waiting=stats.num_waiting_reqs + getattr(stats, "num_skipped_waiting_reqs", 0),
        kv_used_blocks=round(stats.kv_cache_usage * num_blocks),
        kv_total_blocks=num_blocks,
        dp_rank=dp_rank,
    )
