"""Tokens by id as batch decoding looks them up, and tables over them that fill as tokens are met.

A vocabulary has up to a quarter of a million tokens and an answer uses a few thousand of them, so
nothing is worked out before it is asked for. Each table is bounded by the vocabulary: an id that names no
token is answered and not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

V = TypeVar("V")

_encode_json = msgspec.json.encode


def json_escaped(text: str) -> bytes:
    """What stands between the quotes of a JSON string."""
    return _encode_json(text)[1:-1]


class Tokens:
    """The token strings of a tokenizer. They are not text yet: that is the decoder's work."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._id_to_token = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = frozenset(token.content for token in added.values() if token.special)

    def get(self, token_id: int) -> str | None:
        """None for an id that names no token, whatever its size or sign."""
        try:
            return self._id_to_token(token_id)
        except OverflowError:
            return None

    def is_special(self, token: str) -> bool:
        """By its string, as the library does it, not by its id."""
        return token in self._special

    def seen(self, token_id: int, skip_special: bool) -> str | None:
        """The token as it reaches the decoder; None when it is dropped before."""
        token = self.get(token_id)
        if token is None or (skip_special and token in self._special):
            return None
        return token


class TokenTable(dict[int, V]):
    """Subscript with a token id; `absent` stands for tokens that the decoder never sees.

    A dict and not a list: one C lookup when the token was met before, and no cost for those never met.
    """

    __slots__ = ("_absent", "_skip_special", "_tokens", "_work_out")

    def __init__(self, tokens: Tokens, work_out: Callable[[str], V], absent: V, skip_special: bool) -> None:
        self._tokens = tokens
        self._work_out = work_out
        self._absent = absent
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> V:
        token = self._tokens.get(token_id)
        if token is None:
            return self._absent
        dropped = self._skip_special and self._tokens.is_special(token)
        value = self[token_id] = self._absent if dropped else self._work_out(token)
        return value
