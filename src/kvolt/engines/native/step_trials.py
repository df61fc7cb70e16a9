"""Measures an engine's step times by trial steps before its first request. Pure: the caller runs the steps.

Trials are steps of one kind with growing size: decodes with short contexts, decodes with long contexts, and prompt
chunks. All kinds grow in turn, as long as the next size is expected to take a small part of the budget. Half of the
budget is reserved for repetitions, the largest first. So a fast engine is measured over its whole range, and a slow
one as far as time allows.

Of each trial the faster half of its runs is used: first runs are slow (page faults, kernel compilation), and several
engines repeated start together, which must not make equal engines look different to a router. For the same reason
trials that ran only once are used only if too few ran twice.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

import msgspec

from kvolt.core.latency import LatencyModel, fit_features, scale_speed
from kvolt.core.load import StepStats
from kvolt.latency.fit import Errors, errors_of, fit_all
from kvolt.latency.presets import DEFAULT, PRESETS
from kvolt.scheduler.step_plan import Limits

BUDGET_S = 1.5
"""Enough for two runs of most sizes of a 100 M model on one slow core."""

_MOST_RUNS = 6
"""Most runs of a trial; also the limit if the clock does not advance."""
_SHARE = 1 / 6
"""Largest expected share of the budget for one trial."""
_GROWTH = 4
_SHORT = 16
"""Short context, with negligible cost; also the smallest prompt chunk."""
_PARTS, _LEAST_PART = 4, 64
_LARGE = 3
_DEEP = 4
"""Context before a deep prompt chunk, in multiples of the long context."""
_DEEP_AFTER_ROUNDS = 2
"""Round after which a deep chunk is first measured, in case there is no time for a larger one at the end."""
_LEAST_DECODES, _LEAST_PROMPTS, _LEAST_TRIALS = 3, 2, 6
"""Minimum numbers of different trials for a fit. In small steps a token costs more than in large ones, so a
fit to a single prompt size would predict about twice the cost."""

_MAX_SPEED = 1000.0
"""Bound on the speed relative to the preset, and on its inverse, if only a few steps were timed."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A trial step: decodes or prompt chunks."""

    batch: int = 0
    context: int = 0
    """Context per decode, including the new token."""
    prompts: int = 0
    chunk: int = 0
    """Tokens per prompt chunk."""
    before: int = 0
    """Tokens of each prompt before its chunk."""

    @property
    def prompt_tokens(self) -> int:
        return self.prompts * self.chunk

    def num_blocks(self, block_size: int) -> int:
        num_decode_blocks = self.batch * -(-self.context // block_size)
        return num_decode_blocks + self.prompts * -(-(self.before + self.chunk) // block_size)

    def stats(self, time_s: float = 0.0) -> StepStats:
        return StepStats(
            self.batch,
            self.prompt_tokens,
            self.prompt_tokens * (self.before + self.chunk),
            self.batch * self.context,
            time_s,
        )


class TrialLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of an engine for trials."""

    limits: Limits
    num_blocks: int
    long_batch: int
    """Number of decodes with a long context."""
    long_tokens: int
    """Most context tokens of these decodes together."""

    @property
    def longest(self) -> int:
        """Most tokens of one sequence."""
        return min(self.limits.context_length, self.num_blocks * self.limits.block_size)

    @property
    def long_context(self) -> int:
        blocks = self.num_blocks // self.long_batch
        return min(self.longest, self.long_tokens // self.long_batch, blocks * self.limits.block_size)

    def allows(self, trial: Trial) -> bool:
        limits = self.limits
        return (
            trial.batch + trial.prompts <= limits.max_num_seqs
            and trial.batch + trial.prompt_tokens <= limits.max_batch_tokens
            and max(trial.context, trial.before + trial.chunk) <= limits.context_length
            and trial.num_blocks(limits.block_size) <= self.num_blocks
        )


class Trials(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all trials."""

    steps: tuple[StepStats, ...]
    """The steps used for the fit, with their times."""
    num_runs: int
    """Number of all steps that were run."""
    elapsed_s: float
    latency: LatencyModel | None
    """None if there are too few different trials."""

    @property
    def rough_latency(self) -> LatencyModel | None:
        """The latency model or, with too few trials for a fit, an estimate from the fastest decode and the largest
        prompt, or if there is no prompt the default preset at the speed of the decodes. Real steps correct it. None if
        nothing was timed."""
        preset = PRESETS[DEFAULT].model
        if self.latency is not None or not self.steps or not isinstance(preset, LatencyModel):
            return self.latency
        prompt = max(self.steps, key=lambda step: step.prefill_tokens)
        if prompt.prefill_tokens:
            base_s = min((step.time_s for step in self.steps if step.batch), default=0.0)
            token_s = max(prompt.time_s - base_s, 0.0) / prompt.prefill_tokens
            return LatencyModel(base_s=base_s, prefill_token_s=token_s)
        speed = median(preset.step_s(step) / step.time_s for step in self.steps)
        return scale_speed(preset, min(max(speed, 1 / _MAX_SPEED), _MAX_SPEED))

    @property
    def most_prompt_tokens(self) -> int:
        """Prompt tokens of the largest step."""
        return max((step.prefill_tokens for step in self.steps), default=0)

    @property
    def decodes(self) -> Errors:
        """Errors of the model on decodes; empty if there are too few different steps to judge it."""
        return self._errors([step for step in self.steps if step.batch])

    @property
    def prompts(self) -> Errors:
        """Errors of the model on prompts, as for `decodes`."""
        return self._errors([step for step in self.steps if step.prefill_tokens])

    def _errors(self, steps: Sequence[StepStats]) -> Errors:
        if self.latency is None:
            return Errors(0)
        different = {fit_features(step) for step in self.steps}
        cost_names = [name for name in self.latency.__struct_fields__ if name.endswith("_s")]
        num_costs = sum(getattr(self.latency, name) > 0 for name in cost_names)
        # With about as many coefficients as different steps any fit is exact.
        return errors_of(self.latency, steps) if len(different) > num_costs + 1 else Errors(0)


Prepare = Callable[[Trial], Callable[[], None]]
"""Prepares a trial, which is not timed; returns a function that runs the step to its end."""


def measure_steps(
    prepare: Prepare, bounds: TrialLimits, now: Callable[[], float], budget_s: float = BUDGET_S
) -> Trials:
    """Run trials for about `budget_s`. No trial starts after it, or is expected to end after it."""
    run = _TrialRun(prepare, now, budget_s)
    ladders, num_rounds = list(_ladders(bounds)), 0
    while ladders:
        ladders = [ladder for ladder in ladders if run.climb(ladder)]
        num_rounds += 1
        if num_rounds == _DEEP_AFTER_ROUNDS:
            run.run_deep(bounds)
    run.run_deep(bounds)
    run.drop_small()
    if _are_enough(run.times):
        run.repeat()
    return _fit_trials(run)


@dataclass(slots=True)
class _Ladder:
    """Trials of one kind, by a size in which their time is about linear."""

    rungs: list[tuple[int, Trial]]
    """Remaining trials with their sizes, the smallest last."""
    points: list[tuple[int, float]] = field(default_factory=list)
    """Sizes and times of completed trials."""
    origin: int | None = None
    """Size of the smallest decode on this ladder; None if it is the ladder's first trial."""
    last: Trial | None = None


def _ladders(bounds: TrialLimits) -> Iterator[_Ladder]:
    limits, longest = bounds.limits, bounds.longest
    short, long = min(_SHORT, longest), bounds.long_context
    decodes = [(batch, Trial(batch=batch, context=short)) for batch in _sizes(1, limits.max_num_seqs)]
    yield _ladder(bounds, decodes, None)
    most = min(limits.max_batch_tokens, bounds.num_blocks * limits.block_size)
    prompts = [(size, _prompts(size, limits.max_num_seqs)) for size in _sizes(short, most)]
    yield _ladder(bounds, prompts, 1)
    batches = {1, bounds.long_batch} if long > short else set()
    contexts = [(batch * long, Trial(batch=batch, context=long)) for batch in sorted(batches)]
    yield _ladder(bounds, contexts, short)


def _prompts(num_tokens: int, max_num_seqs: int) -> Trial:
    """Split many tokens into several prompts, to separate the cost of a token from that of the context before it."""
    is_one = num_tokens < _PARTS * _LEAST_PART or max_num_seqs < _PARTS
    return Trial(prompts=1, chunk=num_tokens) if is_one else Trial(prompts=_PARTS, chunk=num_tokens // _PARTS)


def _ladder(bounds: TrialLimits, rungs: list[tuple[int, Trial]], origin: int | None) -> _Ladder:
    possible = [(size, trial) for size, trial in rungs if bounds.allows(trial)]
    return _Ladder(possible[::-1], origin=origin)


def _sizes(first: int, most: int) -> Iterator[int]:
    """Geometrically growing sizes from `first` to `most`."""
    size = first
    while size < most:
        yield size
        size *= _GROWTH
    yield most


class _TrialRun:
    """Runs trials within the budget and records their times."""

    def __init__(self, prepare: Prepare, now: Callable[[], float], budget_s: float) -> None:
        self._prepare = prepare
        self._now = now
        self._budget_s = budget_s
        self._started_at = now()
        self._prepared: dict[Trial, Callable[[], None]] = {}
        self.times: dict[Trial, list[float]] = {}
        self.num_runs = 0

    @property
    def used_s(self) -> float:
        return self._now() - self._started_at

    def climb(self, ladder: _Ladder) -> bool:
        """Run the next trial of a ladder; False if there is none, or none that the budget allows."""
        if not ladder.rungs:
            return False
        size, trial = ladder.rungs[-1]
        if not self._is_cheap(self._expected_s(ladder, size)):
            # The trial that the estimate is based on may have been slow because it was the first of its size.
            if ladder.last is None or not self._is_in_time(ladder.points[-1][1], self._budget_s / 2):
                return False
            ladder.points[-1] = (ladder.points[-1][0], self._run(ladder.last))
            if not self._is_cheap(self._expected_s(ladder, size)):
                return False
        ladder.rungs.pop()
        ladder.points.append((size, self._run(trial)))
        ladder.last = trial
        return True

    def run_deep(self, bounds: TrialLimits) -> None:
        """Run the largest prompt chunk with a long context before it that the budget allows at twice its time."""
        plain = [trial for trial in self.times if trial.prompts and not trial.before]
        for trial in sorted(plain, key=lambda trial: -trial.prompt_tokens):
            chunk = trial.prompt_tokens
            deep = Trial(
                prompts=1, chunk=chunk, before=min(_DEEP * bounds.long_context, bounds.longest - chunk)
            )
            if deep.before >= _SHORT and self._is_cheap(2 * self.times[trial][-1]):
                if deep not in self.times:
                    self._run(deep)
                return

    def drop_small(self) -> None:
        """Drop prompt sizes between the smallest and the largest few. On a GPU small steps take the launch
        time independent of their size, and would dominate the fit."""
        plain = [trial for trial in self.times if trial.prompts and not trial.before]
        deep = [trial for trial in self.times if trial.before]
        for trial in (*plain[1:-_LARGE], *deep[:-1]):
            del self.times[trial]

    def repeat(self) -> None:
        """Repeat all trials while there is time, the largest first, since small ones fit in at the end."""
        for _ in range(_MOST_RUNS):
            for trial, times in reversed(self.times.items()):
                if len(times) < _MOST_RUNS and self._is_in_time(times[-1], self._budget_s):
                    self._run(trial)

    def _run(self, trial: Trial) -> float:
        run = self._prepared.get(trial)
        if run is None:
            run = self._prepared[trial] = self._prepare(trial)
        started = self._now()
        run()
        elapsed_s = self._now() - started
        self.times.setdefault(trial, []).append(elapsed_s)
        self.num_runs += 1
        return elapsed_s

    def _is_cheap(self, expected_s: float) -> bool:
        """Whether the budget allows a first run. While there are too few trials, any that fits in the budget."""
        if not _are_enough(self.times):
            return self._is_in_time(expected_s, self._budget_s)
        return expected_s <= _SHARE * self._budget_s and self._is_in_time(expected_s, self._budget_s / 2)

    def _is_in_time(self, expected_s: float, limit_s: float) -> bool:
        used_s = self.used_s
        return used_s < limit_s and used_s + expected_s <= limit_s

    def _expected_s(self, ladder: _Ladder, size: int) -> float:
        """Extrapolate linearly from the latest two trials; from one, assume the same time."""
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


def _fit_trials(run: _TrialRun) -> Trials:
    times = run.times
    steps: list[StepStats] = []
    used: list[Trial] = []
    repeated = {trial: runs for trial, runs in times.items() if len(runs) > 1}
    for trial, runs in (repeated if _are_enough(repeated) else times).items():
        fastest = [time_s for time_s in sorted(runs)[: max(1, len(runs) // 2)] if time_s > 0.0]
        if fastest:  # empty if the clock did not advance
            used.append(trial)
            steps += [trial.stats(time_s) for time_s in fastest]
    latency = fit_all(steps)[0] if _are_enough(used) else None
    return Trials(steps=tuple(steps), num_runs=run.num_runs, elapsed_s=run.used_s, latency=latency)
