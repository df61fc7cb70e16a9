"""What SGLang's schedulers say, in our words.

Owns the ends that SGLang does not see: it ignores stop tokens where EOS is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineFailed, InvalidRequest, KvoltError, Overloaded
from kvolt.core.load import WorkerLoad
from kvolt.engines.external.answers import Choice, News
from kvolt.engines.external.ending import ending
from kvolt.engines.external.resuming import asks_prompt_logprobs
from kvolt.engines.sglang.host.messages import Logprob, RankLoad, Row

_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def news_of(row: Row, choice: Choice) -> News:
    """What a step brought for a choice. A KvoltError for one that SGLang gave up on."""
    request = choice.request
    finish = stop_reason = None
    if row.finish is not None:
        finish = _FINISHES.get(row.finish["type"])
        if finish is None:
            raise failure_of(row.finish)
        matched = row.finish.get("matched")
        # A grammar that is through names its last token as well, which is nobody's stop token.
        stop_reason = matched if matched in request.stop.stop_token_ids else None
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = _logprobs(row.logprobs or (), row.top or (), request.sampling.logprobs)
    news = News(
        token_ids=tuple(row.token_ids),
        finish=finish,
        stop_reason=stop_reason,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(row, choice),
        cached_tokens=None if choice.has_begun else row.cached_tokens,
    )
    return _ended_here(news, choice)


def _ended_here(news: News, choice: Choice) -> News:
    """Stop tokens are looked for here where SGLang does not."""
    stop = choice.request.stop
    if not (stop.ignore_eos and stop.stop_token_ids):
        return news
    length, finish, stop_reason = ending(choice, news.token_ids, ())
    if finish is FinishReason.STOP:
        news.token_ids = news.token_ids[:length]
        news.logprobs = None if news.logprobs is None else news.logprobs[:length]
        news.finish, news.stop_reason = finish, stop_reason
    return news


def _logprobs(
    chosen: Sequence[Logprob], top: Sequence[list[Logprob] | None], wanted: int
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        _entry(each, top[place] if place < len(top) else None, wanted) for place, each in enumerate(chosen)
    )


def _entry(chosen: Logprob, top: list[Logprob] | None, wanted: int) -> TokenLogprobs:
    value, token = chosen
    best = tuple((other, _figure(logprob)) for logprob, other in (top or ())[:wanted])
    return TokenLogprobs(token, _figure(value), best)


def _figure(logprob: float | None) -> float:
    """At most 0: what is certain comes out a little above, by rounding."""
    return 0.0 if logprob is None else min(logprob, 0.0)


def _prompt_logprobs(row: Row, choice: Choice) -> tuple[TokenLogprobs | None, ...] | None:
    wanted = choice.request.sampling.prompt_logprobs
    if row.prompt_logprobs is None or wanted is None or not asks_prompt_logprobs(choice):
        return None
    told = _logprobs(row.prompt_logprobs, row.prompt_top or (), wanted)
    return (None, *told[1:])


def failure_of(finish: dict[str, object]) -> KvoltError:
    """Of a request that a scheduler ended for a reason of its own; statuses are those of its HTTP server."""
    message = f"SGLang gave up on the request: {finish.get('message') or finish.get('type')}"
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
