"""What is asked: prompts of wanted lengths as token ids, alone or as conversations. Pure, a function of the seed.

Everything is made of token ids; `bodies` sends them as they are or as words. Session number N is the same whatever was
asked before it, so two runs with one seed ask the same, in open and in closed loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import msgspec
import numpy as np

from kvolt.bench.traces.tokens import tokens_of
from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord

DEFAULT_VOCABULARY = (100, 900)
"""Ids that every model has and that are no special tokens."""

_KEPT_PREFIXES = 256
_U64 = (1 << 64) - 1
_SHARED, _OWN, _LENGTHS = range(3)
"""What a stream of random numbers is for: the first word of its seed after the user's."""


class Message(msgspec.Struct, frozen=True):
    """Said by us as token ids, or by the model as the text that came."""

    role: str
    content: Sequence[int] | str


class Ask(msgspec.Struct, frozen=True):
    """One request, before it has a form."""

    messages: tuple[Message, ...]
    input_tokens: int
    """By our count, without what a template adds; answers of the model count as they were asked for."""
    output_tokens: int


class Session(Protocol):
    """What one user asks, one after another."""

    @property
    def wants_text(self) -> bool:
        """Whether answers are asked about further, so that their text must be kept."""
        ...

    @property
    def think_s(self) -> float:
        """From an answer's end to the question that `next` gave last."""
        ...

    def next(self, answer: str | None) -> Ask | None:
        """The first ask for None, then the one after that answer; None when the session is over."""
        ...


class Workload(Protocol):
    """Sessions by number."""

    def session(self, number: int) -> Session | None:
        """None when there are no more."""
        ...


class Lengths(msgspec.Struct, frozen=True):
    """A number of tokens, drawn evenly from `low` to `high`."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return self.low if self.low == self.high else int(rng.integers(self.low, self.high + 1))


def parse_lengths(text: str, key: str) -> Lengths:
    """`512`, or `256-1024` for lengths between the two."""
    low, dash, high = text.partition("-")
    if low.strip().isdecimal() and (high.strip().isdecimal() or not dash):
        lengths = Lengths(int(low), int(high) if dash else int(low))
        if 1 <= lengths.low <= lengths.high:
            return lengths
    raise ConfigError(
        f"--{key} {text} is no length", key=key, remedy="write 512 or 256-1024 (tokens, at least 1)"
    )


class PromptShape(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic prompts: the same beginning for all (of a group), the rest of each its own."""

    input: Lengths
    output: Lengths
    shared_prefix: int = 0
    """Tokens, within the input length."""
    num_prefixes: int = 1
    """Groups with a prefix each; session N is of group N modulo this."""
    vocabulary: tuple[int, int] = DEFAULT_VOCABULARY

    def check(self) -> None:
        if not 0 <= self.shared_prefix <= self.input.low:
            raise ConfigError(
                f"--shared-prefix {self.shared_prefix} is over --input {self.input.low}",
                key="shared_prefix",
                remedy="the prefix is a part of the input: make it shorter, or the input longer",
            )
        if self.num_prefixes < 1:
            raise ConfigError("--prefixes is below 1", key="prefixes", remedy="give 1 or more")
        low, high = self.vocabulary
        if not 0 <= low < high:
            raise ConfigError(
                f"--vocabulary {low}-{high} is empty", key="vocabulary", remedy="write LOW-HIGH"
            )


class Synthetic:
    """Sessions of one question each."""

    def __init__(self, shape: PromptShape, seed: int) -> None:
        shape.check()
        self._shape = shape
        self._seed = seed
        self._prefix = lru_cache(maxsize=_KEPT_PREFIXES)(self._make_prefix)

    def session(self, number: int) -> Session:
        shape = self._shape
        lengths = _rng(self._seed, _LENGTHS, number)
        num_input, num_output = shape.input.draw(lengths), shape.output.draw(lengths)
        own = _tokens(_rng(self._seed, _OWN, number), num_input - shape.shared_prefix, shape.vocabulary)
        content = [*self._prefix(number % shape.num_prefixes), *own]
        return _OneQuestion(Ask((Message("user", content),), num_input, num_output))

    def _make_prefix(self, group: int) -> list[int]:
        return _tokens(_rng(self._seed, _SHARED, group), self._shape.shared_prefix, self._shape.vocabulary)


