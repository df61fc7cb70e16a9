"""SGLang's API: `/generate` with token ids in and out.

A chunk has all tokens so far, or only the new ones (`--incremental-streaming-output`); `completion_tokens` determines
which are new. With `ignore_eos` SGLang also ignores stop tokens, and an answer of maximum length ends with reason
length even if its last token is a stop token. So the end of an answer is also detected here, which then ends the
call.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineDied, InvalidRequest, ProtocolError
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS
from kvolt.engines.external.answers import ChoiceOutput
from kvolt.engines.external.requests import common_sampling, input_tokens
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.remote.dialect import malformed_chunk, seed_of, tokens_left
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

    kind = SourceEngine.SGLANG
    path = "/generate"
    reports_cached_first = True
    clear_path = "/flush_cache"
    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "prompt_logprobs"}
    clear_remedy = "wait until the server is idle"

    def __init__(self, url: str, eos_token_ids: tuple[int, ...]) -> None:
        self._url = url
        self._eos_token_ids = eos_token_ids

    def body(self, request: Request, index: int) -> bytes:
        sampling, stop = request.sampling, request.stop
        max_tokens, min_tokens = tokens_left(request, index)
        params: dict[str, Any] = {
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
        params |= {name: value for name, value in optional.items() if value is not None}
        body: dict[str, Any] = {
            "input_ids": input_tokens(request, index),
            "sampling_params": params,
            "stream": True,
        }
        if request.salt:
            body["cache_salt"] = request.salt
        if sampling.logprobs is not None:
            body |= {"return_logprob": True, "top_logprobs_num": sampling.logprobs}
        return _encode(body)

    def reader(self, request: Request, index: int) -> SglangReader:
        stop = request.stop
        end_token_ids = frozenset((*stop.stop_token_ids, *(() if stop.ignore_eos else self._eos_token_ids)))
        return SglangReader(
            self._url, request.sampling.logprobs, end_token_ids, tokens_left(request, index)[1]
        )


class SglangReader:
    """AnswerReader for SGLang."""

    def __init__(
        self, url: str, num_top: int | None, end_token_ids: frozenset[int] = frozenset(), min_tokens: int = 0
    ) -> None:
        """`end_token_ids`: tokens that end an answer after `min_tokens` tokens."""
        self._url = url
        self._num_top = num_top
        self._end_token_ids = end_token_ids
        self._min_tokens = min_tokens
        self._num_reported = 0
        self.was_cut = False

    def read(self, event: bytes) -> ChoiceOutput | None:
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise malformed_chunk(error) from error
        if chunk.error is not None:
            raise error_in_stream(self._url, chunk.error)
        meta = chunk.meta_info
        if meta is None:
            return None
        num_new = meta.completion_tokens - self._num_reported
        if not 0 <= num_new <= len(chunk.output_ids):
            raise ProtocolError(
                f"a chunk with {len(chunk.output_ids)} tokens has {num_new} new ones", rule="chunk"
            )
        num_before, self._num_reported = self._num_reported, meta.completion_tokens
        ids = chunk.output_ids[len(chunk.output_ids) - num_new :]
        output = ChoiceOutput(
            tuple(ids), cached_tokens=meta.cached_tokens, logprobs=self._logprobs(meta, ids)
        )
        if meta.finish_reason is not None:
            self._end(output, meta.finish_reason)
        if self._end_token_ids:
            self._cut(output, num_before)
        return output if output.token_ids or output.finish is not None else None

    def end(self) -> ChoiceOutput | None:
        return None

    def _end(self, output: ChoiceOutput, finish: _Finish) -> None:
        if finish.type == "abort":
            error = {"message": finish.message or "aborted", "code": finish.status_code or 500}
            raise error_in_stream(self._url, error)
        if finish.type == "length":
            output.finish = FinishReason.LENGTH
        elif finish.type == "stop":
            output.finish = FinishReason.STOP
            output.stop_reason = finish.matched if isinstance(finish.matched, int) else None
        else:
            raise EngineDied(f"{self._url} ended an answer by {finish.type!r}", engine=ENGINE)

    def _cut(self, output: ChoiceOutput, num_before: int) -> None:
        for index, token_id in enumerate(output.token_ids):
            if token_id in self._end_token_ids and num_before + index >= self._min_tokens:
                self.was_cut = output.finish is None
                output.token_ids = output.token_ids[: index + 1]
                output.logprobs = None if output.logprobs is None else output.logprobs[: index + 1]
                output.finish, output.stop_reason = FinishReason.STOP, token_id
                return

    def _logprobs(self, meta: _Meta, ids: list[int]) -> tuple[TokenLogprobs, ...] | None:
        if self._num_top is None:
            return None
        logprobs = meta.output_token_logprobs or []
        if len(logprobs) < len(ids):
            raise ProtocolError("logprobs are missing in an answer", rule="logprobs")
        chosen = logprobs[len(logprobs) - len(ids) :]
        tops = meta.output_top_logprobs or []
        tops = tops[max(len(tops) - len(ids), 0) :] if ids else []
        entries = []
        for index, token_id in enumerate(ids):
            top = sorted(
                (
                    (token, logprob)
                    for logprob, token, _ in (tops[index] if index < len(tops) else None) or ()
                    if logprob is not None
                ),
                key=lambda pair: -pair[1],
            )
            logprob = chosen[index][0]
            entries.append(
                TokenLogprobs(token_id, 0.0 if logprob is None else logprob, tuple(top[: self._num_top]))
            )
        return tuple(entries)


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
    """Regular expression for the choices; SGLang has no choice grammar."""
    try:
        return "(" + "|".join(re.escape(str(each)) for each in json.loads(text)) + ")"
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the choices are not JSON: {error}", param="grammar") from error
