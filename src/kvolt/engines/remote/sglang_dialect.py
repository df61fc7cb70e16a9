"""SGLang's words: `/generate` with token ids in and out.

A chunk has all tokens so far, or only the new ones (`--incremental-streaming-output`): `completion_tokens` says how
many there are in all, and so which of them are new.

With `ignore_eos` SGLang does not look at stop tokens either, and an answer of full length ends by its length whatever
its last token is. So what ends an answer is looked for here as well, and ends the call with it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineDied, InvalidRequest, ProtocolError, Unsupported
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.external.answers import News
from kvolt.engines.external.resuming import given_tokens
from kvolt.engines.external.sampling import common_sampling
from kvolt.engines.kv_formats.schema import Engine
from kvolt.engines.remote.dialect import no_chunk, seed_of, tokens_left
from kvolt.engines.remote.refusals import ENGINE, error_in_stream

_encode = msgspec.json.Encoder().encode
_Logprob = tuple[float | None, int, str | None]


class _Finish(msgspec.Struct):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


class _Meta(msgspec.Struct):
    completion_tokens: int
    finish_reason: _Finish | None = None
    cached_tokens: int | None = None
    output_token_logprobs: list[_Logprob] | None = None
    output_top_logprobs: list[list[_Logprob] | None] | None = None


class _Chunk(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: _Meta | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class SglangDialect:
    """See the module."""

    kind = Engine.SGLANG
    path = "/generate"
    tells_cached_first = True
    clear_path = "/flush_cache"
    clear_remedy = "wait until it computes nothing"

    def __init__(self, url: str, eos_token_ids: tuple[int, ...]) -> None:
        self._url = url
        self._eos_token_ids = eos_token_ids

    def check(self, request: Request) -> None:
        if request.sampling.allowed_token_ids is not None:
            raise Unsupported("SGLang has no allowed_token_ids", feature="allowed_token_ids")

    def body(self, request: Request, index: int) -> bytes:
        sampling, stop = request.sampling, request.stop
        max_tokens, min_tokens = tokens_left(request, index)
        asked: dict[str, Any] = {
            "max_new_tokens": max_tokens,
            "min_new_tokens": min_tokens,
            **common_sampling(request),
            "top_k": sampling.top_k or -1,
            "skip_special_tokens": False,
        }
        optional: dict[str, Any] = {
            "stop_token_ids": stop.stop_token_ids or None,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "sampling_seed": seed_of(request, index),
            **(_grammar(request.grammar) if request.grammar else {}),
        }
        asked |= {name: value for name, value in optional.items() if value is not None}
        body: dict[str, Any] = {
            "input_ids": given_tokens(request, index),
            "sampling_params": asked,
            "stream": True,
        }
        if request.salt:
            body["cache_salt"] = request.salt
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
        return _encode(body)

    def reader(self, request: Request, index: int) -> SglangReader:
        stop = request.stop
        enders = frozenset((*stop.stop_token_ids, *(() if stop.ignore_eos else self._eos_token_ids)))
        return SglangReader(self._url, request.sampling.logprobs, enders, tokens_left(request, index)[1])


class SglangReader:
    """An AnswerReader."""

    def __init__(
        self, url: str, num_top: int | None, enders: frozenset[int] = frozenset(), min_tokens: int = 0
    ) -> None:
        """`enders`: tokens that end an answer which has `min_tokens` before them."""
        self._url = url
        self._num_top = num_top
        self._enders = enders
        self._min_tokens = min_tokens
        self._num_told = 0
        self.was_cut = False

    def read(self, event: bytes) -> News | None:
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise no_chunk(error) from error
        if chunk.error is not None:
            raise error_in_stream(self._url, chunk.error)
        meta = chunk.meta_info
        if meta is None:
            return None
        num_new = meta.completion_tokens - self._num_told
        if not 0 <= num_new <= len(chunk.output_ids):
            raise ProtocolError(
                f"a chunk with {len(chunk.output_ids)} tokens has {num_new} new ones", rule="chunk"
            )
        num_before, self._num_told = self._num_told, meta.completion_tokens
        ids = chunk.output_ids[len(chunk.output_ids) - num_new :]
        news = News(tuple(ids), cached_tokens=meta.cached_tokens, logprobs=self._logprobs(meta, ids))
        if meta.finish_reason is not None:
            self._end(news, meta.finish_reason)
        if self._enders:
            self._cut(news, num_before)
        return news if news.token_ids or news.finish is not None else None

    def end(self) -> News | None:
        return None

    def _end(self, news: News, finish: _Finish) -> None:
        if finish.type == "abort":
            said = {"message": finish.message or "aborted", "code": finish.status_code or 500}
            raise error_in_stream(self._url, said)
        if finish.type == "length":
            news.finish = FinishReason.LENGTH
        elif finish.type == "stop":
            news.finish = FinishReason.STOP
            news.stop_reason = finish.matched if isinstance(finish.matched, int) else None
        else:
            raise EngineDied(f"{self._url} ended an answer by {finish.type!r}", engine=ENGINE)

    def _cut(self, news: News, num_before: int) -> None:
        for at, token_id in enumerate(news.token_ids):
            if token_id in self._enders and num_before + at >= self._min_tokens:
                self.was_cut = news.finish is None
                news.token_ids = news.token_ids[: at + 1]
                news.logprobs = None if news.logprobs is None else news.logprobs[: at + 1]
                news.finish, news.stop_reason = FinishReason.STOP, token_id
                return

    def _logprobs(self, meta: _Meta, ids: list[int]) -> tuple[TokenLogprobs, ...] | None:
        if self._num_top is None:
            return None
        told = meta.output_token_logprobs or []
        if len(told) < len(ids):
            raise ProtocolError("logprobs are missing in an answer", rule="logprobs")
        chosen = told[len(told) - len(ids) :]
        tops = meta.output_top_logprobs or []
        tops = tops[max(len(tops) - len(ids), 0) :] if ids else []
        found = []
        for at, token_id in enumerate(ids):
            top = sorted(
                (
                    (token, logprob)
                    for logprob, token, _ in (tops[at] if at < len(tops) else None) or ()
                    if logprob is not None
                ),
                key=lambda pair: -pair[1],
            )
            logprob = chosen[at][0]
            found.append(
                TokenLogprobs(token_id, 0.0 if logprob is None else logprob, tuple(top[: self._num_top]))
            )
        return tuple(found)


def _grammar(grammar: Grammar) -> dict[str, str]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": grammar.text}
        case GrammarKind.JSON_OBJECT:
            return {"json_schema": '{"type": "object"}'}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            return {"regex": _one_of(grammar.text)}
        case GrammarKind.EBNF:
            return {"ebnf": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return {"structural_tag": grammar.text}


def _one_of(text: str) -> str:
    """SGLang has no choices: an expression that is one of them."""
    try:
        return "(" + "|".join(re.escape(str(each)) for each in json.loads(text)) + ")"
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the choices are no JSON: {error}", param="grammar") from error
