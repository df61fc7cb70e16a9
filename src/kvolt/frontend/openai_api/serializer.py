"""Serializers of chat and completion responses: JSON of choices, stream events, whole bodies.

The constant parts of a stream's events are encoded once: the event of a plain token is its escaped text between two
fixed byte strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvolt.core.delta import TokenLogprobs
from kvolt.frontend.detokenizer.detokenizer import Vocabulary
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


class ToolCall(msgspec.Struct):
    id: str
    name: str
    arguments: str = ""


class WholeChoice(msgspec.Struct, kw_only=True):
    """Complete output of a choice."""

    index: int
    text: str = ""
    reasoning: str | None = None
    calls: list[ToolCall] = []
    finish: str | None = None
    logprobs: Any = None
    extra: dict[str, Any] = {}


class Envelope:
    """Fields around the choices in every event and body of one request."""

    __slots__ = ("_end", "_fields", "_null_usage", "start")

    def __init__(self, fields: Mapping[str, Any], with_usage: bool) -> None:
        self._fields = fields
        self.start = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._null_usage = b',"usage":null' if with_usage else b""
        self._end = b"]" + self._null_usage + b"}\n\n"

    def plain(self, serializer: ResponseSerializer, index: int) -> tuple[bytes, bytes]:
        """Bytes before and after the escaped text of a plain token."""
        before, after = serializer.plain(index)
        return self.start + before, after + self._end

    def event(self, choice: Mapping[str, Any], more: Mapping[str, Any] | None = None) -> bytes:
        """An event with one choice; `more` are additional fields of the event."""
        if more is None:
            return self.start + encode(choice) + self._end
        null_usage = b"" if "usage" in more else self._null_usage
        return b"%b%b]%b,%b\n\n" % (self.start, encode(choice), null_usage, encode(more)[1:])

    def last_event(self, more: Mapping[str, Any]) -> bytes:
        """An event without choices: usage and other final fields."""
        return b"%b],%b\n\n" % (self.start, encode(more)[1:])

    def body(
        self, choices: Sequence[Mapping[str, Any]], usage: Mapping[str, Any], more: Mapping[str, Any]
    ) -> bytes:
        return encode({**self._fields, "choices": choices, "usage": usage, **more})


class ChatSerializer:
    """Response format of chats."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, new_call_id: Callable[[], str], tokens_as_ids: bool = False) -> None:
        self._new_call_id = new_call_id
        self._name_token = _name_as_id if tokens_as_ids else Vocabulary.token_text

    def plain(self, index: int) -> tuple[bytes, bytes]:
        """Bytes before and after the escaped text of a choice that has nothing but text."""
        return b'{"index":%d,"delta":{"content":"' % index, b'"},"logprobs":null,"finish_reason":null}'

    def text_choice(
        self, index: int, text: str, finish: str | None, logprobs: Any, first: bool
    ) -> dict[str, Any]:
        """An event's choice with text, or with the finish reason."""
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if text or first:
            delta["content"] = text
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def piece_choice(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        match piece:
            case Content(text):
                delta["content"] = text
            case Reasoning(text):
                delta["reasoning_content"] = text
            case ToolStart(number, name):
                function = {"name": name, "arguments": ""}
                call = {"index": number, "id": self._new_call_id(), "type": "function", "function": function}
                delta["tool_calls"] = [call]
            case ToolArguments(number, text):
                delta["tool_calls"] = [{"index": number, "function": {"arguments": text}}]
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        content = choice.text if choice.text or not (choice.calls or choice.reasoning) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning is not None:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in choice.calls
            ]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish,
            **choice.extra,
        }

    def logprobs(self, vocabulary: Vocabulary, tokens: Sequence[PlacedToken], offset: int) -> Any:
        """`offset`: characters before the text that contains the tokens."""
        known = [token.logprobs for token in tokens if token.logprobs is not None]
        return {"content": [self._logprob(vocabulary, token) for token in known], "refusal": None}

    def _logprob(self, vocabulary: Vocabulary, token: TokenLogprobs) -> dict[str, Any]:
        top = [self._token_entry(vocabulary, token_id, logprob) for token_id, logprob in token.top]
        return {**self._token_entry(vocabulary, token.token_id, token.logprob), "top_logprobs": top}

    def _token_entry(self, vocabulary: Vocabulary, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name_token(vocabulary, token_id),
            "logprob": max(logprob, -9999.0),
            "bytes": list(vocabulary.token_bytes(token_id)),
        }


def prompt_logprobs(vocabulary: Vocabulary, tokens: Sequence[TokenLogprobs | None]) -> list[Any]:
    """Likely tokens at each position of a prompt, in vLLM's format; None for the first position."""
    return [
        token and _likely_tokens(vocabulary, {**dict(token.top), token.token_id: token.logprob})
        for token in tokens
    ]


def _likely_tokens(vocabulary: Vocabulary, logprobs: Mapping[int, float]) -> dict[str, Any]:
    return {
        str(token_id): {"logprob": max(logprob, -9999.0), "decoded_token": vocabulary.token_text(token_id)}
        for token_id, logprob in logprobs.items()
    }


class CompletionSerializer:
    """Response format of completions."""

    id_prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def __init__(self, tokens_as_ids: bool = False) -> None:
        self._name_token = _name_as_id if tokens_as_ids else _name

    def plain(self, index: int) -> tuple[bytes, bytes]:
        return b'{"index":%d,"text":"' % index, b'","logprobs":null,"finish_reason":null}'

    def text_choice(
        self, index: int, text: str, finish: str | None, logprobs: Any, first: bool
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def piece_choice(self, index: int, piece: Piece, first: bool) -> dict[str, Any]:
        assert isinstance(piece, Content), "completions have no parsers"
        return self.text_choice(index, piece.text, None, None, first)

    def whole_choice(self, choice: WholeChoice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.text,
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish,
            **choice.extra,
        }

    def logprobs(self, vocabulary: Vocabulary, tokens: Sequence[PlacedToken], offset: int) -> Any:
        known = [token.logprobs for token in tokens]
        return {
            "tokens": [self._name_token(vocabulary, token.token_id) for token in tokens],
            "token_logprobs": [each and max(each.logprob, -9999.0) for each in known],
            "top_logprobs": [each and self._top(vocabulary, each) for each in known],
            "text_offset": [offset + token.start for token in tokens],
        }

    def _top(self, vocabulary: Vocabulary, token: TokenLogprobs) -> dict[str, float]:
        return {
            self._name_token(vocabulary, token_id): max(logprob, -9999.0) for token_id, logprob in token.top
        }


ResponseSerializer = ChatSerializer | CompletionSerializer


def _name(vocabulary: Vocabulary, token_id: int) -> str:
    """Text of a token; incomplete characters as bytes, like OpenAI's API, because their texts would be equal."""
    text = vocabulary.token_text(token_id)
    if "\ufffd" not in text:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in vocabulary.token_bytes(token_id))


def _name_as_id(vocabulary: Vocabulary, token_id: int) -> str:
    """Token with `return_tokens_as_token_ids`, in vLLM's format."""
    return f"token_id:{token_id}"
