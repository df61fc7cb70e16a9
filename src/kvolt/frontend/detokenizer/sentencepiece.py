"""SentencePiece-style vocabularies (Llama 2, Mistral, Gemma, T5): tokens are text with a marker for spaces.

Context-dependent cases:
- the space before the first word is not part of the text;
- characters outside the vocabulary are runs of byte tokens. The library decodes a run as a whole: valid UTF-8, or one
  U+FFFD per byte. So no text of a valid run is certain before its end, and all text of an invalid one is certain as
  soon as it is invalid.
"""

from __future__ import annotations

import re
from codecs import utf_8_decode
from dataclasses import dataclass
from typing import Any

import msgspec

from kvolt.frontend.detokenizer.tokens import Tokens, TokenTable, json_escaped

_BYTE_TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")
"""A sign is allowed: Rust's number parser accepts it."""


class Replacement(msgspec.Struct, frozen=True):
    """String replacement in every token, possibly different in the first one."""

    pattern: str
    content: str
    first_content: str


class SentencePieceRules(msgspec.Struct, frozen=True):
    """Decoder: replacements in each token, then byte tokens, then a strip at the start of the text."""

    replacements: tuple[Replacement, ...] = ()
    byte_fallback: bool = False
    strip: str = ""
    num_strip: int = 0

    def piece(self, token: str, first: bool = False) -> str | int:
        """Text of a token, or its byte."""
        for replacement in self.replacements:
            content = replacement.first_content if first else replacement.content
            token = token.replace(replacement.pattern, content)
        byte_match = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        return int(byte_match[1], 16) if byte_match else token


def read_rules(steps: list[dict[str, Any]]) -> SentencePieceRules | None:
    """Rules of a chain of decoders; None if it is not of this kind.

    Supported: any number of Replace and Metaspace, then optionally ByteFallback, Fuse, and one Strip of the start
    after Fuse, in this order. Fuse alone has no effect.
    """
    rest = list(steps)
    replacements = []
    while rest and (replacement := _read_replacement(rest[0])) is not None:
        replacements.append(replacement)
        del rest[0]
    byte_fallback = bool(rest) and rest[0]["type"] == "ByteFallback"
    del rest[: int(byte_fallback)]
    fuse = bool(rest) and rest[0]["type"] == "Fuse"
    del rest[: int(fuse)]
    rules = SentencePieceRules(replacements=tuple(replacements), byte_fallback=byte_fallback)
    if not rest:
        return rules
    strip = rest[0]
    if len(rest) > 1 or not fuse or strip["type"] != "Strip" or strip["stop"] > 0:
        return None
    return msgspec.structs.replace(rules, strip=strip["content"], num_strip=strip["start"])


def _read_replacement(step: dict[str, Any]) -> Replacement | None:
    if step["type"] == "Metaspace":
        first = " " if step["prepend_scheme"] == "never" else ""
        return Replacement(step["replacement"], " ", first)
    if step["type"] == "Replace" and step["pattern"].get("String"):
        return Replacement(step["pattern"]["String"], step["content"], step["content"])
    return None


class SentencePieceDecoding:
    """Tables shared by all detokenizers of a vocabulary."""

    def __init__(self, tokens: Tokens, rules: SentencePieceRules) -> None:
        self._tokens = tokens
        self._rules = rules
        self.plain_json = TokenTable[bytes | None](tokens, self._plain_json, b"", True)
        self._pieces = {
            skip: TokenTable[str | int | None](tokens, rules.piece, None, skip) for skip in (True, False)
        }

    def token_bytes(self, token_id: int) -> bytes:
        token = self._tokens.get(token_id)
        if token is None:
            return b""
        piece = self._rules.piece(token)
        return bytes((piece,)) if isinstance(piece, int) else piece.encode()

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def detokenizer(self, skip_special_tokens: bool) -> SentencePieceDetokenizer:
        pieces = self._pieces[skip_special_tokens]
        return SentencePieceDetokenizer(
            self._tokens, self._rules, pieces, skip_special_tokens, self._rules.num_strip
        )

    def _plain_json(self, token: str) -> bytes | None:
        piece = self._rules.piece(token)
        return None if isinstance(piece, int) else json_escaped(piece)


@dataclass(slots=True, eq=False)
class SentencePieceDetokenizer:
    """Buffers a run of byte tokens until it ends or is invalid."""

    _tokens: Tokens
    _rules: SentencePieceRules
    _pieces: TokenTable[str | int | None]
    """None for tokens that the decoder does not get; they do not end a run either."""
    _skips: bool
    _num_strip: int
    _first: bool = True
    _run: _ByteRun | None = None
    _settled: bool = False
    """After the start of the text and outside a run of bytes."""
    clean: bool = False

    def feed(self, token_id: int) -> str:
        piece = self._pieces[token_id]
        if self._settled and type(piece) is str:
            return piece
        if piece is None:
            return ""
        if self._first:
            piece = self._rules.piece(self._tokens.get(token_id) or "", first=True)
            self._first = False
        run = self._run
        if isinstance(piece, int):
            if run is None:
                run = self._run = _ByteRun()
            return self._strip_start(run.add(piece))
        self._run = None
        return self._strip_start(piece if run is None else run.end() + piece)

    def finish(self) -> str:
        run, self._run = self._run, None
        return self._strip_start("" if run is None else run.end())

    def _strip_start(self, text: str) -> str:
        """Strip the start of the text; updates whether the start is complete."""
        while self._num_strip and text:
            if text[0] == self._rules.strip:
                text = text[1:]
                self._num_strip -= 1
            else:
                self._num_strip = 0
        self._settled = self._run is None and not self._num_strip and not self._first
        self.clean = self._settled and self._skips
        return text


class _ByteRun:
    """A run of byte tokens; the cost per byte does not depend on its length."""

    __slots__ = ("_broken", "_num_bytes", "_tail", "_texts")

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tail = b""
        self._num_bytes = 0
        self._broken = False

    def add(self, byte: int) -> str:
        """Add a byte; returns the text that is certain: "" unless the run is invalid UTF-8."""
        if self._broken:
            return "\ufffd"
        self._num_bytes += 1
        self._tail += bytes((byte,))
        try:
            text, num_used = utf_8_decode(self._tail, "strict", False)
        except UnicodeDecodeError:
            self._broken = True
            return "\ufffd" * self._num_bytes
        self._texts.append(text)
        self._tail = self._tail[num_used:]
        return ""

    def end(self) -> str:
        if self._broken:
            return ""
        return "\ufffd" * self._num_bytes if self._tail else "".join(self._texts)
