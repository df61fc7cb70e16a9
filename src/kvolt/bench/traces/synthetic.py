"""Synthetic traces: multi-turn chats with shared system prompts, from a recipe and a seed.

Each arriving session picks a system prompt and sends several requests, each with the whole history. Arrival times
assume a fixed time per output token and random think times.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, count
from random import Random

import msgspec

from kvolt.core.errors import ConfigError
from kvolt.core.trace import TraceRecord


class Lognormal(msgspec.Struct, frozen=True, kw_only=True):
    """Log-normal lengths in tokens; sigma 0 makes all equal to the median, 1 gives a long tail."""

    median: float
    sigma: float = 0.0
    max: int = 2**20

    def draw(self, random: Random) -> int:
        return min(self.max, max(1, round(random.lognormvariate(math.log(self.median), self.sigma))))


class Given(msgspec.Struct, frozen=True):
    """Lengths drawn uniformly from a list of samples."""

    lengths: tuple[int, ...]

    def draw(self, random: Random) -> int:
        return random.choice(self.lengths)


Lengths = Lognormal | Given


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a synthetic trace."""

    requests: int = 1000
    seed: int = 0
    rate_per_s: float = 5.0
    """Request rate in the steady state: session arrivals times `turns`. The mean of a trace is lower: the first
    sessions have no later turns yet, and `max_context` ends long ones."""
    burstiness: float = 1.0
    """Session arrivals: 1 is Poisson, below 1 burstier, above 1 steadier (coefficient of variation 1 / sqrt)."""
    system_prompts: int = 8
    """Number of system prompts, with Zipf popularity (the second is used half as often as the first). 0: none."""
    system: Lengths = Lognormal(median=1024, sigma=0.5, max=8192)
    turns: float = 3.0
    """Mean number of turns per session, at least one (geometric)."""
    question: Lengths = Lognormal(median=256, sigma=1.0, max=16384)
    answer: Lengths = Lognormal(median=256, sigma=0.8, max=4096)
    think_s: float = 15.0
    """Mean think time between an answer and the next request (exponential)."""
    token_s: float = 0.02
    """Assumed time per output token."""
    max_context: int = 32768
    """A session ends when its next turn would exceed this context length."""
    block_size: int = 512


RECIPES: dict[str, Recipe] = {
    "small": Recipe(
        requests=300,
        rate_per_s=4.0,
        system_prompts=4,
        system=Lognormal(median=160, sigma=0.4, max=512),
        question=Lognormal(median=48, sigma=0.8, max=512),
        answer=Lognormal(median=48, sigma=0.6, max=256),
        think_s=4.0,
        max_context=2048,
        block_size=16,
    ),
    "chat": Recipe(),
    "burst": Recipe(burstiness=0.1, turns=1.0),
}
"""Recipes by name: `small` is for tests and laptops; the parameters of the others are round numbers."""


def small_trace() -> list[TraceRecord]:
    """The default trace: 300 requests that fit a context of 2,048 tokens."""
    return list(make_trace(RECIPES["small"]))


def make_trace(recipe: Recipe) -> Iterator[TraceRecord]:
    """Generate records in order of time. Keeps active sessions in memory, not records."""
    _check(recipe)
    return _Maker(recipe).records()


def _check(recipe: Recipe) -> None:
    for name in ("requests", "rate_per_s", "burstiness", "max_context", "block_size"):
        if not 0 < getattr(recipe, name) < math.inf:
            raise ConfigError(f"{name} must be above 0", key=name, remedy="use a positive number")
    if recipe.max_context < 2 or recipe.turns < 1:
        raise ConfigError(
            "turns must be at least 1 and max_context at least 2",
            key="turns" if recipe.turns < 1 else "max_context",
            remedy="correct the recipe",
        )
    if min(recipe.system_prompts, recipe.think_s, recipe.token_s) < 0:
        raise ConfigError("a negative number in the recipe", key="recipe", remedy="give 0 or more")


@dataclass(slots=True)
class _Session:
    number: int
    ids: list[int]
    """Hash ids of its full blocks."""
    length: int
    """Length of its history in tokens."""
    turn: int = 0


class _Maker:
    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._random = Random(recipe.seed)
        self._next_id = count()
        room = max(0, recipe.max_context - 2)
        lengths = [min(room, recipe.system.draw(self._random)) for _ in range(recipe.system_prompts)]
        self._systems = [
            (length, [next(self._next_id) for _ in range(length // recipe.block_size)]) for length in lengths
        ]
        self._popularity = list(accumulate(1 / (rank + 1) for rank in range(len(lengths))))

    def records(self) -> Iterator[TraceRecord]:
        recipe = self._recipe
        sessions = count()
        arrival_ms = 0.0
        waiting: list[tuple[float, int, _Session]] = []
        for _ in range(recipe.requests):
            if not waiting or arrival_ms <= waiting[0][0]:
                now_ms, session = arrival_ms, self._session(next(sessions))
                arrival_ms += self._gap_ms()
            else:
                now_ms, _, session = heapq.heappop(waiting)
            record = self._ask(session, now_ms)
            yield record
            self._grow(session, record.output_length)
            room = recipe.max_context - session.length
            if room >= 2 and self._random.random() >= 1 / recipe.turns:
                think_s = self._random.expovariate(1 / recipe.think_s) if recipe.think_s else 0.0
                next_ms = now_ms + 1000 * (record.output_length * recipe.token_s + think_s)
                heapq.heappush(waiting, (next_ms, session.number, session))

    def _session(self, number: int) -> _Session:
        if not self._systems:
            return _Session(number, [], 0)
        (system,) = self._random.choices(self._systems, cum_weights=self._popularity)
        length, ids = system
        return _Session(number, list(ids), length)

    def _ask(self, session: _Session, now_ms: float) -> TraceRecord:
        recipe = self._recipe
        room = recipe.max_context - session.length
        question = min(room - 1, recipe.question.draw(self._random))
        answer = min(room - question, recipe.answer.draw(self._random))
        self._grow(session, question)
        partial = [next(self._next_id)] if session.length % recipe.block_size else []
        session.turn += 1
        return TraceRecord(
            timestamp=round(now_ms, 3),
            input_length=session.length,
            output_length=answer,
            hash_ids=(*session.ids, *partial),
            block_size=recipe.block_size,
            session=f"s{session.number}",
        )

    def _grow(self, session: _Session, length: int) -> None:
        session.length += length
        while len(session.ids) < session.length // self._recipe.block_size:
            session.ids.append(next(self._next_id))

    def _gap_ms(self) -> float:
        recipe = self._recipe
        mean_ms = 1000 * recipe.turns / recipe.rate_per_s
        return self._random.gammavariate(recipe.burstiness, mean_ms / recipe.burstiness)
