"""Fits a LatencyModel to a step log, and says how far to trust it.

What counts is the relative error: a decode of 5 ms that is told as 10 is as wrong as a prefill of 100 ms told as 200.
Steps that are far off (the first ones, a pause of the machine) pull with bounded force (Huber). They are not left out:
by the measure of many regular decodes the few prefills of a log would all be outliers.

Four fifths of the log make the model; it is judged on the rest. Neighbours in a log are almost the same step, so whole
stretches are held out. Pure: a log in, a Fit out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import StrEnum
from math import ceil
from operator import mul
from statistics import median

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.latency import LatencyModel, features
from kvolt.core.load import StepStats
from kvolt.latency.least_squares import independent_columns, nonnegative_fit

MIN_STEPS = 20
MAX_STEPS = 20_000
"""Of a longer log every second, third, ... step is read."""
NUM_WORST = 5

_STRETCHES = 100
_HELD_OUT = 5
"""Every fifth stretch."""
_ROUNDS = 30
_SETTLED = 1e-7
"""Relative change of all predictions below which another round is of no use."""
_HUBER = 1.345
"""Times the usual error: from there on an error pulls no harder. With normal noise it costs 5% of precision."""
_OF_MEDIAN = 1.4826
"""The standard deviation of normal noise, in medians of its size."""
_LEAST_USUAL = 0.002
"""Errors below this are as good as none: a log without noise would else call everything an outlier."""
_DIGITS = 6
_SHARED = "shared_kv_read"
_LEAST_SHARE = 1e-6
"""Of any step's time: what adds less to every step is what rounding left, and is told as 0."""


class StepKind(StrEnum):
    PREFILL = "prefill only"
    DECODE = "decode only"
    MIXED = "mixed"

    @classmethod
    def of(cls, step: StepStats) -> StepKind:
        if not step.prefill_tokens:
            return cls.DECODE
        return cls.MIXED if step.batch else cls.PREFILL


class Errors(msgspec.Struct, frozen=True):
    """Relative errors, as shares, of some steps; None where there are no steps."""

    num_steps: int
    median: float | None = None
    p90: float | None = None


class KindErrors(msgspec.Struct, frozen=True):
    """Of one kind of steps, or of all: on those that made the model, and on those that did not."""

    kind: str
    fitted: Errors
    held_out: Errors


class Doubt(msgspec.Struct, frozen=True):
    """A coefficient that the log does not determine, and is therefore 0."""

    coefficient: str
    reason: str
    remedy: str


class BadStep(msgspec.Struct, frozen=True):
    number: int
    """Counted from 1, the header not included."""
    step: StepStats
    predicted_s: float
    error: float
    """Negative where the model is too fast."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a log."""

    latency: LatencyModel
    num_steps: int
    """Read, with work and a time."""
    num_left_out: int
    """The others."""
    errors: tuple[KindErrors, ...]
    doubts: tuple[Doubt, ...]
    worst: tuple[BadStep, ...]


class _Row(msgspec.Struct, frozen=True, gc=False):
    number: int
    step: StepStats


