from __future__ import annotations

import numpy as np
import pytest

from kvolt.engines.native.sampling.draw import sampling_seed, uniforms

MASK = (1 << 64) - 1


def reference(seed: int, choice: int, position: int) -> float:
    """The documented function in whole numbers of Python."""
    state = 0
    for argument in (seed, choice, position):
        state = ((state ^ (argument & MASK)) + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return (state >> 11) / 2**53


@pytest.mark.parametrize(
    ("seed", "choice", "position", "number"),
    [
        (0, 0, 0, 0.13870941014555427),
        (0, 0, 1, 0.18436667429957676),
        (0, 1, 0, 0.2691303195904541),
        (1, 0, 0, 0.6935121390102292),
        (42, 0, 0, 0.3869742762400409),
        (42, 3, 1000, 0.4898355229252481),
        (-1, 0, 0, 0.9844383619111032),
        (2**63, 7, 2**20, 0.6317370042930445),
    ],
)
def test_vectors_that_may_never_change(seed: int, choice: int, position: int, number: float) -> None:
    assert uniforms([seed], [choice], [position]).tolist() == [number]
    assert reference(seed, choice, position) == number


def test_rows_do_not_depend_on_each_other() -> None:
    seeds, choices, positions = [3, -5, 2**70 + 9, 3], [0, 1, 2, 0], [0, 10, 99, 1]
    together = uniforms(seeds, choices, positions)
    assert together.tolist() == [
        reference(seed, choice, position)
        for seed, choice, position in zip(seeds, choices, positions, strict=True)
    ]
    assert together[2:3].tolist() == uniforms(seeds[2:3], choices[2:3], positions[2:3]).tolist()


def test_seeds_are_taken_modulo_64_bits() -> None:
    assert uniforms([2**64 + 42], [0], [0]) == uniforms([42], [0], [0])
    assert uniforms([-1], [0], [0]) == uniforms([2**64 - 1], [0], [0])


def test_each_argument_gives_numbers_that_are_spread_and_unrelated() -> None:
    count = 20_000
    zeros, steps = [0] * count, list(range(count))
    streams = [uniforms(steps, zeros, zeros), uniforms(zeros, steps, zeros), uniforms(zeros, zeros, steps)]
    for numbers in streams:
        assert numbers.min() >= 0
        assert numbers.max() < 1
        counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
        assert counts.min() > 850  # 1000 expected, deviation 31
        assert counts.max() < 1150
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert abs(np.corrcoef(streams)[np.triu_indices(3, 1)]).max() < 0.03


def test_a_request_without_a_seed_has_one_that_all_workers_agree_on() -> None:
    assert sampling_seed(7, "any") == 7
    assert sampling_seed(0, "any") == 0
    assert sampling_seed(None, "req-1") == 12933278126351659734
    assert sampling_seed(None, "req-2") != sampling_seed(None, "req-1")
