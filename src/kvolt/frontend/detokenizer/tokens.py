"""Tokens by id as used in batch decoding, and lazily filled tables over them.

A vocabulary has up to a quarter of a million tokens, of which an answer uses a few thousand, so values are computed
on lookup. Tables are bounded by the vocabulary: unknown ids are not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import msgspec
from tokenizers import Tokenizer

from kvolt.core.delta import TokenLogprobs

V = TypeVar("V")

_encode_json = msgspec.json.encode


def json_escaped(text: str) -> bytes:
    """Contents of a JSON string, without the quotes."""
    return _encode_json(text)[1:-1]


class Tokens:
    """Token strings of a tokenizer, before decoding."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._id_to_token = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._special = frozenset(token.content for token in added.values() if token.special)

    def get(self, token_id: int) -> str | None:
        """Token string; None for an unknown id, whatever its size or sign."""
        try:
            return self._id_to_token(token_id)
        except OverflowError:
            return None

    def is_special(self, token: str) -> bool:
        """Whether a token is special; by its string, as in the library, not by its id."""
        return token in self._special

    def decoder_input(self, token_id: int, skip_special: bool) -> str | None:
        """Token string that the decoder gets; None if it is dropped."""
        token = self.get(token_id)
        if token is None or (skip_special and token in self._special):
            return None
        return token


class TokenTable(dict[int, V]):
    """Values by token id; `absent` for tokens that the decoder does not get.

    A dict instead of a list: one C lookup for known tokens, and no cost for others.
    """

    __slots__ = ("_absent", "_compute", "_skip_special", "_tokens")

    def __init__(self, tokens: Tokens, compute: Callable[[str], V], absent: V, skip_special: bool) -> None:
        self._tokens = tokens
        self._compute = compute
        self._absent = absent
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> V:
        token = self._tokens.get(token_id)
        if token is None:
            return self._absent
        dropped = self._skip_special and self._tokens.is_special(token)
        value = self[token_id] = self._absent if dropped else self._compute(token)
        return value


class PlacedToken(NamedTuple):
    """A token with the offset of its text in the choice or prompt, and its log probabilities if known."""

    start: int
    token_id: int
    logprobs: TokenLogprobs | None
