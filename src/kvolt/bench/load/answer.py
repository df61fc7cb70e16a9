"""Reader of a streamed response: content, usage and token times, from bytes and their arrival times. Pure.

Almost all events of a response differ only in their text. An event with text is decoded and its bytes before and after
the text are kept as a template; events that match the template count as tokens without decoding. Other events (role,
finish reason, usage, error) are decoded, and the next event with text gives a new template. If every event differs,
this is still correct but slower. A body piece that is exactly one event is matched directly; others are split first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgspec

from kvolt.core.errors import ProtocolError
from kvolt.runtime.http.sse import DONE, EventReader

_MAX_MESSAGE_CHARS = 300
_TEXT = re.compile(rb'"(?:content|text|reasoning_content|reasoning)"\s*:\s*"(?:[^"\\]|\\.)+"')
_TEXT_HEAD = re.compile(rb'"\w+"\s*:\s*"')
_QUOTE = ord('"')
_LEAD, _BLANK_LINE = b"data: ", b"\n\n"

OnGap = Callable[[float, int], None]
"""Called with a gap in seconds and its number of occurrences."""


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


class ReportedUsage(msgspec.Struct):
    """Token counts of the server."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: ReportedUsage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Error(msgspec.Struct):
    message: str | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


class AnswerReader:
    """Reads one response. Gaps between events with text go to `on_gap`, in seconds."""

    __slots__ = (
        "_after", "_before", "_keep_text", "_least", "_on_gap", "_scanner", "_texts", "done", "error",
        "finish_reason", "first_s", "last_s", "max_gap_s", "num_events", "second_s", "usage",
    )  # fmt: skip

    def __init__(self, on_gap: OnGap, keep_text: bool = False) -> None:
        self._on_gap = on_gap
        self._keep_text = keep_text
        self._scanner = EventReader()
        self._texts: list[str] = []
        self._before: bytes | None = None
        """Template: bytes of an event before and after its text."""
        self._after = b""
        self._least = 0
        """Length of the template without text."""
        self.num_events = 0
        """Events with generated content."""
        self.first_s = self.second_s = self.last_s = 0.0
        """Arrival times of the first, second and last event with content, if there are so many."""
        self.max_gap_s = 0.0
        self.usage: ReportedUsage | None = None
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False

    def feed(self, pieces: list[bytes], now: float) -> None:
        """Process pieces of the body that arrived together. Raises ProtocolError for an invalid response."""
        scanner = self._scanner
        if len(pieces) == 1 and self.num_events and not scanner.tail and self._is_token(pieces[0]):
            self._count_one(now)
            return
        num_tokens = 0
        for piece in pieces:
            if not scanner.tail and self._is_token(piece):
                num_tokens += 1
                continue
            if num_tokens:
                self._count(num_tokens, now)
                num_tokens = 0
            for data in scanner.feed(piece):
                self._event(data, now)
        if num_tokens:
            self._count(num_tokens, now)

    def end(self, now: float) -> None:
        """Process the end of the body; it completes an unterminated last event."""
        for data in self._scanner.end():
            self._event(data, now)

    @property
    def text(self) -> str:
        """Response text without reasoning, if text is kept."""
        return "".join(self._texts)

    @property
    def is_complete(self) -> bool:
        """Whether the stream ended with a finish reason or [DONE]."""
        return self.done or self.finish_reason is not None

    def _is_token(self, event: bytes) -> bool:
        """Whether these bytes are one event that matches the template with a non-empty text."""
        before = self._before
        return (
            before is not None
            and event.startswith(before)
            and event.endswith(self._after)
            and len(event) > self._least
            and event[len(before)] != _QUOTE
            and event.find(b"\n", len(before)) == len(event) - 2
        )

    def _event(self, data: bytes, now: float) -> None:
        if self._is_token(_LEAD + data + _BLANK_LINE):
            self._count(1, now)
        elif data == DONE:
            self.done = True
        else:
            self._decoded(data, now)

    def _decoded(self, data: bytes, now: float) -> None:
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"invalid response chunk: {error}", rule="sse json") from None
        if (error_body := bytes(chunk.error)) != b"null":
            self.error = error_message(error_body)
            return
        self.usage = chunk.usage or self.usage
        for choice in chunk.choices:
            self.finish_reason = choice.finish_reason or self.finish_reason
        if any(_says_something(choice) for choice in chunk.choices):
            self._count(1, now)
            if self._keep_text:
                self._texts += [_text(choice) for choice in chunk.choices]
            elif self.finish_reason is None:
                self._learn(data)

    def _count_one(self, now: float) -> None:
        """Fast path of `_count` for one event that is not the first."""
        gap = now - self.last_s
        self.last_s = now
        if self.num_events == 1:
            self.second_s = now
        self.num_events += 1
        if gap > self.max_gap_s:  # noqa: PLR1730 - max() costs three times this, for every token
            self.max_gap_s = gap
        self._on_gap(gap, 1)

    def _count(self, number: int, now: float) -> None:
        """Count events that arrived together."""
        before = self.num_events
        self.num_events = before + number
        if before:
            gap = now - self.last_s
            if gap > self.max_gap_s:  # noqa: PLR1730 - max() costs three times this, for every token
                self.max_gap_s = gap
            self._on_gap(gap, 1)
        else:
            self.first_s = now
        if number > 1:
            self._on_gap(0.0, number - 1)
        if before < 2 <= self.num_events:
            self.second_s = now
        self.last_s = now

    def _learn(self, data: bytes) -> None:
        match = _TEXT.search(data)
        if match is None:  # a tool call, a list of log probabilities: decoded each time
            self._before = None
            return
        head = _TEXT_HEAD.match(data, match.start())
        assert head is not None
        self._before = _LEAD + data[: head.end()]
        self._after = data[match.end() - 1 :] + _BLANK_LINE
        self._least = len(self._before) + len(self._after)


def error_message(body: bytes) -> str:
    """Error message of a server in one short line, from OpenAI's format or the plain body."""
    message: str | None = None
    for wanted in (_ErrorBody, _Error, str):
        try:
            decoded = msgspec.json.decode(body, type=wanted)
        except msgspec.MsgspecError:
            continue
        if isinstance(decoded, _ErrorBody):
            message = error_message(bytes(decoded.error))
        else:
            message = decoded.message if isinstance(decoded, _Error) else str(decoded)
        if message:
            break
    text = message or body.decode(errors="replace")
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
