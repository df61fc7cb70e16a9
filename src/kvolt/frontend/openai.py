"""OpenAI's formats in their simplest form: what comes in, what goes out.

Schemas only. Fields that are not listed are ignored; a later edge will be exact about them.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from kvolt.core.errors import InvalidRequest


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    include_usage: bool = False


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(_Common, frozen=True, kw_only=True):
    prompt: str | list[Annotated[int, Meta(ge=0, le=2**32 - 1)]]


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str
    content: str


class ChatRequest(_Common, frozen=True, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None


AnyRequest = CompletionRequest | ChatRequest

_completion_decoder = msgspec.json.Decoder(CompletionRequest)
_chat_decoder = msgspec.json.Decoder(ChatRequest)


def parse_completion(body: bytes) -> CompletionRequest:
    request: CompletionRequest = _parse(_completion_decoder, body)
    _check(request)
    return request


def parse_chat(body: bytes) -> ChatRequest:
    request: ChatRequest = _parse(_chat_decoder, body)
    _check(request)
    if not request.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    return request


def _parse(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        text = str(error)
        where = text.rpartition("`$.")[2].rstrip("`") if "`$." in text else None
        raise InvalidRequest(text or "the body is not JSON", param=where) from error


_RANGES: tuple[tuple[str, int, int | None], ...] = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("n", 1, 128),
    ("max_tokens", 1, None),
    ("max_completion_tokens", 1, None),
)


def _check(request: AnyRequest) -> None:
    for name, low, high in _RANGES:
        value = getattr(request, name, None)
        if value is not None and (value < low or (high is not None and value > high)):
            bound = f"between {low} and {high}" if high is not None else f"at least {low}"
            raise InvalidRequest(f"{name} must be {bound}", param=name)


class Shape(Protocol):
    """How one endpoint words its answers."""

    prefix: str
    whole: str
    chunk: str

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]: ...

    def delta(self, index: int, text: str, finish: str | None, first: bool) -> dict[str, Any]: ...


class CompletionShape:
    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, first: bool) -> dict[str, Any]:
        return self.choice(index, text, finish)


class ChatShape:
    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def choice(self, index: int, text: str, finish: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": finish}

    def delta(self, index: int, text: str, finish: str | None, first: bool) -> dict[str, Any]:
        delta = {"role": "assistant", "content": text} if first else {"content": text} if text else {}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
