"""Fits a LatencyModel to a step log and reports the model's errors. Pure.

The fit minimises relative errors: predicting 10 ms for a decode of 5 ms is as wrong as predicting 200 ms for a
prefill of 100 ms. Outliers (the first steps, a pause of the machine) have bounded weight (Huber loss). They are
not dropped, because next to many regular decodes the few prefills of a log would all count as outliers.

Four fifths of the log are fitted, the rest is held out for the error report. Consecutive steps are almost equal,
so contiguous stretches are held out, not single steps.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from enum import StrEnum
from math import ceil
from operator import mul
from statistics import median

import msgspec

from kvolt.core.errors import InvalidRequest
from kvolt.core.latency import LatencyModel, fit_features
from kvolt.core.load import StepStats
from kvolt.latency.least_squares import independent_columns, nonnegative_fit

MIN_STEPS = 20
MAX_STEPS = 20_000
"""Longer logs are subsampled to every second, third, ... step."""
NUM_WORST = 5

_STRETCHES = 100
_HELD_OUT = 5
"""Every fifth stretch is held out."""
_ROUNDS = 30
_CONVERGED = 1e-7
"""Convergence: largest relative change of a prediction in the last round."""
_HUBER = 1.345
"""Huber threshold, in multiples of the typical error. Costs 5 % of precision with normal noise."""
_STD_PER_MEDIAN = 1.4826
"""Standard deviation of normal noise divided by its median absolute value."""
_MIN_TYPICAL_ERROR = 0.002
"""Lower bound of the typical error: in a log without noise all steps would be outliers otherwise."""
_BAD_ERROR = 0.5
"""Held-out p90 error above which a fit has a warning: steps are predicted wrong by half or more."""
_DIGITS = 6
_SHARED = "shared_kv_read"
_LEAST_SHARE = 1e-6
"""A coefficient that contributes less than this share to every step is rounding noise and is set to 0."""


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
    """Relative errors of a set of steps; None if there are none."""

    num_steps: int
    median: float | None = None
    p90: float | None = None


class KindErrors(msgspec.Struct, frozen=True):
    """Errors for one kind of steps, or for all, on the fitted and on the held-out part of the log."""

    kind: str
    fitted: Errors
    held_out: Errors


class UndeterminedCoefficient(msgspec.Struct, frozen=True):
    """A coefficient that the log does not determine; it is 0 in the model."""

    coefficient: str
    reason: str
    remedy: str


class BadStep(msgspec.Struct, frozen=True):
    number: int
    """Position in the log, from 1, without the header."""
    step: StepStats
    predicted_s: float
    error: float
    """Relative error; negative if the model predicts too short a time."""


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """A fitted model with its error report."""

    latency: LatencyModel
    num_steps: int
    """Number of steps used: those with work and a time, subsampled in a long log."""
    num_left_out: int
    """Number of steps without work or time."""
    errors: tuple[KindErrors, ...]
    undetermined: tuple[UndeterminedCoefficient, ...]
    worst: tuple[BadStep, ...]
    warnings: tuple[str, ...]
    """What is wrong in simulations with this model, and what a better log needs."""


class _Row(msgspec.Struct, frozen=True, gc=False):
    number: int
    step: StepStats


def fit_latency(steps: Sequence[StepStats]) -> Fit:
    """Fit a model to a step log. InvalidRequest if there are too few steps to fit and to hold out."""
    timed = [
        _Row(number, step)
        for number, step in enumerate(steps, 1)
        if step.time_s > 0 and (step.batch or step.prefill_tokens)
    ]
    rows = timed[:: ceil(len(timed) / MAX_STEPS) or 1]
    if len(rows) < MIN_STEPS:
        raise InvalidRequest(
            f"the step log has {len(rows)} steps with work and a time; at least {MIN_STEPS} are needed",
            param="step_log",
            remedy="record a longer run",
        )
    length = ceil(len(rows) / _STRETCHES)
    fitted = [row for at, row in enumerate(rows) if at // length % _HELD_OUT != _HELD_OUT - 1]
    held_out = [row for at, row in enumerate(rows) if at // length % _HELD_OUT == _HELD_OUT - 1]
    model, undetermined = fit_all([row.step for row in fitted])
    errors = tuple(_errors(model, fitted, held_out))
    return Fit(
        latency=model,
        num_steps=len(rows),
        num_left_out=len(steps) - len(timed),
        errors=errors,
        undetermined=tuple(undetermined),
        worst=tuple(_worst(model, rows)),
        warnings=tuple(_warnings(model, {doubt.coefficient for doubt in undetermined}, errors)),
    )


# --- the model


def fit_all(steps: Sequence[StepStats]) -> tuple[LatencyModel, list[UndeterminedCoefficient]]:
    """Fit a model to all of these steps, which must have work and a time; nothing is held out."""
    names = LatencyModel.__struct_fields__
    columns = [list(column) for column in zip(*map(fit_features, steps), strict=True)]
    if len({step.batch for step in steps if step.batch}) == 1:
        columns[names.index("batch_s")] = [0.0] * len(steps)
    usable = independent_columns(
        [[value / step.time_s for value, step in zip(column, steps, strict=True)] for column in columns]
    )
    usable_names = [names[at] for at in usable]
    undetermined = [
        _undetermined(name, steps, [names[each] for each in usable if each < at])
        for at, name in enumerate(names)
        if at not in usable
        and name != _SHARED  # without shared blocks in the log: each sequence reads its own
    ]
    coefficients = _robust_fit([columns[at] for at in usable], steps)
    fitted = {
        # Rounded: the last digits of a float depend on the summation order of the Python version.
        names[at]: float(f"{value:.{_DIGITS}g}")
        for at, value in zip(usable, coefficients, strict=True)
        if any(value * x > _LEAST_SHARE * step.time_s for x, step in zip(columns[at], steps, strict=True))
    }
    if _SHARED in usable_names:
        # A repeated read never costs more than the first one; a larger value is noise.
        repeated, first = fitted.pop(_SHARED, 0.0), fitted.get("context_token_s", 0.0)
        fitted[_SHARED] = round(min(repeated / first, 1.0), _DIGITS) if first else 1.0
    return LatencyModel(**fitted), undetermined


def _robust_fit(columns: Sequence[Sequence[float]], steps: Sequence[StepStats]) -> list[float]:
    """Iteratively reweighted least squares. The first round weighs steps by their measured times, which
    favours steps that were fast by chance; later rounds by the predicted times and the size of the error."""
    times = [step.time_s for step in steps]
    coefficients = nonnegative_fit(columns, times, [time_s**-2 for time_s in times])
    predicted = _predictions(columns, coefficients)
    for _ in range(_ROUNDS):
        # Bound the weight of steps for which the model predicts almost nothing.
        bases = [max(predicted_s, time_s / 10) for predicted_s, time_s in zip(predicted, times, strict=True)]
        errors = [
            abs(predicted_s - time_s) / base
            for predicted_s, time_s, base in zip(predicted, times, bases, strict=True)
        ]
        typical_error = max(_STD_PER_MEDIAN * median(errors), _MIN_TYPICAL_ERROR)
        weights = [
            min(1.0, _HUBER * typical_error / error) / base**2 if error else base**-2
            for error, base in zip(errors, bases, strict=True)
        ]
        coefficients = nonnegative_fit(columns, times, weights)
        before, predicted = predicted, _predictions(columns, coefficients)
        if all(
            abs(new - old) < _CONVERGED * time_s
            for new, old, time_s in zip(predicted, before, times, strict=True)
        ):
            break
    return coefficients


def _predictions(columns: Sequence[Sequence[float]], coefficients: Sequence[float]) -> list[float]:
    return [sum(map(mul, row, coefficients)) for row in zip(*columns, strict=True)]


def _undetermined(name: str, steps: Sequence[StepStats], usable: Sequence[str]) -> UndeterminedCoefficient:
    """Explain why the log does not determine this coefficient."""
    batches = {step.batch for step in steps if step.batch}
    if name.startswith("prefill") and not any(step.prefill_tokens for step in steps):
        return UndeterminedCoefficient(name, "no step prefills", "record a run in which prompts arrive")
    if name in ("batch_s", "context_token_s") and not batches:
        return UndeterminedCoefficient(name, "no step decodes", "record a run with answers of several tokens")
    if name == "batch_s" and len(batches) == 1:
        reason = f"every step that decodes has a batch of {next(iter(batches))}"
        return UndeterminedCoefficient(name, reason, "record a run in which the number of requests changes")
    reason = f"it cannot be separated from {' and '.join(usable)}"
    return UndeterminedCoefficient(name, reason, "record a run with prompts and batches of many sizes")


# --- error report


def _errors(model: LatencyModel, fitted: Sequence[_Row], held_out: Sequence[_Row]) -> Iterator[KindErrors]:
    for kind in (None, *StepKind):
        chosen = [
            [row.step for row in rows if kind is None or StepKind.of(row.step) is kind]
            for rows in (fitted, held_out)
        ]
        yield KindErrors(kind or "all", *(errors_of(model, steps) for steps in chosen))


def _warnings(
    model: LatencyModel, undetermined: Container[str], errors: Sequence[KindErrors]
) -> Iterator[str]:
    bad = [row for row in errors if (row.held_out.p90 or 0.0) > _BAD_ERROR]
    if bad:
        worst = ", ".join(f"{row.kind} {row.held_out.p90:.0%}" for row in bad)
        yield (
            f"large held-out errors (p90: {worst}): simulated times will be as wrong; record more steps, with "
            "prompts and batches of many sizes, on a machine that is otherwise idle"
        )
    if not model.prefill_token_s and "prefill_token_s" not in undetermined:
        yield (
            "prefill_token_s is 0: simulated prompts cost too little; record more steps with prompts of many "
            "lengths, from some tokens to the longest ones"
        )


def errors_of(model: LatencyModel, steps: Sequence[StepStats]) -> Errors:
    """Errors of a model against measured times."""
    errors = sorted(abs(model.step_s(step) - step.time_s) / step.time_s for step in steps)
    if not errors:
        return Errors(0)
    return Errors(len(errors), median(errors), errors[ceil(0.9 * len(errors)) - 1])


def _worst(model: LatencyModel, rows: Sequence[_Row]) -> list[BadStep]:
    steps: list[BadStep] = []
    for row in rows:
        predicted_s = model.step_s(row.step)
        steps.append(BadStep(row.number, row.step, predicted_s, predicted_s / row.step.time_s - 1.0))
    return sorted(steps, key=lambda step: -abs(step.error))[:NUM_WORST]
