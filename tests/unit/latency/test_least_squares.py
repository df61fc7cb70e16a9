"""Non-negative least squares: exact where it can be, never negative, honest about what depends on what."""

from __future__ import annotations

import random
from itertools import product

import pytest

from kvolt.latency.least_squares import MAX_COLUMNS, independent_columns, nonnegative_fit


def loss(columns: list[list[float]], target: list[float], weights: list[float], at: list[float]) -> float:
    rows = zip(*columns, strict=True)
    return sum(
        weight * (sum(x * value for x, value in zip(row, at, strict=True)) - goal) ** 2
        for row, goal, weight in zip(rows, target, weights, strict=True)
    )


def test_what_made_the_target_is_found_whatever_its_size() -> None:
    rng = random.Random(1)
    true = [3e-3, 2e-5, 4e-10, 0.0]
    columns = [[1.0] * 50, *([rng.uniform(0, size) for _ in range(50)] for size in (1e3, 1e8, 50))]
    target = [
        sum(x * value for x, value in zip(row, true, strict=True)) for row in zip(*columns, strict=True)
    ]
    found = nonnegative_fit(columns, target, [1.0] * 50)
    assert found == pytest.approx(true, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_nothing_near_it_is_better_and_nothing_is_negative(seed: int) -> None:
    rng = random.Random(seed)
    columns = [[rng.uniform(0, 1) for _ in range(12)] for _ in range(4)]
    target = [rng.uniform(-1, 1) for _ in range(12)]
    weights = [rng.uniform(0.1, 2) for _ in range(12)]
    found = nonnegative_fit(columns, target, weights)
    assert min(found) >= 0
    best = loss(columns, target, weights, found)
    for move in product((-1e-3, 0.0, 1e-3), repeat=4):
        there = [max(value + step, 0.0) for value, step in zip(found, move, strict=True)]
        assert loss(columns, target, weights, there) >= best - 1e-12


def test_a_target_that_is_negative_throughout_is_best_met_by_nothing() -> None:
    assert nonnegative_fit([[1.0, 2.0], [3.0, 1.0]], [-1.0, -2.0], [1.0, 1.0]) == [0.0, 0.0]


def test_a_row_without_weight_does_not_count() -> None:
    assert nonnegative_fit([[1.0, 1.0, 1.0]], [2.0, 2.0, 1000.0], [1.0, 1.0, 0.0]) == pytest.approx([2.0])


def test_a_column_that_others_explain_is_found_out() -> None:
    rng = random.Random(2)
    one, other = ([rng.uniform(0, 1e6) for _ in range(30)] for _ in range(2))
    ones, zeros = [1.0] * 30, [0.0] * 30
    both = [3 * x + 1e-3 * y + 5 for x, y in zip(one, other, strict=True)]
    assert independent_columns([ones, one, zeros, other, both]) == [0, 1, 3]
    assert independent_columns([both, other, ones, one]) == [0, 1, 2], "the first of them is as good as any"
    nearly = [x * (1 + rng.uniform(-0.01, 0.01)) for x in one]
    assert independent_columns([ones, one, nearly]) == [0, 1, 2]


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="9 columns"):
        nonnegative_fit([[1.0]] * (MAX_COLUMNS + 1), [1.0], [1.0])
