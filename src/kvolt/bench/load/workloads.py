"""Workloads: prompts of given lengths as token ids, single or as conversations. Pure, a function of the seed.

`bodies` encodes token ids as they are or as words. Session N does not depend on earlier sessions, so two runs with one
seed send the same requests, in open and in closed loop.
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
"""Token ids that are ordinary tokens in every model."""

_KEPT_PREFIXES = 256
_U64 = (1 << 64) - 1
_SHARED, _OWN, _LENGTHS = range(3)
"""Purposes of random streams, part of their seeds."""


class Message(msgspec.Struct, frozen=True):
    """User message as token ids, or response text of the model."""

    role: str
    content: Sequence[int] | str


class Prompt(msgspec.Struct, frozen=True):
    """One request before encoding."""

    messages: tuple[Message, ...]
    input_tokens: int
    """Prompt length without the chat template; earlier responses count with their requested length."""
    output_tokens: int


class UserSession(Protocol):
    """Consecutive requests of one user."""

    @property
    def wants_text(self) -> bool:
        """Whether later turns need the text of responses."""
        ...

    @property
    def think_s(self) -> float:
        """Pause between the previous response and the request returned last by `next`."""
        ...

    def next(self, answer: str | None) -> Prompt | None:
        """Return the next request given the previous response (None at first); None at the end of the session."""
        ...


class Workload(Protocol):
    """Numbered sessions."""

    def session(self, number: int) -> UserSession | None:
        """Return session `number`; None after the last one."""
        ...


class Lengths(msgspec.Struct, frozen=True):
    """Uniform distribution of a token count."""

    low: int
    high: int

    def draw(self, rng: np.random.Generator) -> int:
        return self.low if self.low == self.high else int(rng.integers(self.low, self.high + 1))


def parse_lengths(text: str, key: str) -> Lengths:
    """Parse `512` or `256-1024`."""
    low, dash, high = text.partition("-")
    if low.strip().isdecimal() and (high.strip().isdecimal() or not dash):
        lengths = Lengths(int(low), int(high) if dash else int(low))
        if 1 <= lengths.low <= lengths.high:
            return lengths
    raise ConfigError(
        f"--{key}: invalid length {text}", key=key, remedy="for example 512 or 256-1024 (tokens, at least 1)"
    )


class PromptShape(msgspec.Struct, frozen=True, kw_only=True):
    """Synthetic prompts with shared prefixes and unique remainders."""

    input: Lengths
    output: Lengths
    shared_prefix: int = 0
    """Shared prefix in tokens, part of the input length."""
    num_prefixes: int = 1
    """Number of different prefixes; session N uses prefix N modulo this."""
    vocabulary: tuple[int, int] = DEFAULT_VOCABULARY

    def check(self) -> None:
        if not 0 <= self.shared_prefix <= self.input.low:
            raise ConfigError(
                f"--shared-prefix {self.shared_prefix} exceeds --input {self.input.low}",
                key="shared_prefix",
                remedy="the prefix is part of the input: reduce it or raise --input",
            )
        if self.num_prefixes < 1:
            raise ConfigError("--prefixes is below 1", key="prefixes", remedy="give 1 or more")
        low, high = self.vocabulary
        if not 0 <= low < high:
            raise ConfigError(
                f"--vocabulary {low}-{high} is empty", key="vocabulary", remedy="write LOW-HIGH"
            )


class Synthetic:
    """Sessions of one request each."""

    def __init__(self, shape: PromptShape, seed: int) -> None:
        shape.check()
        self._shape = shape
        self._seed = seed
        self._prefix = lru_cache(maxsize=_KEPT_PREFIXES)(self._make_prefix)

    def session(self, number: int) -> UserSession:
        shape = self._shape
        lengths = _rng(self._seed, _LENGTHS, number)
        num_input, num_output = shape.input.draw(lengths), shape.output.draw(lengths)
        own = _tokens(_rng(self._seed, _OWN, number), num_input - shape.shared_prefix, shape.vocabulary)
        content = [*self._prefix(number % shape.num_prefixes), *own]
        return _SingleRequest(Prompt((Message("user", content),), num_input, num_output))

    def _make_prefix(self, group: int) -> list[int]:
        return _tokens(_rng(self._seed, _SHARED, group), self._shape.shared_prefix, self._shape.vocabulary)


class Chats:
    """Conversations: each turn sends the whole history, a think time after the previous response.

    The shared prefix is the system message; user messages have the remaining input length.
    """

    def __init__(self, shape: PromptShape, num_turns: int, think_s: float, seed: int) -> None:
        shape.check()
        if num_turns < 1 or think_s < 0:
            raise ConfigError(
                "--turns must be 1 or more and --think not negative", key="turns", remedy="give --turns 2"
            )
        self._shape = shape
        self._num_turns = num_turns
        self._think_s = think_s
        self._seed = seed

    def session(self, number: int) -> UserSession:
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
    """Record indexes by session. A record with a delay follows the previous record of its session.

    Other records start a session at their own time.
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
    """Sessions of a trace. Records with equal hash ids have equal prefixes.

    Prompts of later turns come from the trace, not from the server's responses, so lengths match the trace.
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

    def session(self, number: int) -> UserSession | None:
        return _Replay(self, self._sessions[number]) if number < len(self._sessions) else None

    def turn(self, place: int) -> tuple[Prompt, float]:
        """Request of the record at this index, and its delay after the previous one."""
        record = self._records[place]
        first = self._first
        token_ids = [first + token for token in tokens_of(record, self._num_ids, self._seed, place)]
        prompt = Prompt((Message("user", token_ids),), len(token_ids), max(1, record.output_length))
        return prompt, max(0.0, record.delay or 0.0) / 1000.0 / self._speed


class _Replay:
    wants_text = False

    def __init__(self, trace: FromTrace, places: list[int]) -> None:
        self._trace = trace
        self._places = iter(places)
        self.think_s = 0.0

    def next(self, answer: str | None) -> Prompt | None:
        place = next(self._places, None)
        if place is None:
            return None
        prompt, self.think_s = self._trace.turn(place)
        return prompt


class _SingleRequest:
    wants_text = False
    think_s = 0.0

    def __init__(self, prompt: Prompt) -> None:
        self._prompt: Prompt | None = prompt

    def next(self, answer: str | None) -> Prompt | None:
        prompt, self._prompt = self._prompt, None
        return prompt


class _Chat:
    def __init__(self, system: list[int], questions: list[tuple[list[int], int]], think_s: float) -> None:
        self.think_s = think_s
        self._messages = [Message("system", system)] if system else []
        self._num_tokens = len(system)
        self._questions = iter(questions)
        self._num_left = len(questions)

    @property
    def wants_text(self) -> bool:
        return self._num_left > 0

    def next(self, answer: str | None) -> Prompt | None:
        question, num_output = next(self._questions, (None, 0))
        if question is None:
            return None
        self._num_left -= 1
        if answer is not None:
            self._messages.append(Message("assistant", answer))
        self._messages.append(Message("user", question))
        prompt = Prompt(tuple(self._messages), self._num_tokens + len(question), num_output)
        self._num_tokens = prompt.input_tokens + num_output
        return prompt


def _rng(seed: int, *stream: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, *(number & _U64 for number in stream)]))


def _tokens(rng: np.random.Generator, number: int, vocabulary: tuple[int, int]) -> list[int]:
    tokens: list[int] = rng.integers(*vocabulary, size=max(0, number)).tolist()
    return tokens
