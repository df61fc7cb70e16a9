"""Decode and validate the bodies of the OpenAI endpoints and of /tokenize and /detokenize."""

from __future__ import annotations

from kvolt.frontend.openai_api import checks
from kvolt.frontend.openai_api.decoding import Parsed, RequestDecoder
from kvolt.frontend.openai_api.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_chat = RequestDecoder(ChatRequest)
_completion = RequestDecoder(CompletionRequest)
_tokenize = RequestDecoder(TokenizeRequest)
_detokenize = RequestDecoder(DetokenizeRequest)


def parse_chat(body: bytes) -> Parsed[ChatRequest]:
    """Raises InvalidRequest or Unsupported with the invalid field as `param`."""
    parsed = _chat.decode(body)
    checks.check_chat(parsed.request)
    return parsed


def parse_completion(body: bytes) -> Parsed[CompletionRequest]:
    parsed = _completion.decode(body)
    checks.check_completion(parsed.request)
    return parsed


def parse_tokenize(body: bytes) -> Parsed[TokenizeRequest]:
    parsed = _tokenize.decode(body)
    checks.check_tokenize(parsed.request)
    return parsed


def parse_detokenize(body: bytes) -> Parsed[DetokenizeRequest]:
    return _detokenize.decode(body)
