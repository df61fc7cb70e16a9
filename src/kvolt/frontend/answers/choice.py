"""One choice of an answer: token ids in, what a client is told of them out. Pure.

The way of a token: detokenizer (half a character waits for its other half), stop strings (what could
become one waits), then the parsers of reasoning and tool calls. Log probabilities wait with their text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvolt.core.delta import Delta, FinishReason, TokenLogprobs
from kvolt.frontend.answers.stops import StopMatcher
from kvolt.frontend.detokenizer.detokenizer import Detokenizer
from kvolt.frontend.parsers.port import Content, Piece, Reasoning, TextParser, ToolStart


class Placed(NamedTuple):
    """A token, where its text begins in the text of its choice or prompt, and how likely it was, if known."""

    start: int
    token_id: int
    logprobs: TokenLogprobs | None


class Told(NamedTuple):
    """What came of one token, or of the end."""

    pieces: Sequence[Piece] = ()
    logprobs: Sequence[Placed] = ()


NOTHING = Told()


class Choice:
    """See the module. `finish` is set once the choice is over, by the worker or by a stop string."""

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
        """Before so many, a stop string is text like any other."""
        self._fed = 0
        """Characters that have left the detokenizer."""
        self._sent = 0
        """Of these, those that can be no part of a stop string."""
        self._waiting: deque[Placed] = deque()
        self.finish: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.num_tool_calls = 0

    @property
    def is_plain(self) -> bool:
        """Its text depends on nothing but the detokenizer."""
        return self._stops is None and self._parser is None

    @property
    def is_clean(self) -> bool:
        """The next plain token's text is what the vocabulary says, and can be told at once."""
        return (
            self._stops is None and self._parser is None and self.finish is None and self._detokenizer.clean
        )

    def hides_last(self, delta: Delta) -> bool:
        """Whether a delta's last token is the one that ended the choice: counted, not shown."""
        return delta.finish is FinishReason.STOP and not self._include_stop

    def feed(self, token_id: int, logprobs: TokenLogprobs | None = None) -> Told:
        """One token. Nothing comes of it after the end."""
        if self.finish is not None:
            return NOTHING
        self.num_tokens += 1
        if logprobs is not None:
            self._waiting.append(Placed(self._fed, token_id, logprobs))
        text = self._detokenizer.feed(token_id)
        return self._take(text) if text or self._waiting else NOTHING

    def feed_delta(self, delta: Delta) -> list[Told]:
        """All of a delta: one answer per token, and one for the end if it says so."""
        tokens = delta.token_ids
        logprobs = delta.logprobs or ()
        ended_by_token = self.hides_last(delta)
        told: list[Told] = []
        for position, token_id in enumerate(tokens):
            if self.finish is not None:
                break
            if ended_by_token and position == len(tokens) - 1:
                self.num_tokens += 1
                break
            told.append(self.feed(token_id, logprobs[position] if position < len(logprobs) else None))
        if delta.finish is not None and self.finish is None:
            told.append(self._end(delta.finish, delta.stop_reason))
        return told

    def feed_whole(self, text: str, num_tokens: int, delta: Delta) -> Told:
        """All tokens at once, for a choice that is plain: `text` is theirs, `delta` says how it ended."""
        assert self.is_plain
        self.num_tokens += num_tokens
        self.finish, self.stop_reason = delta.finish, delta.stop_reason
        return Told((Content(text),)) if text else NOTHING

    def _take(self, text: str, last: bool = False) -> Told:
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
        return Told(pieces, self._released() if self._waiting else ())

    def _end(self, finish: FinishReason, stop_reason: int | str | None) -> Told:
        told = self._take(self._detokenizer.finish(), last=True)
        if self.finish is not None:
            return told  # what the detokenizer held back completed a stop string
        self.finish = finish
        self.stop_reason = stop_reason
        return Told([*told.pieces, *self._parse_end()], told.logprobs)

    def _parse(self, text: str) -> Sequence[Piece]:
        if self._parser is None:
            return (Content(text),)
        parser = self._parser
        pieces = self._count(parser.feed(text))
        if parser.passes_all:
            self._parser = None  # it has nothing more to say
        return pieces

    def _parse_end(self) -> Sequence[Piece]:
        return self._count(self._parser.finish()) if self._parser is not None else ()

    def _count(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        for piece in pieces:
            if isinstance(piece, ToolStart):
                self.num_tool_calls += 1
            elif isinstance(piece, Reasoning):
                self.num_reasoning_tokens = self.num_tokens  # it comes first, so all so far were of it
        return pieces

    def _released(self) -> list[Placed]:
        """Those whose text is out, at least its beginning. What a stop string took away is never told."""
        stops = self._stops
        held = stops is not None and (stops.num_held > 0 or stops.matched is not None)
        out: list[Placed] = []
        while self._waiting and (self._waiting[0].start < self._sent or not held):
            out.append(self._waiting.popleft())
        return out


def placed_prompt(
    detokenizer: Detokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> list[Placed]:
    """The tokens of an echoed prompt. Nothing comes before the first, so it has no probability."""
    placed: list[Placed] = []
    start = 0
    for token_id, known in zip(token_ids, logprobs, strict=False):
        placed.append(Placed(start, token_id, known))
        start += len(detokenizer.feed(token_id))
    return placed
