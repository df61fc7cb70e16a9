"""What an engine's steps take, found out by running a few before its first request. Pure: who runs them is given.

Trials are steps of one kind and growing size: decodes with little context, decodes with much, chunks of a prompt.
All kinds are climbed at the same time, each for as long as the next size is expected to take a small part of the
budget; half of the budget is left to run them again, the largest first. So a fast engine is known over all that it can
do, and a slow one over what there was time for.

Of each trial the faster half of its runs is believed: the first run of anything is slow (pages are touched, kernels
made), and where one engine starts others often do, which would make equals look different to a router. For the same
reason what was run once counts only where too little was run twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvolt.core.latency import LatencyModel, features
from kvolt.core.load import StepStats
from kvolt.latency.fit import Errors, errors_of, fit_all
from kvolt.scheduler.step_plan import Limits

BUDGET_S = 1.5
"""On one slow core with a model of 100 M weights enough for most sizes twice."""

_MOST_RUNS = 6
"""Of a trial: more would not tell more, and a clock may stand still."""
_SHARE = 1 / 6
"""Of the budget that one trial may be expected to take."""
_GROWTH = 4
_SHORT = 16
"""Tokens of context that cost next to nothing; also the smallest chunk of a prompt."""
_PARTS, _LEAST_PART = 4, 64
_LARGE = 3
_DEEP = 4
"""Times the long context: what lies before the chunk of a prompt that is measured for it."""
_DEEP_AFTER = 2
"""Rungs, and once more at the end: where there is no time for a large chunk it is known of a small one."""
_LEAST_DECODES, _LEAST_PROMPTS, _LEAST_TRIALS = 3, 2, 6
"""Fewer different ones say too little: of few tokens each costs more than it does among many, so of one size of prompts
alone a price is twice as high as it should be."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A step to run: sequences that decode, or chunks of prompts."""

    batch: int = 0
    context: int = 0
    """Of each that decodes, its new token included."""
    prompts: int = 0
    chunk: int = 0
    """Of each prompt."""
    before: int = 0
    """Tokens of each prompt before its chunk."""

    @property
    def prompt_tokens(self) -> int:
        return self.prompts * self.chunk

    def num_blocks(self, block_size: int) -> int:
        of_decodes = self.batch * -(-self.context // block_size)
        return of_decodes + self.prompts * -(-(self.before + self.chunk) // block_size)

    def stats(self, time_s: float = 0.0) -> StepStats:
        return StepStats(
            self.batch,
            self.prompt_tokens,
            self.prompt_tokens * (self.before + self.chunk),
            self.batch * self.context,
            time_s,
        )


class TrialRoom(msgspec.Struct, frozen=True, kw_only=True):
    """What trials may use of an engine."""

    limits: Limits
    num_blocks: int
    long_batch: int
    """How many sequences decode with a long context ..."""
    long_tokens: int
    """... and what their contexts come to at most."""

    @property
    def longest(self) -> int:
        """Tokens that one sequence can have."""
        return min(self.limits.context_length, self.num_blocks * self.limits.block_size)

    @property
    def long_context(self) -> int:
        blocks = self.num_blocks // self.long_batch
        return min(self.longest, self.long_tokens // self.long_batch, blocks * self.limits.block_size)

    def has_room_for(self, trial: Trial) -> bool:
        limits = self.limits
        return (
            trial.batch + trial.prompts <= limits.max_num_seqs
            and trial.batch + trial.prompt_tokens <= limits.max_batch_tokens
            and max(trial.context, trial.before + trial.chunk) <= limits.context_length
            and trial.num_blocks(limits.block_size) <= self.num_blocks
        )


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """What came of them."""

    steps: tuple[StepStats, ...]
    """Those that are believed, with their times."""
    num_runs: int
    """Of all."""
    took_s: float
    latency: LatencyModel | None
    """None where they say too little."""

    @property
    def rough_latency(self) -> LatencyModel | None:
        """The latency, or where the trials were too few for one, what the fastest decode and the largest prompt say: to
        be corrected by real steps, not to be registered. None where nothing ran."""
        if self.latency is not None or not self.steps:
            return self.latency
        base_s = min((step.time_s for step in self.steps if step.batch), default=0.0)
        prompt = max(self.steps, key=lambda step: step.prefill_tokens)
        token_s = max(prompt.time_s - base_s, 0.0) / max(prompt.prefill_tokens, 1)
        return LatencyModel(base_s=base_s, prefill_token_s=token_s)

    @property
    def most_prompt_tokens(self) -> int:
        """Of the largest step."""
        return max((step.prefill_tokens for step in self.steps), default=0)

    @property
    def decodes(self) -> Errors:
        """How far the model is off from what was measured; of no steps where that says nothing."""
        return self._errors([step for step in self.steps if step.batch])

    @property
    def prompts(self) -> Errors:
        return self._errors([step for step in self.steps if step.prefill_tokens])

    def _errors(self, steps: Sequence[StepStats]) -> Errors:
        if self.latency is None:
            return Errors(0)
        different = {features(step) for step in self.steps}
        prices = [name for name in self.latency.__struct_fields__ if name.endswith("_s")]
        num_prices = sum(getattr(self.latency, name) > 0 for name in prices)
        # With about as many prices as there are different steps any would be met.
        return errors_of(self.latency, steps) if len(different) > num_prices + 1 else Errors(0)


Prepare = Callable[[Trial], Callable[[], None]]
"""Makes what a trial needs, which is not measured; what it returns runs the step, to its end."""


def measure_steps(
    prepare: Prepare, room: TrialRoom, now: Callable[[], float], budget_s: float = BUDGET_S
) -> Trials:
    """Runs steps for about `budget_s`: none is begun after that, nor one that is expected to end after it."""
    watch = _Watch(prepare, now, budget_s)
    ladders, num_rounds = list(_ladders(room)), 0
    while ladders:
        ladders = [ladder for ladder in ladders if watch.climb(ladder)]
        num_rounds += 1
        if num_rounds == _DEEP_AFTER:
            watch.go_deep(room)
    watch.go_deep(room)
    watch.forget_small()
    if _are_enough(watch.times):
        watch.repeat()
    return _concluded(watch)


@dataclass(slots=True)
class _Ladder:
    """Trials of one kind, by a size that their time grows with about linearly."""

    rungs: list[tuple[int, Trial]]
    """Those that are left, the smallest last."""
    points: list[tuple[int, float]] = field(default_factory=list)
    """Sizes and times of those that were run."""
    origin: int | None = None
    """What the size of the smallest decode is on this ladder; None where that is its first rung."""
    last: Trial | None = None


def _ladders(room: TrialRoom) -> Iterator[_Ladder]:
    limits, longest = room.limits, room.longest
    short, long = min(_SHORT, longest), room.long_context
    decodes = [(batch, Trial(batch=batch, context=short)) for batch in _sizes(1, limits.max_num_seqs)]
    yield _ladder(room, decodes, None)
    most = min(limits.max_batch_tokens, room.num_blocks * limits.block_size)
    prompts = [(size, _prompts(size, limits.max_num_seqs)) for size in _sizes(short, most)]
    yield _ladder(room, prompts, 1)
    batches = {1, room.long_batch} if long > short else set()
    contexts = [(batch * long, Trial(batch=batch, context=long)) for batch in sorted(batches)]
    yield _ladder(room, contexts, short)


def _prompts(num_tokens: int, max_num_seqs: int) -> Trial:
    """Many tokens are several prompts: what a token costs is not to be mistaken for what those before it do."""
    is_one = num_tokens < _PARTS * _LEAST_PART or max_num_seqs < _PARTS
    return Trial(prompts=1, chunk=num_tokens) if is_one else Trial(prompts=_PARTS, chunk=num_tokens // _PARTS)


def _ladder(room: TrialRoom, rungs: list[tuple[int, Trial]], origin: int | None) -> _Ladder:
    possible = [(size, trial) for size, trial in rungs if room.has_room_for(trial)]
    return _Ladder(possible[::-1], origin=origin)


def _sizes(first: int, most: int) -> Iterator[int]:
    """Each several times the one before, up to the most that there can be."""
    size = first
    while size < most:
        yield size
        size *= _GROWTH
    yield most


class _Watch:
    """Runs trials and keeps their times, while the budget lasts."""

    def __init__(self, prepare: Prepare, now: Callable[[], float], budget_s: float) -> None:
        self._prepare = prepare
        self._now = now
        self._budget_s = budget_s
        self._began_at = now()
        self._runs: dict[Trial, Callable[[], None]] = {}
        self.times: dict[Trial, list[float]] = {}
        self.num_runs = 0

    @property
    def used_s(self) -> float:
        return self._now() - self._began_at

    def climb(self, ladder: _Ladder) -> bool:
        """One rung; False where there is none that the time allows."""
        if not ladder.rungs:
            return False
        size, trial = ladder.rungs[-1]
        if not self._is_cheap(self._expected_s(ladder, size)):
            # What it is expected by may have been slow for being the first of its size.
            if ladder.last is None or not self._is_in_time(ladder.points[-1][1], self._budget_s / 2):
                return False
            ladder.points[-1] = (ladder.points[-1][0], self._run(ladder.last))
            if not self._is_cheap(self._expected_s(ladder, size)):
                return False
        ladder.rungs.pop()
        ladder.points.append((size, self._run(trial)))
        ladder.last = trial
        return True

    def go_deep(self, room: TrialRoom) -> None:
        """A chunk of a prompt after much of it: the largest that may take twice as long."""
        plain = [trial for trial in self.times if trial.prompts and not trial.before]
        for trial in sorted(plain, key=lambda trial: -trial.prompt_tokens):
            chunk = trial.prompt_tokens
            deep = Trial(prompts=1, chunk=chunk, before=min(_DEEP * room.long_context, room.longest - chunk))
            if deep.before >= _SHORT and self._is_cheap(2 * self.times[trial][-1]):
                if deep not in self.times:
                    self._run(deep)
                return

    def forget_small(self) -> None:
        """Of many sizes of prompts all but the smallest and the largest few. On a GPU small ones take what launching
        takes, whatever their size: they would outvote those that matter."""
        plain = [trial for trial in self.times if trial.prompts and not trial.before]
        deep = [trial for trial in self.times if trial.before]
        for trial in (*plain[1:-_LARGE], *deep[:-1]):
            del self.times[trial]

    def repeat(self) -> None:
        """All of them, as often as there is time for. The largest first: what is small finds a place at the end."""
        for _ in range(_MOST_RUNS):
            for trial, times in reversed(self.times.items()):
                if len(times) < _MOST_RUNS and self._is_in_time(times[-1], self._budget_s):
                    self._run(trial)

    def _run(self, trial: Trial) -> float:
        run = self._runs.get(trial)
        if run is None:
            run = self._runs[trial] = self._prepare(trial)
        started = self._now()
        run()
        took_s = self._now() - started
        self.times.setdefault(trial, []).append(took_s)
        self.num_runs += 1
        return took_s

    def _is_cheap(self, expected_s: float) -> bool:
        """For a first run. As long as too little is known nothing is too dear."""
        if not _are_enough(self.times):
            return self._is_in_time(expected_s, self._budget_s)
        return expected_s <= _SHARE * self._budget_s and self._is_in_time(expected_s, self._budget_s / 2)

    def _is_in_time(self, expected_s: float, limit_s: float) -> bool:
        used_s = self.used_s
        return used_s < limit_s and used_s + expected_s <= limit_s

    def _expected_s(self, ladder: _Ladder, size: int) -> float:
        """Along the line through the latest two; of one nothing is known but that more takes no less."""
        points = ladder.points
        if ladder.origin is not None:
            points = [(ladder.origin, times[-1]) for times in islice(self.times.values(), 1)] + points
        if len(points) < 2:
            return points[0][1] if points else 0.0
        (before, before_s), (last, last_s) = points[-2:]
        return last_s + max(last_s - before_s, 0.0) / (last - before) * (size - last)


def _are_enough(trials: Collection[Trial]) -> bool:
    num_decodes = sum(trial.batch > 0 for trial in trials)
    num_prompts = len(trials) - num_decodes
    return num_decodes >= _LEAST_DECODES and num_prompts >= _LEAST_PROMPTS and len(trials) >= _LEAST_TRIALS


def _concluded(watch: _Watch) -> Trials:
    times = watch.times
    steps: list[StepStats] = []
    told: list[Trial] = []
    often = {trial: runs for trial, runs in times.items() if len(runs) > 1}
    for trial, runs in (often if _are_enough(often) else times).items():
        believed = [time_s for time_s in sorted(runs)[: max(1, len(runs) // 2)] if time_s > 0.0]
        if believed:  # a clock that stands still says nothing
            told.append(trial)
            steps += [trial.stats(time_s) for time_s in believed]
    latency = fit_all(steps)[0] if _are_enough(told) else None
    return Trials(steps=tuple(steps), num_runs=watch.num_runs, took_s=watch.used_s, latency=latency)
