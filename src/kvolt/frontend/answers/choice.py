"""One choice of an answer: converts token ids to client output. Pure.

Pipeline: detokenizer (buffers incomplete characters), stop strings (buffers a possible match), then reasoning and tool
call parsers. Log probabilities are released with their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.frontend.answers.stops import StopMatcher
from kvolt.frontend.detokenizer.detokenizer import Detokenizer
from kvolt.frontend.detokenizer.tokens import PlacedToken
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, TextParser, ToolStart


class ChoiceOutput(NamedTuple):
    """Output produced by one token or by the end of the choice."""

    pieces: Sequence[Piece] = ()
    logprobs: Sequence[PlacedToken] = ()


NO_OUTPUT = ChoiceOutput()


class Choice:
    """Output state of one choice. `finish` is set by the worker or by a stop string."""

    __slots__ = (
        "_detokenizer",
        "_fed",
        "_include_stop",
        "_min_tokens",
        "_parser",
        "_sent",
        "_stops",
        "_waiting",
        "finish",
        "num_reasoning_tokens",
        "num_tokens",
        "num_tool_calls",
        "stop_reason",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopMatcher | None = None,
        parser: TextParser | None = None,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._parser = parser
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        """Stop strings are ignored until this many tokens."""
        self._fed = 0
        """Characters output by the detokenizer."""
        self._sent = 0
        """Characters passed on after stop string matching."""
        self._waiting: deque[PlacedToken] = deque()
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_tool_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether the text depends only on the detokenizer."""
        return self._stops is None and self._parser is None

    @property
    def is_clean(self) -> bool:
        """Whether the next plain token's vocabulary text can be sent unchanged at once."""
        return (
            self._stops is None and self._parser is None and self.finish is None and self._detokenizer.clean
        )

    def hides_last(self, delta: Delta) -> bool:
        """Whether the last token of a delta is a stop token: counted, but not part of the text."""
        return delta.finish is FinishReason.STOP and not self._include_stop

    def feed(self, token_id: int, logprobs: TokenLogprobs | None = None) -> ChoiceOutput:
        """Process one token. Ignored after the end."""
        if self.finish is not None:
            return NO_OUTPUT
        self.num_tokens += 1
        if logprobs is not None:
            self._waiting.append(PlacedToken(self._fed, token_id, logprobs))
        text = self._detokenizer.feed(token_id)
        return self._process_text(text) if text or self._waiting else NO_OUTPUT

    def feed_delta(self, delta: Delta) -> list[ChoiceOutput]:
        """Process a delta: one output per token, and one more if it ends the choice."""
        tokens = delta.token_ids
        logprobs = delta.logprobs or ()
        ended_by_token = self.hides_last(delta)
        outputs: list[ChoiceOutput] = []
        for position, token_id in enumerate(tokens):
            if self.finish is not None:
                break
            if ended_by_token and position == len(tokens) - 1:
                self.num_tokens += 1
                break
            outputs.append(self.feed(token_id, logprobs[position] if position < len(logprobs) else None))
        if delta.finish is not None and self.finish is None:
            outputs.append(self._end(delta.finish, delta.stop_reason))
        return outputs

    def feed_whole(self, text: str, num_tokens: int, delta: Delta) -> ChoiceOutput:
        """Process all tokens of a plain choice at once: their text and the last delta."""
        assert self.is_plain
        self.num_tokens += num_tokens
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        return ChoiceOutput((Content(text),)) if text else NO_OUTPUT

    def _process_text(self, text: str, last: bool = False) -> ChoiceOutput:
        self._fed += len(text)
        stops = self._stops if self.num_tokens > self._min_tokens else None
        if stops is not None:
            text = stops.feed(text)
            if last and stops.matched is None:
                text += stops.finish()
        self._sent += len(text)
        pieces: Sequence[Piece] = self._parse(text) if text else ()
        if stops is not None and stops.matched is not None:
            self.finish = FinishReason.STOP
            self.stop_reason = stops.matched
            pieces = [*pieces, *self._parse_end()]
        return ChoiceOutput(pieces, self._release_logprobs() if self._waiting else ())

    def _end(self, finish: FinishReason, stop_reason: int | str | None) -> ChoiceOutput:
        outputs = self._process_text(self._detokenizer.finish(), last=True)
        if self.finish is not None:
            return outputs  # text buffered by the detokenizer completed a stop string
        self.finish = finish
        self.stop_reason = stop_reason
        return ChoiceOutput([*outputs.pieces, *self._parse_end()], outputs.logprobs)

    def _parse(self, text: str) -> Sequence[Piece]:
        if self._parser is None:
            return (Content(text),)
        parser = self._parser
        pieces = self._count(parser.feed(text))
        if parser.passes_all:
            self._parser = None  # the remaining text is plain content
        return pieces

    def _parse_end(self) -> Sequence[Piece]:
        return self._count(self._parser.finish()) if self._parser is not None else ()

    def _count(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            if isinstance(piece, ToolStart):
                self.num_tool_calls += 1
            elif isinstance(piece, Reasoning):
                self.num_reasoning_tokens = self.num_tokens  # reasoning comes first
        return pieces

    def _release_logprobs(self) -> list[PlacedToken]:
        """Log probabilities whose text has been output, at least partly. Those of a removed stop string are dropped."""
        stops = self._stops
        is_held = stops is not None and (stops.num_held > 0 or stops.matched is not None)
        out: list[PlacedToken] = []
        while self._waiting and (self._waiting[0].start < self._sent or not is_held):
            out.append(self._waiting.popleft())
        return out


class PromptOnlyChoice(Choice):
    """A choice whose tokens are dropped."""

    __slots__ = ()

    is_plain = False
    is_clean = False

    def feed_delta(self, delta: Delta) -> list[ChoiceOutput]:
        if delta.finish is None or self.finish is not None:
            return []
        self.finish = FinishReason.LENGTH
        return [NO_OUTPUT]


def place_prompt_tokens(
    detokenizer: Detokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[PlacedToken]:
    """Tokens of an echoed prompt with their offsets. The first has no log probability."""
    placed: list[PlacedToken] = []
    start = 0
    for token_id, known in zip(token_ids, logprobs, strict=False):
        placed.append(PlacedToken(start, token_id, known))
        start += len(detokenizer.feed(token_id))
    return placed
