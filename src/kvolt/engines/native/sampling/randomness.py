"""Uniform numbers for sampling: a function of (seed, choice, position) and of nothing else.

So a token does not depend on which rows share its batch, on how often its sequence was preempted, or on
which worker goes on with it. The function is SplitMix64's finalizer, once per argument:

    h = mix(seed + GAMMA);  h = mix((h ^ choice) + GAMMA);  h = mix((h ^ position) + GAMMA)

and the number is the upper 53 bits of h over 2**53. Each step is a bijection of 64-bit integers, so the
positions of one choice never repeat. Part of the wire contract between workers that resume each other's
requests: the vectors in its test may never change.
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
    """One number in [0, 1) per row. Seeds of any size and sign are taken modulo 2**64."""
    state = _mix(_words(seeds))
    state = _mix(state ^ _words(choices))
    state = _mix(state ^ _words(positions))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def sampling_seed(seed: int | None, request_id: str) -> int:
    """The seed of a request: its own or, where it names none, one that every worker derives alike."""
    return xxhash.xxh3_64_intdigest(request_id.encode()) if seed is None else seed
