"""StepFit: by how much longer prompts take at a worker than its step model says. Pure, over rows of a LoadBook.

A worker may have registered no model, or one that was fitted on another machine. What is seen of it is when answers
begin. Between two beginnings a busy worker computed one prompt, however many wait; an idle one began when it was sent
one. So the time that a prompt took is that since the later of the two, and

    factor = seconds that prompts took / seconds that the model says they take

over the latest of them. As a ratio of sums it is right too where prompts are computed together (one begins late, the
others at once after it) and where they wait behind decode steps, which is what a request feels.

It is bounded, and one stall does not count for more than a few prompts. A worker that is avoided for its factor would
never show that it is better now: with no news the factor goes back to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from kvolt.core.latency import Floats
from kvolt.router.policy.load import Rows


class FitOptions(msgspec.Struct, frozen=True, kw_only=True):
    most: float = 256.0
    """The factor, and its inverse, are no more: a guess for a large GPU may be so far off for a laptop."""
    memory: int = 32
    """Prompts that count: one more than so many ago has lost most of its weight."""
    prior: float = 4.0
    """How many prompts must be seen to be believed as much as the model."""
    stall: float = 8.0
    """So many times as long as expected is as much as one prompt may count."""
    least: float = 1.5
    """A factor that is no larger, nor smaller than its inverse, is none: what is seen varies with what else there is to
    compute, and a model that is right must not be made worse ..."""
    whole: float = 2.0
    """... and one that is as large as this counts in full."""
    quiet_s: float = 30.0
    """With no news for this long a factor begins to be forgotten ..."""
    half_life_s: float = 60.0
    """... and is half as far from 1, as a logarithm, after this long."""


_REFRESH_S = 1.0
"""How often it is looked for what was not heard of lately."""


@dataclass(slots=True)
class _Seen:
    """Of one row."""

    real_s: float = 0.0
    told_s: float = 0.0
    num: float = 0.0
    left_s: float = 0.0
    """Of the time before the latest beginning, what was too much for one prompt: others that begin with it share it."""
    log_factor: float = 0.0
    heard_at: float = -math.inf
    """When an answer began there."""


class StepFit:
    """See the module."""

    def __init__(self, options: FitOptions | None = None) -> None:
        self._options = options or FitOptions()
        self._seen: dict[int, _Seen] = {}
        self._factors = np.ones(16)
        self._refresh_at = -math.inf

    def factors(self, rows: Rows | slice, now: float) -> Floats:
        """By which the model's times are to be multiplied."""
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_S
            for row, seen in self._seen.items():
                self._factors[row] = self._factor(seen, now)
        picked: Floats = self._factors[rows]
        return picked

    def add_row(self, row: int) -> None:
        if row >= len(self._factors):
            more = np.ones(max(row + 1, 2 * len(self._factors)) - len(self._factors))
            self._factors = np.concatenate([self._factors, more])

    def drop_row(self, row: int) -> None:
        """The worker is gone; the row may be another's."""
        self._seen.pop(row, None)
        self._factors[row] = 1.0

    def begun(self, row: int, sent_at: float, told_s: float, now: float) -> None:
        """An answer has begun of which the model, uncorrected, said that its prompt takes `told_s`."""
        options = self._options
        seen = self._seen.setdefault(row, _Seen())
        real_s = max(now - max(sent_at, seen.heard_at), 0.0)
        keep = (1.0 - 1.0 / options.memory) * self._fading(seen, sent_at)
        seen.heard_at = now
        if told_s <= 0.0:
            return
        usual_s = max(seen.told_s / seen.num if seen.num else told_s, told_s)
        if real_s > 0.0:
            seen.left_s = real_s
        real_s = min(seen.left_s, options.stall * usual_s * max(math.exp(seen.log_factor), 1.0))
        seen.left_s -= real_s
        seen.real_s = seen.real_s * keep + real_s
        seen.told_s = seen.told_s * keep + told_s
        seen.num = seen.num * keep + 1.0
        most = math.log(options.most)
        ratio = max(seen.real_s / seen.told_s, 1.0 / options.most)
        log_factor = math.log(ratio) * seen.num / (seen.num + options.prior)
        seen.log_factor = min(max(log_factor, -most), most)
        self._factors[row] = self._factor(seen, now)

    def _factor(self, seen: _Seen, now: float) -> float:
        return math.exp(self._beyond_doubt(seen.log_factor) * self._fading(seen, now))

    def _beyond_doubt(self, log_factor: float) -> float:
        least, whole = math.log(self._options.least), math.log(self._options.whole)
        size = min(max(abs(log_factor) - least, 0.0) / (whole - least) * whole, abs(log_factor))
        return math.copysign(size, log_factor)

    def _fading(self, seen: _Seen, now: float) -> float:
        """What is left of what is known."""
        quiet_s = now - seen.heard_at - self._options.quiet_s
        return 1.0 if quiet_s <= 0.0 else 2.0 ** (-quiet_s / self._options.half_life_s)
