"""How what a server says becomes what a step tells. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from kvolt.core.delta import StepOutput
from kvolt.engines.foreign.answers import News


def joined(first: News, second: News) -> News:
    """Two chunks of one choice, in order, as one."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or ()) + second.logprobs
    return News(
        token_ids=first.token_ids + second.token_ids,
        finish=second.finish,
        stop_reason=second.stop_reason,
        logprobs=logprobs,
        cached_tokens=first.cached_tokens if second.cached_tokens is None else second.cached_tokens,
    )


def without_guess(step: StepOutput) -> StepOutput:
    """The step without `cached_tokens`, for a server that has not said what it had. A 0 would be a report that nothing
    was held, and routers believe reports."""
    if all(delta.cached_tokens is None for _, delta in step.deltas):
        return step
    deltas = tuple((request_id, replace(delta, cached_tokens=None)) for request_id, delta in step.deltas)
    return replace(step, deltas=deltas)
