"""Builds StepOutputs from the scheduler's results, for all engines that use it. Log probabilities are passed
in."""

from __future__ import annotations

from kvolt.core.delta import Delta, TokenLogprobs, Usage
from kvolt.core.load import StepStats, WorkerLoad
from kvolt.scheduler.scheduler import Scheduler
from kvolt.scheduler.step_plan import NewToken, NewTokenRun


def delta_of(
    new: NewToken,
    logprobs: TokenLogprobs | None = None,
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
) -> Delta:
    """The delta of a new token."""
    sequence, end = new.sequence, new.end
    num_cached = sequence.num_cached or 0
    return Delta(
        token_ids=(new.token,),
        index=sequence.index,
        finish=end.finish if end else None,
        logprobs=None if logprobs is None else (logprobs,),
        prompt_logprobs=prompt_logprobs,
        cached_tokens=num_cached if new.is_first else None,
        usage=Usage(sequence.num_prompt, sequence.num_output, num_cached) if end else None,
        stop_reason=end.stop_reason if end else None,
    )


def delta_of_run(new: NewTokenRun) -> Delta:
    """The delta of a run of tokens, none of them the first."""
    sequence, end = new.sequence, new.end
    usage = Usage(sequence.num_prompt, sequence.num_output, sequence.num_cached or 0) if end else None
    return Delta(token_ids=tuple(new.tokens), finish=end.finish if end else None, usage=usage)


def load_of(scheduler: Scheduler, stats: StepStats | None = None, num_pending: int = 0) -> WorkerLoad:
    """The current load; `num_pending` requests wait in front of the scheduler."""
    return WorkerLoad(
        running=scheduler.num_running,
        waiting=scheduler.num_waiting + num_pending,
        kv_used_blocks=scheduler.pool.num_used,
        kv_total_blocks=scheduler.pool.num_blocks,
        step=stats,
    )
