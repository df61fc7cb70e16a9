"""Parse responses of OpenAI-compatible servers: chat chunks and error bodies. Pure.

Differences between servers are normalized here to `Piece` and kvolt's errors.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from kvolt.core.errors import KvoltError, ProtocolError

_MESSAGE_LIMIT_CHARS = 500


class ChatUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class CallPiece(msgspec.Struct, frozen=True):
    """Delta of a tool call; calls are numbered from 0 in the order of their first delta."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Piece(msgspec.Struct, frozen=True):
    """Content of one stream event."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish: str | None = None
    usage: ChatUsage | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: ChatUsage | None = None


class ChunkReader:
    """Reader of the chunks of one answer; numbers tool calls if the server does not."""

    def __init__(self) -> None:
        self.finished = False
        self._last_call = -1

    def read(self, data: bytes) -> Piece:
        tree = read_json(data)
        if isinstance(tree, dict) and (tree.get("error") or tree.get("object") == "error"):
            raise KvoltError(f"server error: {error_message(tree, data)}")
        try:
            chunk = msgspec.convert(tree, _Chunk)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"invalid chat chunk: {error}", rule="chunk") from error
        choice = next((choice for choice in chunk.choices or () if choice.index == 0), _Choice())
        self.finished = self.finished or choice.finish_reason is not None
        delta = choice.delta or choice.message or _Delta()
        return Piece(
            content=(delta.content or "") + (delta.refusal or ""),
            reasoning=delta.reasoning_content or delta.reasoning or "",
            calls=tuple(self._call(call) for call in delta.tool_calls or ()),
            finish=choice.finish_reason,
            usage=chunk.usage,
        )

    def _call(self, call: _Call) -> CallPiece:
        function = call.function or _Function()
        if call.index is not None:
            self._last_call = call.index
        elif call.id or function.name or self._last_call < 0:  # the server does not number them
            self._last_call += 1
        return CallPiece(self._last_call, call.id or "", function.name or "", function.arguments or "")


def read_json(data: bytes) -> Any:
    try:
        return json.loads(data.decode(errors="replace"))
    except (ValueError, RecursionError) as error:
        shown = one_line(data[:80].decode(errors="replace"))
        raise ProtocolError(f"the server sent invalid JSON: {shown}", rule="json") from error


def error_message(tree: Any, data: bytes) -> str:
    """Message of an error body, from any of the usual fields; else the whole body."""
    for name in ("error", "message", "detail"):
        if isinstance(tree, dict) and tree.get(name):
            tree = tree[name]
    return one_line(tree if isinstance(tree, str) else data.decode(errors="replace"))


def one_line(text: str) -> str:
    """Untrusted text as a short printable line."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= _MESSAGE_LIMIT_CHARS else f"{line[: _MESSAGE_LIMIT_CHARS - 1]}…"
