"""Least squares with coefficients that are never negative, for a handful of columns.

Pure arithmetic: knows no steps. A problem is a list of columns, one list of figures each, and a target. With so few
columns every set of those that are not zero can be tried: that is exact, and has no loop that might not end.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from operator import mul

Column = Sequence[float]

MAX_COLUMNS = 8
"""Of which every subset is tried."""
_ALMOST_ZERO = 1e-9
"""Of a column's squared length: what is left of it when others explain it."""


def independent_columns(columns: Sequence[Column]) -> list[int]:
    """Those that are no sum of multiples of the ones before them, by position."""
    lengths = [sqrt(_dot(column, column)) for column in columns]
    found: list[int] = []
    left_of: list[list[float]] = []  # of each found one, what those before it do not explain, at length 1
    for index, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        if not length:
            continue
        left = [value / length for value in column]
        for _ in range(2):  # the second time takes away what rounding left of the first
            for other in left_of:
                share = _dot(left, other)
                left = [value - share * part for value, part in zip(left, other, strict=True)]
        rest = _dot(left, left)
        if rest > _ALMOST_ZERO:
            found.append(index)
            left_of.append([value / sqrt(rest) for value in left])
    return found


def nonnegative_fit(columns: Sequence[Column], target: Column, weights: Column) -> list[float]:
    """Coefficients of 0 or more with the least sum of `weight * (predicted - target)**2`.

    The columns are independent (see above). The answer is the plain fit of those that it does not set to zero, so it
    is the best plain fit, among all sets of columns, in which none is negative.
    """
    if len(columns) > MAX_COLUMNS:
        raise ValueError(f"{len(columns)} columns are more than {MAX_COLUMNS}")
    weighted = [list(map(mul, column, weights)) for column in columns]
    scales = [sqrt(_dot(each, column)) or 1.0 for each, column in zip(weighted, columns, strict=True)]
    gram = [
        [_dot(each, other) / scale / other_scale for other, other_scale in zip(columns, scales, strict=True)]
        for each, scale in zip(weighted, scales, strict=True)
    ]
    goal = [_dot(each, target) / scale for each, scale in zip(weighted, scales, strict=True)]
    best, best_gain = [0.0] * len(columns), 0.0
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            matrix = [[gram[row][column] for column in chosen] for row in chosen]
            found = _solve(matrix, [goal[row] for row in chosen])
            if found is None or min(found) < 0:
                continue
            gain = sum(goal[row] * value for row, value in zip(chosen, found, strict=True))
            if gain > best_gain:
                best, best_gain = [0.0] * len(columns), gain
                for row, value in zip(chosen, found, strict=True):
                    best[row] = value / scales[row]
    return best


def _solve(matrix: list[list[float]], goal: list[float]) -> list[float] | None:
    """Gauss, pivoted. The matrix is symmetric with ones on its diagonal; None where it is as good as singular."""
    size = len(goal)
    rows = [[*row, value] for row, value in zip(matrix, goal, strict=True)]
    for step in range(size):
        pivot = max(range(step, size), key=lambda row: abs(rows[row][step]))
        rows[step], rows[pivot] = rows[pivot], rows[step]
        head = rows[step]
        if abs(head[step]) < _ALMOST_ZERO:
            return None
        for row in rows[step + 1 :]:
            share = row[step] / head[step]
            for column in range(step, size + 1):
                row[column] -= share * head[column]
    answer = [0.0] * size
    for step in reversed(range(size)):
        known = sum(rows[step][column] * answer[column] for column in range(step + 1, size))
        answer[step] = (rows[step][size] - known) / rows[step][step]
    return answer


def _dot(one: Column, other: Column) -> float:
    total: float = sum(map(mul, one, other))
    return total
