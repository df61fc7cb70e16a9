"""Adapts vLLM's output parsers to TextParser.

vLLM's parsers use text and token ids, TextParser only text. Parsers look only for the ids of added tokens (`<think>`,
`<tool_call>`, special tokens), which are recovered from the text. Text between them gets the ids of encoding it
alone: approximately as many as the model produced, and otherwise meaningless. A marker that the model spelled with
ordinary tokens counts as that token; in vLLM it would not.

A whole response equals the joined streamed response of vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from kvolt.frontend.parsers.port import Content, Piece, Reasoning, ToolArguments, ToolStart, joined
from kvolt.frontend.processors.added_tokens import AddedTokenCutter, TokenCut

log = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]


class VllmParser:
    """TextParser over a vLLM `Parser`, with the state of one choice."""

    __slots__ = ("_calls", "_cutter", "_encode", "_failed", "_parser", "_prompt", "_request")

    def __init__(
        self, parser: Any, request: Any, prompt: Sequence[int], cutter: AddedTokenCutter, encode: Encode
    ) -> None:
        self._parser = parser
        self._request = request
        self._prompt: list[int] | None = list(prompt)
        """Passed once: vLLM determines from it whether the output starts inside reasoning."""
        self._cutter = cutter
        self._encode = encode
        self._calls: dict[int, int] = {}
        """Our call index by vLLM's, which need not start at 0."""
        self._failed = False

    @property
    def passes_all(self) -> bool:
        """Always False: unknown for vLLM's parsers."""
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
        return joined(pieces + self._parse(TokenCut("", None), is_last=True))

    def _parse(self, cut: TokenCut, is_last: bool = False) -> list[Piece]:
        if not self._failed:
            try:
                return self._parse_with_vllm(cut, is_last)
            except Exception:  # the response continues without the parser
                log.exception("vLLM parser failed; the rest of the response is not parsed")
                self._failed = True
        return [Content(cut.text)]

    def _parse_with_vllm(self, cut: TokenCut, is_last: bool) -> list[Piece]:
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
        """Pieces of a call. The name is sent complete and once; parsers may repeat it, or send empty arguments."""
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
