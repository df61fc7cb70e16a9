"""vLLM's parsers of an answer as one of ours.

vLLM reads an answer by its text and its token ids, our port by text alone. Only the ids of added tokens (`<think>`,
`<tool_call>`, special ones) are looked for by parsers, and those are found in the text again, so each comes to the
parser with the id that it had. The text between them comes with the ids that encoding it by itself gives: as many as
the model wrote or a few more or less, and good for nothing but to be there. A marker that the model spelled out of
ordinary tokens counts as the token of that name; in vLLM it would not.

An answer that is asked for in one piece is what vLLM would have streamed, joined.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart, joined
from kvolt.frontend.processors.added_tokens import AddedTokenCutter, Cut

log = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]


class VllmParser:
    """A TextParser over one of vLLM's `Parser`, which has its state for one choice of an answer."""

    __slots__ = ("_calls", "_cutter", "_encode", "_failed", "_parser", "_prompt", "_request")

    def __init__(
        self, parser: Any, request: Any, prompt: Sequence[int], cutter: AddedTokenCutter, encode: Encode
    ) -> None:
        self._parser = parser
        self._request = request
        self._prompt: list[int] | None = list(prompt)
        """Told once: from it vLLM sees whether the answer begins inside reasoning."""
        self._cutter = cutter
        self._encode = encode
        self._calls: dict[int, int] = {}
        """Ours by vLLM's numbers, which need not begin with 0."""
        self._failed = False

    @property
    def passes_all(self) -> bool:
        """Which of vLLM's parsers would from now on is not known."""
        return False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for cut in self._cutter.feed(text):
            pieces += self._parse(cut)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        for cut in self._cutter.finish():
            pieces += self._parse(cut)
        return joined(pieces + self._parse(Cut("", None), is_last=True))

    def _parse(self, cut: Cut, is_last: bool = False) -> list[Piece]:
        if not self._failed:
            try:
                return self._told(cut, is_last)
            except Exception:  # whatever a parser does with what a model says: the answer goes on without it
                log.exception("vLLM's parser failed; the rest of the answer is told as it is")
                self._failed = True
        return [Content(cut.text)]

    def _told(self, cut: Cut, is_last: bool) -> list[Piece]:
        ids = [cut.token_id] if cut.token_id is not None else self._encode(cut.text) if cut.text else []
        prompt, self._prompt = self._prompt, None
        delta = self._parser.parse_delta(cut.text, ids, self._request, prompt, finished=is_last)
        if delta is None:
            return []
        pieces: list[Piece] = []
        if delta.reasoning:
            pieces.append(Reasoning(delta.reasoning))
        if delta.content:
            pieces.append(Content(delta.content))
        for call in delta.tool_calls or ():
            pieces += self._call(call)
        return pieces

    def _call(self, call: Any) -> list[Piece]:
        """The name comes whole and once; parsers may repeat it, or send arguments that are still empty."""
        function = call.function
        if function is None:
            return []
        pieces: list[Piece] = []
        if function.name and call.index not in self._calls:
            self._calls[call.index] = len(self._calls)
            pieces.append(ToolStart(self._calls[call.index], function.name))
        if function.arguments and call.index in self._calls:
            pieces.append(ToolArguments(self._calls[call.index], function.arguments))
        return pieces
