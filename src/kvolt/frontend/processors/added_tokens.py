"""Splits text at added tokens such as `<think>` or `<tool_call>`, to recover their ids.

A tokenizer matches added tokens before all else, so an occurrence in the output was that token (or was spelled by the
model in pieces, which has the same meaning). Pure; the result does not depend on how the text is split.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer

from kvolt.frontend.tokenization.token_cache import longest_of


class TokenCut(NamedTuple):
    """A section of text: an added token, or the text between two of them."""

    text: str
    token_id: int | None


class AddedTokens:
    """Added tokens of one vocabulary; each response has its own `cutter`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.ids = {token.content: token_id for token_id, token in added.items() if token.content}
        self.pattern = re.compile(longest_of(self.ids)) if self.ids else None
        self.heads = {text[:end] for text in self.ids for end in range(1, len(text))}
        """Prefixes of added tokens."""
        self.longest_head = max(map(len, self.heads), default=0)

    def cutter(self) -> AddedTokenCutter:
        return AddedTokenCutter(self)


class AddedTokenCutter:
    """Buffers a possible beginning of an added token: at most the length of the longest one."""

    __slots__ = ("_added", "_held")

    def __init__(self, added: AddedTokens) -> None:
        self._added = added
        self._held = ""

    def feed(self, text: str) -> list[TokenCut]:
        return self._cuts(self._held + text, may_grow=True)

    def finish(self) -> list[TokenCut]:
        return self._cuts(self._held, may_grow=False)

    def _cuts(self, text: str, may_grow: bool) -> list[TokenCut]:
        pattern = self._added.pattern
        cuts: list[TokenCut] = []
        position = 0
        certain_end = self._first_head(text, 0) if may_grow else len(text)
        while (
            pattern is not None
            and (token_match := pattern.search(text, position))
            and token_match.start() < certain_end
        ):
            if token_match.start() > position:
                cuts.append(TokenCut(text[position : token_match.start()], None))
            cuts.append(TokenCut(token_match[0], self._added.ids[token_match[0]]))
            position = token_match.end()
            if position > certain_end:  # this token covers the possible beginning inside it
                certain_end = self._first_head(text, position)
        if certain_end > position:
            cuts.append(TokenCut(text[position:certain_end], None))
        self._held = text[certain_end:]
        return cuts

    def _first_head(self, text: str, start: int) -> int:
        """Start of the text's end that may become a token; the text's length if there is none."""
        heads = self._added.heads
        first = max(len(text) - self._added.longest_head, start)
        return next((at for at in range(first, len(text)) if text[at:] in heads), len(text))
