"""Uniform random numbers for sampling: a pure function of (seed, choice, position).

So a token does not depend on the other rows of its batch, on preemptions, or on migration to another worker. The
function is SplitMix64's finalizer, once per argument:

    h = mix(seed + GAMMA);  h = mix((h ^ choice) + GAMMA);  h = mix((h ^ position) + GAMMA)

and the number is the upper 53 bits of h divided by 2**53. Each step is a bijection of 64-bit integers, so
positions of one choice never repeat a number. Part of the wire contract between workers that resume each
other's requests: the test vectors must never change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = state + _GAMMA
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))


def _words(numbers: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([number & _MASK for number in numbers], dtype=np.uint64)


def uniforms(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """One number in [0, 1) per row. Seeds are taken modulo 2**64."""
    state = _mix(_words(seeds))
    state = _mix(state ^ _words(choices))
    state = _mix(state ^ _words(positions))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_seed(seed: int | None, request_id: str) -> int:
    """The seed of a request; if it has none, one that every worker derives from its id."""
    return xxhash.xxh3_64_intdigest(request_id.encode()) if seed is None else seed
