"""Converts outputs of SGLang's schedulers.

Also applies stop tokens if EOS is ignored, since SGLang then ignores both.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError, Overloaded
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.answers import Choice, ChoiceOutput, find_end
from kvolt.engines.external.requests import needs_prompt_logprobs
from kvolt.engines.sglang.host.messages import Logprob, RankLoad, Row

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def choice_output(row: Row, choice: Choice) -> ChoiceOutput:
    """Convert a choice's output of one step. Raises KvoltError if SGLang failed the request."""
    request = choice.request
    finish = stop_reason = None
    if row.finish is not None:
        finish = _FINISHES.get(row.finish["type"])
        if finish is None:
            raise failure_of(row.finish)
        matched = row.finish.get("matched")
        # A completed grammar reports its last token as well, which is no stop token of the request.
        stop_reason = matched if matched in request.stop.stop_token_ids else None
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = _logprobs(row.logprobs or (), row.top or (), request.sampling.logprobs)
    output = ChoiceOutput(
        token_ids=tuple(row.token_ids),
        finish=finish,
        stop_reason=stop_reason,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(row, choice),
        cached_tokens=None if choice.has_started else row.cached_tokens,
    )
    return _apply_stop_tokens(output, choice)


def _apply_stop_tokens(output: ChoiceOutput, choice: Choice) -> ChoiceOutput:
    """Apply stop tokens if SGLang does not."""
    stop = choice.request.stop
    if not (stop.ignore_eos and stop.stop_token_ids):
        return output
    length, finish, stop_reason = find_end(choice, output.token_ids, ())
    if finish is FinishReason.STOP:
        output.token_ids = output.token_ids[:length]
        output.logprobs = None if output.logprobs is None else output.logprobs[:length]
        output.finish, output.stop_reason = finish, stop_reason
    return output


def _logprobs(
    chosen: Sequence[Logprob], top: Sequence[list[Logprob] | None], num_top: int
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        _entry(each, top[index] if index < len(top) else None, num_top) for index, each in enumerate(chosen)
    )


def _entry(chosen: Logprob, top: list[Logprob] | None, num_top: int) -> TokenLogprobs:
    value, token = chosen
    best = tuple((other, _clamped(logprob)) for logprob, other in (top or ())[:num_top])
    return TokenLogprobs(token, _clamped(value), best)


def _clamped(logprob: float | None) -> float:
    """Clamp to 0; rounding may produce slightly more."""
    return 0.0 if logprob is None else min(logprob, 0.0)


def _prompt_logprobs(row: Row, choice: Choice) -> tuple[TokenLogprobs | None, ...] | None:
    num_top = choice.request.sampling.prompt_logprobs
    if row.prompt_logprobs is None or num_top is None or not needs_prompt_logprobs(choice):
        return None
    logprobs = _logprobs(row.prompt_logprobs, row.prompt_top or (), num_top)
    return (None, *logprobs[1:])


def failure_of(finish: dict[str, object]) -> KvoltError:
    """Error of a request that a scheduler aborted; status codes are those of its HTTP server."""
    message = f"SGLang aborted the request: {finish.get('message') or finish.get('type')}"
    match finish.get("status_code"):
        case 400:
            return InvalidRequest(message, param="request")
        case 429 | 503:
            return Overloaded(message, queue="sglang")
    return EngineFailed(message, engine="sglang")


def load_of(load: RankLoad, page_size: int, num_blocks: int) -> WorkerLoad:
    return WorkerLoad(
        running=load.running,
        waiting=load.waiting,
        kv_used_blocks=-(-load.used_tokens // page_size),
        kv_total_blocks=num_blocks,
        dp_rank=load.rank,
    )
