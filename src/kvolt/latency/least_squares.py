"""Nonnegative least squares for a handful of columns.

Pure arithmetic. A problem is a list of columns, each a list of numbers, and a target. With so few columns every
subset of nonzero coefficients can be tried, which is exact and always terminates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from operator import mul

Column = Sequence[float]

MAX_COLUMNS = 8
"""Every subset of the columns is tried."""
_ALMOST_ZERO = 1e-9
"""Squared length, relative to the column's own, below which a residual counts as zero."""


def independent_columns(columns: Sequence[Column]) -> list[int]:
    """Indices of the columns that are linearly independent of the ones before them."""
    lengths = [sqrt(_dot(column, column)) for column in columns]
    independent: list[int] = []
    residuals: list[list[float]] = []  # unit vectors: the part orthogonal to the columns before
    for index, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        if not length:
            continue
        residual = [value / length for value in column]
        for _ in range(2):  # the second pass removes the rounding errors of the first
            for other in residuals:
                share = _dot(residual, other)
                residual = [value - share * part for value, part in zip(residual, other, strict=True)]
        rest = _dot(residual, residual)
        if rest > _ALMOST_ZERO:
            independent.append(index)
            residuals.append([value / sqrt(rest) for value in residual])
    return independent


def nonnegative_fit(columns: Sequence[Column], target: Column, weights: Column) -> list[float]:
    """Nonnegative coefficients that minimise the sum of `weight * (predicted - target)**2`.

    The columns must be independent (see above). The result is the best unconstrained fit among all subsets of
    columns whose unconstrained fit has no negative coefficient.
    """
    if len(columns) > MAX_COLUMNS:
        raise ValueError(f"{len(columns)} columns are more than {MAX_COLUMNS}")
    weighted = [list(map(mul, column, weights)) for column in columns]
    scales = [sqrt(_dot(each, column)) or 1.0 for each, column in zip(weighted, columns, strict=True)]
    gram = [
        [_dot(each, other) / scale / other_scale for other, other_scale in zip(columns, scales, strict=True)]
        for each, scale in zip(weighted, scales, strict=True)
    ]
    targets = [_dot(each, target) / scale for each, scale in zip(weighted, scales, strict=True)]
    best, best_gain = [0.0] * len(columns), 0.0
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            matrix = [[gram[row][column] for column in chosen] for row in chosen]
            solution = _solve(matrix, [targets[row] for row in chosen])
            if solution is None or min(solution) < 0:
                continue
            gain = sum(targets[row] * value for row, value in zip(chosen, solution, strict=True))
            if gain > best_gain:
                best, best_gain = [0.0] * len(columns), gain
                for row, value in zip(chosen, solution, strict=True):
                    best[row] = value / scales[row]
    return best


def _solve(matrix: list[list[float]], targets: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting, for a symmetric matrix with unit diagonal; None if it is almost singular."""
    size = len(targets)
    rows = [[*row, value] for row, value in zip(matrix, targets, strict=True)]
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
