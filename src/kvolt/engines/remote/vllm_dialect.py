"""vLLM's API: `/v1/completions` with token ids in and out.

Not `/inference/v1/generate`, which most servers do not have (`--enable-scale-out`). vLLM reports cached tokens only
in the usage at the end, and only with `--enable-prompt-tokens-details`, so the last output waits for it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvolt.core.delta import FinishReason, TokenLogprobs
from kvolt.core.errors import EngineDied, InvalidRequest, ProtocolError
from kvolt.core.request import Grammar, GrammarKind, Request
from kvolt.engines.contract import COMMON_SAMPLING_FIELDS
from kvolt.engines.external.answers import ChoiceOutput
from kvolt.engines.external.requests import common_sampling, input_tokens
from kvolt.engines.kv_formats.schema import SourceEngine
from kvolt.engines.kv_formats.translator import SALT_TAG
from kvolt.engines.remote.dialect import malformed_chunk, seed_of, tokens_left
from kvolt.engines.remote.refusals import ENGINE, error_in_stream

_encode = msgspec.json.Encoder().encode
_ID_TAG = "token_id:"
_FINISHES = {"length": FinishReason.LENGTH, "stop": FinishReason.STOP, "repetition": FinishReason.STOP}


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class VllmDialect:
    """See the module."""

    kind = SourceEngine.VLLM
    path = "/v1/completions"
    reports_cached_first = False
    clear_path = "/reset_prefix_cache"
    sampling_fields = COMMON_SAMPLING_FIELDS | {"logit_bias", "allowed_token_ids", "prompt_logprobs"}
    clear_remedy = "start the server with VLLM_SERVER_DEV_MODE=1"

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def body(self, request: Request, index: int) -> bytes:
        sampling, stop = request.sampling, request.stop
        max_tokens, min_tokens = tokens_left(request, index)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": input_tokens(request, index),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "skip_special_tokens": False,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            **common_sampling(request),
            "top_k": sampling.top_k or 0,
        }
        optional: dict[str, Any] = {
            "stop_token_ids": stop.stop_token_ids or None,
            "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()} or None,
            "allowed_token_ids": sampling.allowed_token_ids,
            "seed": seed_of(request, index),
            "cache_salt": f"{SALT_TAG}{request.salt}" if request.salt else None,
            "structured_outputs": _grammar(request.grammar) if request.grammar else None,
        }
        body |= {name: value for name, value in optional.items() if value is not None}
        if sampling.logprobs is not None:
            body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
        return _encode(body)

    def reader(self, request: Request, index: int) -> VllmReader:
        return VllmReader(self._url, request.sampling.logprobs)


class VllmReader:
    """AnswerReader for vLLM."""

    was_cut = False

    def __init__(self, url: str, num_top: int | None) -> None:
        self._url = url
        self._num_top = num_top
        self._ending: ChoiceOutput | None = None

    def read(self, event: bytes) -> ChoiceOutput | None:
        try:
            chunk = _decode(event)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise malformed_chunk(error) from error
        if chunk.error is not None:
            raise error_in_stream(self._url, chunk.error)
        if chunk.usage is not None and self._ending is not None and not chunk.choices:
            details = chunk.usage.prompt_tokens_details
            self._ending.cached_tokens = None if details is None else details.cached_tokens
            return self.end()
        if not chunk.choices:
            return None
        choice = chunk.choices[0]
        if choice.token_ids is None:
            raise ProtocolError("the server sent no token ids", rule="return_token_ids")
        output = ChoiceOutput(token_ids=tuple(choice.token_ids), logprobs=self._logprobs(choice))
        if choice.finish_reason is None:
            return output if output.token_ids else None
        output.finish = _FINISHES.get(choice.finish_reason)
        output.stop_reason = choice.stop_reason
        if output.finish is None:
            raise EngineDied(f"{self._url} ended an answer by {choice.finish_reason!r}", engine=ENGINE)
        self._ending = output
        return None

    def end(self) -> ChoiceOutput | None:
        ending, self._ending = self._ending, None
        return ending

    def _logprobs(self, choice: _Choice) -> tuple[TokenLogprobs, ...] | None:
        if self._num_top is None:
            return None
        logprobs, ids = choice.logprobs, choice.token_ids or []
        if logprobs is None or len(logprobs.token_logprobs) != len(ids):
            raise ProtocolError("logprobs are missing in an answer", rule="logprobs")
        entries = []
        for index, token_id in enumerate(ids):
            top = (logprobs.top_logprobs[index] if index < len(logprobs.top_logprobs) else None) or {}
            pairs = sorted(
                ((_id_of(name), logprob) for name, logprob in top.items()), key=lambda pair: -pair[1]
            )
            logprob = logprobs.token_logprobs[index]
            entries.append(
                TokenLogprobs(token_id, 0.0 if logprob is None else logprob, tuple(pairs[: self._num_top]))
            )
        return tuple(entries)


def _id_of(name: str) -> int:
    try:
        return int(name.removeprefix(_ID_TAG))
    except ValueError:
        raise ProtocolError(f"{name!r} is not a token id", rule="return_tokens_as_token_ids") from None


def _grammar(grammar: Grammar) -> dict[str, Any]:
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json": _json(grammar.text)}
        case GrammarKind.JSON_OBJECT:
            return {"json_object": True}
        case GrammarKind.REGEX:
            return {"regex": grammar.text}
        case GrammarKind.CHOICE:
            return {"choice": _json(grammar.text)}
        case GrammarKind.EBNF:
            return {"grammar": grammar.text}
        case GrammarKind.STRUCTURAL_TAG:
            return {"structural_tag": grammar.text}


def _json(text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"the grammar is not JSON: {error}", param="grammar") from error