class Chats:
    """Conversations: each turn sends all that was said before, and follows the answer by a time to think.

    The shared prefix is the system message. Every question has a length drawn from the input lengths less that.
    """

    def __init__(self, shape: PromptShape, num_turns: int, think_s: float, seed: int) -> None:
        shape.check()
        if num_turns < 1 or think_s < 0:
            raise ConfigError(
                "a chat needs a turn and no negative time", key="turns", remedy="give --turns 2"
            )
        self._shape = shape
        self._num_turns = num_turns
        self._think_s = think_s
        self._seed = seed

    def session(self, number: int) -> Session:
        shape = self._shape
        lengths, own = _rng(self._seed, _LENGTHS, number), _rng(self._seed, _OWN, number)
        questions = []
        for _ in range(self._num_turns):
            num_tokens = max(1, shape.input.draw(lengths) - shape.shared_prefix)
            questions.append((_tokens(own, num_tokens, shape.vocabulary), shape.output.draw(lengths)))
        group = _rng(self._seed, _SHARED, number % shape.num_prefixes)
        system = _tokens(group, shape.shared_prefix, shape.vocabulary)
        return _Chat(system, questions, self._think_s)


def sessions_of(records: Sequence[TraceRecord]) -> list[list[int]]:
    """Places in the trace, by session: a record with a delay follows the one before it in its session.

    All others begin one at their own time, as everything does in a trace that has no delays.
    """
    sessions: list[list[int]] = []
    latest: dict[str, list[int]] = {}
    for place, record in enumerate(records):
        before = latest.get(record.session) if record.session is not None else None
        if before is not None and record.delay is not None:
            before.append(place)
            continue
        sessions.append([place])
        if record.session is not None:
            latest[record.session] = sessions[-1]
    return sessions


class FromTrace:
    """What the records say, session by session. Records with equal hash ids have equal beginnings.

    A later turn's prompt is the trace's, not what the server answered: lengths stay those of the trace.
    """

    def __init__(
        self,
        records: Sequence[TraceRecord],
        seed: int,
        vocabulary: tuple[int, int] = DEFAULT_VOCABULARY,
        speed: float = 1.0,
    ) -> None:
        self._records = records
        self._sessions = sessions_of(records)
        self._seed = seed
        self._first, end = vocabulary
        self._num_ids = end - self._first
        self._speed = speed

    def session(self, number: int) -> Session | None:
        return _Replay(self, self._sessions[number]) if number < len(self._sessions) else None

    def turn(self, place: int) -> tuple[Ask, float]:
        """The ask at that place of the trace, and what it waits after the one before it."""
        record = self._records[place]
        first = self._first
        prompt = [first + token for token in tokens_of(record, self._num_ids, self._seed, place)]
        ask = Ask((Message("user", prompt),), len(prompt), max(1, record.output_length))
        return ask, max(0.0, record.delay or 0.0) / 1000.0 / self._speed


class _Replay:
    wants_text = False

    def __init__(self, trace: FromTrace, places: list[int]) -> None:
        self._trace = trace
        self._places = iter(places)
        self.think_s = 0.0

    def next(self, answer: str | None) -> Ask | None:
        place = next(self._places, None)
        if place is None:
            return None
        ask, self.think_s = self._trace.turn(place)
        return ask


class _OneQuestion:
    wants_text = False
    think_s = 0.0

    def __init__(self, ask: Ask) -> None:
        self._ask: Ask | None = ask

    def next(self, answer: str | None) -> Ask | None:
        ask, self._ask = self._ask, None
        return ask


class _Chat:
    def __init__(self, system: list[int], questions: list[tuple[list[int], int]], think_s: float) -> None:
        self.think_s = think_s
        self._said = [Message("system", system)] if system else []
        self._num_tokens = len(system)
        self._questions = iter(questions)
        self._left = len(questions)

    @property
    def wants_text(self) -> bool:
        return self._left > 0

    def next(self, answer: str | None) -> Ask | None:
        question, num_output = next(self._questions, (None, 0))
        if question is None:
            return None
        self._left -= 1
        if answer is not None:
            self._said.append(Message("assistant", answer))
        self._said.append(Message("user", question))
        ask = Ask(tuple(self._said), self._num_tokens + len(question), num_output)
        self._num_tokens = ask.input_tokens + num_output
        return ask


def _rng(seed: int, *stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, *(number & _U64 for number in stream)]))


def _tokens(rng: np.random.Generator, number: int, vocabulary: tuple[int, int]) -> list[int]:
    tokens: list[int] = rng.integers(*vocabulary, size=max(0, number)).tolist()
    return tokens
