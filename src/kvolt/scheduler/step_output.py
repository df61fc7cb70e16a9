"""Builds the StepOutput of a step from the scheduler's results.

Owns the wording that engines with our scheduler share. Knows no model: log probabilities come from who has them.
"""

from __future__ import annotations

from kvolt.core.delta import Delta, TokenLogprobs, Usage
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import Advanced, Ran


def delta_of(
    one: Advanced,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
) -> Delta:
    """A new token with all that belongs to it."""
    sequence, end = one.sequence, one.end
    num_cached = sequence.num_cached or 0
    return Delta(
        token_ids=(one.token,),
        index=sequence.index,
        finish=end.finish if end else None,
        logprobs=None if logprobs is None else (logprobs,),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=num_cached if one.is_first else None,
        usage=Usage(sequence.num_prompt, sequence.num_output, num_cached) if end else None,
        stop_reason=end.stop_reason if end else None,
    )


def delta_of_run(one: Ran) -> Delta:
    """The tokens of several steps, none of them the first."""
    sequence, end = one.sequence, one.end
    usage = Usage(sequence.num_prompt, sequence.num_output, sequence.num_cached or 0) if end else None
    return Delta(token_ids=tuple(one.tokens), finish=end.finish if end else None, usage=usage)


def load_of(scheduler: Scheduler, stats: StepStats | None = None, num_pending: int = 0) -> WorkerLoad:
    """How busy a scheduler is; `num_pending` wait before it."""
    return WorkerLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + num_pending,
        kv_used_blocks=scheduler.num_used_blocks,
        kv_total_blocks=scheduler.pool.num_blocks,
        step=stats,
    )
