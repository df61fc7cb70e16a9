"""Any other decoder (WordPiece, CTC, regular expressions, none at all): decode a few tokens again and again.

The text of a token is what a window of tokens says more when the token is added to it. The window
begins a few tokens before those whose text was given out last, so that what a decoder does at a border
or at the start of a text is in both decodings and cancels out.

Limits. This is slower by far than knowing the decoder, no token is plain, and the answer's tokens are kept
until its end. It is exact for decoders that look at a few neighbours of a token. One that takes back what it
said of earlier tokens (a byte run that becomes invalid as a whole), or whose text depends on tokens far
away, cannot be followed: what was given out stays. What is held back at the end comes as batch decoding
says it, as long as the text so far agrees.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from kvolt.frontend.detokenizer.tokens import Tokens

_CONTEXT_TOKENS = 4

_EAGER_TOKENS = 16
"""So many tokens without certain text are tried one by one; then only at twice as many, and so on, or an
endless row of half characters would cost its square."""


class NothingPlain(dict[int, bytes | None]):
    """No token's text is known without its neighbours."""

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


class WindowDetokenizer:
    """Keeps the answer's tokens and text until `finish`."""

    __slots__ = (
        "_given",
        "_ids",
        "_known",
        "_num_given",
        "_skips",
        "_start",
        "_tokenizer",
        "_tokens",
        "_try_at",
        "clean",
    )

    def __init__(self, tokenizer: Tokenizer, tokens: Tokens, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._skips = skip_special_tokens
        self._ids: list[int] = []
        self._given: list[str] = []
        self._num_given = 0
        """Tokens whose text is given out."""
        self._start = 0
        """Of the window."""
        self._known = ""
        """What those of its tokens say whose text is given out."""
        self._try_at = 0
        self.clean = False

    def feed(self, token_id: int) -> str:
        if self._tokens.seen(token_id, self._skips) is None:
            return ""
        self._ids.append(token_id)
        if len(self._ids) < self._try_at:
            return ""
        window = self._decode(self._ids[self._start :])
        if len(window) <= len(self._known) or window[-1] == "\ufffd" or not window.startswith(self._known):
            num_held = len(self._ids) - self._num_given
            if num_held >= _EAGER_TOKENS:
                self._try_at = self._num_given + 2 * num_held
            return ""
        text = window[len(self._known) :]
        self._start = max(0, self._num_given - _CONTEXT_TOKENS)
        self._num_given, self._try_at = len(self._ids), 0
        self._known = self._decode(self._ids[self._start :])
        self._given.append(text)
        return text

    def finish(self) -> str:
        whole = self._decode(self._ids)
        given = "".join(self._given)
        if whole.startswith(given):
            text = whole[len(given) :]
        else:
            window = self._decode(self._ids[self._start :])
            text = window[len(self._known) :] if window.startswith(self._known) else ""
        self._given.append(text)
        self._start = self._num_given = len(self._ids)
        self._known = ""
        return text

    def _decode(self, token_ids: Sequence[int]) -> str:
        if not token_ids:  # some of the library's decoders panic on nothing
            return ""
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skips)