def fit_latency(steps: Sequence[StepStats]) -> Fit:
    """InvalidRequest when there are too few steps to fit and to judge."""
    timed = [
        _Row(number, step)
        for number, step in enumerate(steps, 1)
        if step.time_s > 0 and (step.batch or step.prefill_tokens)
    ]
    rows = timed[:: ceil(len(timed) / MAX_STEPS) or 1]
    if len(rows) < MIN_STEPS:
        raise InvalidRequest(
            f"the step log has {len(rows)} steps with work and a time; {MIN_STEPS} are needed to fit and to judge",
            param="step_log",
            remedy="record a longer run",
        )
    length = ceil(len(rows) / _STRETCHES)
    fitted = [row for at, row in enumerate(rows) if at // length % _HELD_OUT != _HELD_OUT - 1]
    held_out = [row for at, row in enumerate(rows) if at // length % _HELD_OUT == _HELD_OUT - 1]
    model, doubts = fit_all([row.step for row in fitted])
    return Fit(
        latency=model,
        num_steps=len(rows),
        num_left_out=len(steps) - len(timed),
        errors=tuple(_errors(model, fitted, held_out)),
        doubts=tuple(doubts),
        worst=tuple(_worst(model, rows)),
    )


# --- the model


def fit_all(steps: Sequence[StepStats]) -> tuple[LatencyModel, list[Doubt]]:
    """From all of these, which have work and a time: nothing is held out to judge it by."""
    names = LatencyModel.__struct_fields__
    columns = [list(column) for column in zip(*map(features, steps), strict=True)]
    if len({step.batch for step in steps if step.batch}) == 1:
        columns[names.index("batch_s")] = [0.0] * len(steps)
    usable = independent_columns(
        [[value / step.time_s for value, step in zip(column, steps, strict=True)] for column in columns]
    )
    usable_names = [names[at] for at in usable]
    doubts = [
        _doubt(name, steps, [names[each] for each in usable if each < at])
        for at, name in enumerate(names)
        if at not in usable
        and name != _SHARED  # without shared blocks in the log: each sequence reads its own
    ]
    coefficients = _robust_fit([columns[at] for at in usable], steps)
    fitted = {
        # Fewer digits than a float has: the last ones depend on the order in which a Python version adds.
        names[at]: float(f"{value:.{_DIGITS}g}")
        for at, value in zip(usable, coefficients, strict=True)
        if any(value * x > _LEAST_SHARE * step.time_s for x, step in zip(columns[at], steps, strict=True))
    }
    if _SHARED in usable_names:
        # A repeated read never costs more than the first: what is beyond is noise.
        repeated, first = fitted.pop(_SHARED, 0.0), fitted.get("context_token_s", 0.0)
        fitted[_SHARED] = round(min(repeated / first, 1.0), _DIGITS) if first else 1.0
    return LatencyModel(**fitted), doubts


def _robust_fit(columns: Sequence[Sequence[float]], steps: Sequence[StepStats]) -> list[float]:
    """Weighed anew in rounds. The first weighs by the measured time, which is biased towards steps that were
    fast by chance; the next by the predicted one, and by how far off a step was."""
    times = [step.time_s for step in steps]
    coefficients = nonnegative_fit(columns, times, [time_s**-2 for time_s in times])
    predicted = _predictions(columns, coefficients)
    for _ in range(_ROUNDS):
        # Where a model predicts next to nothing the error means nothing: no step weighs more than its time allows.
        bases = [max(told, time_s / 10) for told, time_s in zip(predicted, times, strict=True)]
        errors = [
            abs(told - time_s) / base for told, time_s, base in zip(predicted, times, bases, strict=True)
        ]
        usual = max(_OF_MEDIAN * median(errors), _LEAST_USUAL)
        weights = [
            min(1.0, _HUBER * usual / error) / base**2 if error else base**-2
            for error, base in zip(errors, bases, strict=True)
        ]
        coefficients = nonnegative_fit(columns, times, weights)
        before, predicted = predicted, _predictions(columns, coefficients)
        if all(
            abs(new - old) < _SETTLED * time_s
            for new, old, time_s in zip(predicted, before, times, strict=True)
        ):
            break
    return coefficients


def _predictions(columns: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    return [sum(map(mul, row, coefficients)) for row in zip(*columns, strict=True)]


def _doubt(name: str, steps: Sequence[StepStats], usable: Sequence[str]) -> Doubt:
    """Why the log says nothing about it."""
    batches = {step.batch for step in steps if step.batch}
    if name.startswith("prefill") and not any(step.prefill_tokens for step in steps):
        return Doubt(name, "no step prefills", "record a run in which prompts arrive")
    if name in ("batch_s", "context_token_s") and not batches:
        return Doubt(name, "no step decodes", "record a run with answers of several tokens")
    if name == "batch_s" and len(batches) == 1:
        reason = f"every step that decodes has a batch of {next(iter(batches))}"
        return Doubt(name, reason, "record a run in which the number of requests changes")
    reason = f"it cannot be told apart from {' and '.join(usable)}"
    return Doubt(name, reason, "record a run with prompts and batches of many sizes")


# --- how good it is


def _errors(model: LatencyModel, fitted: Sequence[_Row], held_out: Sequence[_Row]) -> Iterator[KindErrors]:
    for kind in (None, *StepKind):
        chosen = [
            [row.step for row in rows if kind is None or StepKind.of(row.step) is kind]
            for rows in (fitted, held_out)
        ]
        yield KindErrors(kind or "all", *(errors_of(model, steps) for steps in chosen))


def errors_of(model: LatencyModel, steps: Sequence[StepStats]) -> Errors:
    """How far a model is off from what was measured."""
    errors = sorted(abs(model.step_s(step) - step.time_s) / step.time_s for step in steps)
    if not errors:
        return Errors(0)
    return Errors(len(errors), median(errors), errors[ceil(0.9 * len(errors)) - 1])


def _worst(model: LatencyModel, rows: Sequence[_Row]) -> list[BadStep]:
    judged = [(row, model.step_s(row.step)) for row in rows]
    bad = [BadStep(row.number, row.step, told, told / row.step.time_s - 1.0) for row, told in judged]
    return sorted(bad, key=lambda one: -abs(one.error))[:NUM_WORST]
