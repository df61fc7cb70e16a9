"""What a streamed answer says, from its events and the times at which they came. Pure.

Almost all events of an answer differ in their text only. So one that has text is decoded and its bytes before and
after the text are kept; while events look the same around it, they are tokens and nothing is decoded. Whatever looks
different (a role, a finish reason, usage, an error) is decoded, and the next one with text is learned anew. Where
a server makes every event different, this is right all the same, only slower.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from kvolt.core.errors import ProtocolError

DONE = b"[DONE]"
_MAX_MESSAGE_CHARS = 300
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)"\s*:\s*"(?:[^"\\]|\\.)+"')
_TEXT_HEAD = re.compile(rb'"\w+"\s*:\s*"')
_QUOTE = ord('"')


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """The server's own count."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    message: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class AnswerReader:
    """One answer as it comes. Gaps between events with text go to `on_gap`, in seconds."""

    __slots__ = (
        "_after", "_before", "_keep_text", "_least", "_on_gap", "_texts", "done", "error", "finish_reason", "first_s",
        "last_s", "max_gap_s", "num_events", "second_s", "usage",
    )  # fmt: skip

    def __init__(self, on_gap: Callable[[float], None], keep_text: bool = False) -> None:
        self._on_gap = on_gap
        self._keep_text = keep_text
        self._texts: list[str] = []
        self._before: bytes | None = None
        self._after = b""
        self._least = 0
        self.num_events = 0
        """With text, or with anything else that was generated."""
        self.first_s = self.second_s = self.last_s = 0.0
        """When the first, the second and the last of them came; meaningless where there are not so many."""
        self.max_gap_s = 0.0
        self.usage: Usage | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False

    def event(self, data: bytes, now: float) -> None:
        before = self._before
        if (
            before is not None
            and data.startswith(before)
            and data.endswith(self._after)
            and len(data) > self._least
            and data[len(before)] != _QUOTE
        ):
            gap = now - self.last_s
            self.last_s = now
            self.num_events += 1
            if gap > self.max_gap_s:  # noqa: PLR1730 - max() costs three times this, for every token
                self.max_gap_s = gap
            if self.num_events == 2:
                self.second_s = now
            self._on_gap(gap)
            return
        self._decoded(data, now)

    @property
    def text(self) -> str:
        """What was answered, where that is kept; thoughts are no part of it."""
        return "".join(self._texts)

    @property
    def whole(self) -> bool:
        """Whether the stream said that this is all."""
        return self.done or self.finish_reason is not None

    def _decoded(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.done = True
            return
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"an event is no chunk of an answer: {error}", rule="sse json") from None
        if (error_body := bytes(chunk.error)) != b"null":
            self.error = error_message(error_body)
            return
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        if any(_says_something(choice) for choice in chunk.choices):
            self._count(now)
            if self._keep_text:
                self._texts += [_text(choice) for choice in chunk.choices]
            elif self.finish_reason is None:
                self._learn(data)

    def _count(self, now: float) -> None:
        self.num_events += 1
        if self.num_events == 1:
            self.first_s = now
        else:
            gap = now - self.last_s
            self.max_gap_s = max(self.max_gap_s, gap)
            self._on_gap(gap)
            if self.num_events == 2:
                self.second_s = now
        self.last_s = now

    def _learn(self, data: bytes) -> None:
        found = _TEXT.search(data)
        if found is None:  # a tool call, a list of log probabilities: decoded each time
            self._before = None
            return
        head = _TEXT_HEAD.match(data, found.start())
        assert head is not None
        self._before, self._after = data[: head.end()], data[found.end() - 1 :]
        self._least = len(self._before) + len(self._after)


def error_message(body: bytes) -> str:
    """What an error of a server says, in one short line: OpenAI's form, or whatever came."""
    found: str | None = None
    for wanted in (_ErrorBody, _Error, str):
        try:
            decoded = msgspec.json.decode(body, type=wanted)
        except msgspec.MsgspecError:
            continue
        if isinstance(decoded, _ErrorBody):
            found = error_message(bytes(decoded.error))
        else:
            found = decoded.message if isinstance(decoded, _Error) else str(decoded)
        if found:
            break
    text = found or body.decode(errors="replace")
    return " ".join(text.split())[:_MAX_MESSAGE_CHARS]


class _ErrorBody(msgspec.Struct):
    error: msgspec.Raw


def _says_something(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and bool(
        delta.content or delta.reasoning_content or delta.reasoning or delta.refusal or delta.tool_calls
    )


def _text(choice: _Choice) -> str:
    return choice.text or (choice.delta.content if choice.delta is not None else None) or ""
