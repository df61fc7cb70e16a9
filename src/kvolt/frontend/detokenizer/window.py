"""Fallback for all other decoders (WordPiece, CTC, regular expressions, none): decodes a window of recent tokens.

The text of a token is the difference of decoding a window with and without it. The window starts a few tokens before
the tokens whose text was emitted last, so that effects at borders and at the start of a text occur in both decodings
and cancel out.

Limits: much slower than a known decoder, no token is plain, and all tokens are kept until the end. It is exact for
decoders that depend on a few neighbouring tokens. A decoder that revises the text of earlier tokens (a byte run that
becomes invalid as a whole), or depends on distant tokens, cannot be followed: emitted text stays. Text buffered until
the end is emitted as in batch decoding, as long as the text so far agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from kvolt.frontend.detokenizer.tokens import Tokens

_CONTEXT_TOKENS = 4

_EAGER_TOKENS = 16
"""Up to this many tokens without certain text are tried one by one; then only at twice as many, and so on, since an
endless run of incomplete characters would have quadratic cost."""


class NothingPlain(dict[int, bytes | None]):
    """No token has a text that is independent of the tokens around it."""

    def __missing__(self, token_id: int) -> bytes | None:
        return None


class WindowDecoding:
    def __init__(self, tokenizer: Tokenizer, tokens: Tokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self.plain_json = NothingPlain()

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()

    def token_text(self, token_id: int) -> str:
        if self._tokens.get(token_id) is None:
            return ""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, skip_special_tokens: bool) -> WindowDetokenizer:
        return WindowDetokenizer(self._tokenizer, self._tokens, skip_special_tokens)


@dataclass(slots=True, eq=False)
class WindowDetokenizer:
    """Keeps all tokens and text until `finish`."""

    _tokenizer: Tokenizer
    _tokens: Tokens
    _skips: bool
    _ids: list[int] = field(default_factory=list)
    _emitted: list[str] = field(default_factory=list)
    _num_emitted: int = 0
    """Tokens whose text was emitted."""
    _start: int = 0
    """Start of the window."""
    _known: str = ""
    """Text of the window's tokens whose text was emitted."""
    _try_at: int = 0
    clean: bool = False

    def feed(self, token_id: int) -> str:
        if self._tokens.decoder_input(token_id, self._skips) is None:
            return ""
        self._ids.append(token_id)
        if len(self._ids) < self._try_at:
            return ""
        window = self._decode(self._ids[self._start :])
        if len(window) <= len(self._known) or window[-1] == "\ufffd" or not window.startswith(self._known):
            num_held = len(self._ids) - self._num_emitted
            if num_held >= _EAGER_TOKENS:
                self._try_at = self._num_emitted + 2 * num_held
            return ""
        text = window[len(self._known) :]
        self._start = max(0, self._num_emitted - _CONTEXT_TOKENS)
        self._num_emitted, self._try_at = len(self._ids), 0
        self._known = self._decode(self._ids[self._start :])
        self._emitted.append(text)
        return text

    def finish(self) -> str:
        whole = self._decode(self._ids)
        emitted = "".join(self._emitted)
        if whole.startswith(emitted):
            text = whole[len(emitted) :]
        else:
            window = self._decode(self._ids[self._start :])
            text = window[len(self._known) :] if window.startswith(self._known) else ""
        self._emitted.append(text)
        self._start = self._num_emitted = len(self._ids)
        self._known = ""
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:  # some of the library's decoders panic on an empty sequence
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
