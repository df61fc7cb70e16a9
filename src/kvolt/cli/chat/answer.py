"""One answer of a chat: its content, usage and timing. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvolt.cli.chat.stream import CallPiece, ChatUsage, Piece


@dataclass(slots=True)
class ChatToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(slots=True)
class ChatAnswer:
    """A streamed answer with the arrival times of its pieces, in seconds of one clock."""

    sent_at: float
    first_at: float | None = None
    last_at: float | None = None
    finish: str | None = None
    usage: ChatUsage | None = None
    num_pieces: int = 0
    calls: dict[int, ChatToolCall] = field(default_factory=dict)
    _content: list[str] = field(default_factory=list)

    @property
    def content(self) -> str:
        return sendable("".join(self._content))

    @property
    def is_empty(self) -> bool:
        return not self._content and not self.calls

    def add(self, piece: Piece, now: float) -> None:
        if piece.content or piece.reasoning or piece.calls:
            self.num_pieces += 1
            self.first_at = now if self.first_at is None else self.first_at
            self.last_at = now
        if piece.content:
            self._content.append(piece.content)
        for part in piece.calls:
            self._add_call(part)
        self.finish = piece.finish or self.finish
        self.usage = piece.usage or self.usage

    def _add_call(self, part: CallPiece) -> None:
        call = self.calls.setdefault(part.index, ChatToolCall(id=f"call_{part.index}"))
        call.id = part.id or call.id
        call.name += part.name
        call.arguments += part.arguments

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.sent_at

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token."""
        if (
            self.usage is None
            or self.first_at is None
            or self.last_at is None
            or self.last_at <= self.first_at
        ):
            return None
        return max(self.usage.completion_tokens - 1, 0) / (self.last_at - self.first_at)

    def summary(self) -> str:
        """One line: tokens, speed, latency."""
        if self.usage is not None:
            parts = [counted(self.usage.completion_tokens, "token")]
        else:  # the server sends no usage, or the answer was stopped
            parts = [counted(self.num_pieces, "piece")]
        if self.tokens_per_s:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.first_token_s is not None:
            parts.append(f"first token after {self.first_token_s:.2f} s")
        if self.usage is not None:
            parts.append(f"prompt {counted(self.usage.prompt_tokens, 'token')}")
        if self.finish == "length":
            parts.append("cut at the token limit (/set max_tokens N)")
        return ", ".join(parts)


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def sendable(text: str) -> str:
    """Replace characters that cannot be encoded as UTF-8, such as lone surrogates."""
    return text.encode(errors="replace").decode()
