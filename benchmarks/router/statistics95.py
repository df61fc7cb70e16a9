"""Means over seeds with their 95 % intervals. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

_T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
)
"""Student's t, two-sided, by degrees of freedom from 1 on."""
_NORMAL = 1.96


class Interval(msgspec.Struct, frozen=True):
    """A mean over seeds, and how far from it that of all seeds may be."""

    mean: float
    half: float

    def text(self, form: str = ".2f") -> str:
        return f"{self.mean:{form}} ± {self.half:{form}}"


def interval(values: Sequence[float]) -> Interval:
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, 0.0)
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else _NORMAL
    return Interval(mean, quantile * statistics.stdev(values) / len(values) ** 0.5)
