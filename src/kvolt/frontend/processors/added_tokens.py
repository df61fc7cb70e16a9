"""Text cut at the tokens that a tokenizer was given by name, such as `<think>` or `<tool_call>`: their ids again.

A tokenizer takes these out of a text before all else, so wherever one is written in an answer it was that token (or
the model spelled it in pieces, which its author would call the same). Pure, and the same however the text comes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from tokenizers import Tokenizer

from kvolt.frontend.tokenization.token_cache import longest_of


class Cut(NamedTuple):
    """A stretch of text: an added token, or what lies between two of them."""

    text: str
    token_id: int | None


class AddedTokens:
    """Of one vocabulary; every answer has its own `cutter`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self.ids = {token.content: token_id for token_id, token in added.items() if token.content}
        self.pattern = re.compile(longest_of(self.ids)) if self.ids else None
        self.heads = {text[:end] for text in self.ids for end in range(1, len(text))}
        """What may become one of them, or a longer one."""
        self.longest_head = max(map(len, self.heads), default=0)

    def cutter(self) -> AddedTokenCutter:
        return AddedTokenCutter(self)


class AddedTokenCutter:
    """Holds back what may be the beginning of an added token: never more than the longest of them."""

    __slots__ = ("_added", "_held")

    def __init__(self, added: AddedTokens) -> None:
        self._added = added
        self._held = ""

    def feed(self, text: str) -> list[Cut]:
        return self._cuts(self._held + text, may_grow=True)

    def finish(self) -> list[Cut]:
        return self._cuts(self._held, may_grow=False)

    def _cuts(self, text: str, may_grow: bool) -> list[Cut]:
        pattern = self._added.pattern
        cuts: list[Cut] = []
        done = 0
        held = self._first_head(text, 0) if may_grow else len(text)
        while pattern is not None and (found := pattern.search(text, done)) and found.start() < held:
            if found.start() > done:
                cuts.append(Cut(text[done : found.start()], None))
            cuts.append(Cut(found[0], self._added.ids[found[0]]))
            done = found.end()
            if done > held:  # this token has taken the place of what seemed to begin inside it
                held = self._first_head(text, done)
        if held > done:
            cuts.append(Cut(text[done:held], None))
        self._held = text[held:]
        return cuts

    def _first_head(self, text: str, start: int) -> int:
        """Where the end of a text begins that may become a token; its length if there is no such place."""
        heads = self._added.heads
        first = max(len(text) - self._added.longest_head, start)
        return next((at for at in range(first, len(text)) if text[at:] in heads), len(text))
